"""Keeps a node joined to every conductor, and tells all of them the same: any of them may place a request here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from moonpool_proto.v1.conductor_pb2 import Node, NodeCommand, NodeReport, Phase
from worker.errors import StartupError
from worker.join_stream import JoinStream


class Reporter:
    """One stream per conductor; a conductor that is away keeps none of the others waiting."""

    def __init__(
        self,
        node: Node,
        conductor_targets: Sequence[str],
        fill: Callable[[NodeReport], None],
        on_command: Callable[[NodeCommand], None],
    ) -> None:
        """`fill(report)` adds the current load, held requests and counters. Any conductor may give a command."""
        self._streams = [JoinStream(node, target, fill, on_command) for target in conductor_targets]

    def announce(self, node: Node) -> None:
        """Tell all conductors what the node is from now on."""
        for stream in self._streams:
            stream.announce(node)

    def hurry(self) -> None:
        """Report now."""
        for stream in self._streams:
            stream.hurry()

    def took(self) -> None:
        """A request was taken in, of which only the conductor that placed it knows: the others learn of it now."""
        if len(self._streams) > 1:
            self.hurry()

    def progress(self, request_id: str, attempt: int, phase: Phase.ValueType) -> None:
        for stream in self._streams:
            stream.progress(request_id, attempt, phase)

    def prefill(self, new_tokens: int, reused_tokens: int, seconds: float) -> None:
        for stream in self._streams:
            stream.prefill(new_tokens, reused_tokens, seconds)

    def decode(self, batch: int, context_tokens: int, seconds: float) -> None:
        for stream in self._streams:
            stream.decode(batch, context_tokens, seconds)

    def transfer(self, path: str, nbytes: int, seconds: float) -> None:
        for stream in self._streams:
            stream.transfer(path, nbytes, seconds)

    async def run(self) -> None:
        """Join all, and join again whenever a stream ends, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run(), name=f"reports to {stream.target}")

    async def first_join(self) -> None:
        """Wait until one conductor has taken this node in. Raises StartupError when every one of them refuses it."""
        waits: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(event.wait()) for each in self._streams for event in (each.joined, each.refused)
        ]
        try:
            pending = set(waits)
            while pending and not any(stream.has_joined for stream in self._streams):
                if all(stream.is_kept_out for stream in self._streams):
                    told = (
                        f"the conductor at {each.target} refused this node: {each.last_refusal}"
                        for each in self._streams
                    )
                    raise StartupError("; ".join(told))
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
