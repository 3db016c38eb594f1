"""Polls /metrics while a replay runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import aiohttp

from loadtest.cluster_metrics import ClusterHistory, parse_metrics

_TIMEOUT_S = 5.0
_STILL_POLLS = 2


class MetricsPoller:
    """Polls one server. A poll that fails is counted and does not end the replay."""

    def __init__(
        self, session: aiohttp.ClientSession, base_url: str, *, clock: Callable[[], float], every_s: float
    ) -> None:
        self._session = session
        self._url = f"{base_url}/metrics"
        self._clock = clock
        self._every_s = every_s
        self.history = ClusterHistory()

    async def poll(self) -> bool:
        """Take one sample; False when the server gave none."""
        try:
            async with self._session.get(self._url, timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as response:
                response.raise_for_status()
                sample = parse_metrics(await response.text(), self._clock())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            self.history.failed_polls += 1
            return False
        self.history.add(sample)
        return True

    async def run(self) -> None:
        """Poll for ever, until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._every_s)

    async def settle(self, *, at_most_s: float) -> None:
        """After the last answer: poll until the counters stand still, at most that long.

        Nodes report once a second, and background stores end a little after the answers.
        """
        deadline = self._clock() + at_most_s
        still = 0
        while still < _STILL_POLLS and self._clock() < deadline and await self.poll():
            increases = self.history.increases
            still = still + 1 if len(increases) > 1 and increases[-1] == increases[-2] else 0
            await asyncio.sleep(self._every_s)
