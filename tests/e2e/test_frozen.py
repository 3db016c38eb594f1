"""A process that hangs (SIGSTOP) instead of dying: answers move away within seconds, and nothing new goes there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

LONG: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True, "temperature": 0.8, "seed": 42}
NO_RESTART = ("--hang-timeout", "0")  # what hangs here wakes up again
NOTICED_S = 25.0  # 5 s of silence, a tick, a look, and a busy machine; the idle limit alone would take 60


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


@pytest.fixture(scope="module")
def cluster(start_paced: Callable[..., Any]) -> Any:
    flags = ["--prefill-nodes", "2", "--decode-nodes", "2", "--pool-nodes", "2", "--block-tokens", "8", *NO_RESTART]
    with start_paced(*flags) as running:
        yield running


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing inside."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Streamed:
    """One streamed completion: its tokens, and when each came."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Any, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.at_s: list[float] = []
        self.moonpool: dict[str, Any] = {}
        self._news = asyncio.Event()
        body = {"model": cluster.ready["model"], "prompt": prompt_ids, "stream": True, "return_token_ids": True, **LONG}
        self.task = asyncio.create_task(self._read(session, f"{cluster.url}/v1/completions", body))

    async def _read(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> None:
        async with session.post(url, json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    self.token_ids += choice.get("token_ids") or []
                self.at_s.append(time.monotonic())
                self.moonpool = event.get("moonpool") or self.moonpool
                self._news.set()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.token_ids) < count:
                self._news.clear()
                await self._news.wait()


async def suspects(session: aiohttp.ClientSession, cluster: Any, expected: set[str]) -> None:
    """Wait until exactly these nodes are exported as not up."""
    async with asyncio.timeout(NOTICED_S):
        while True:
            async with session.get(f"{cluster.url}/metrics") as response:
                lines = (await response.text()).splitlines()
            down = [line for line in lines if line.startswith("moonpool:node_up") and line.endswith(" 0.0")]
            if {line.split('node="')[1].split('"')[0] for line in down} == expected:
                return
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_a_request_waits_for_the_only_prefill_nodes_to_wake_up(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    pids = [cluster.pid(name) for name in ("prefill-0", "prefill-1")]
    with stopped(pids[0]), stopped(pids[1]):
        # Asked before anybody has noticed, of a frontend that never spoke to the nodes.
        asking = asyncio.create_task(cluster.complete(session, prompt(1, 60), max_tokens=6, temperature=0.0))
        await suspects(session, cluster, {"prefill-0", "prefill-1"})
        assert not asking.done()
    answer = await asking
    assert len(answer.token_ids) == 6
    assert answer.moonpool["prefill_node"] in ("prefill-0", "prefill-1")
    await suspects(session, cluster, set())
    await cluster.validate()


async def test_answers_go_on_elsewhere_when_their_decode_node_hangs(
    cluster: Any, paced_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    answers = [Streamed(session, cluster, prompt(seed, 100 + 8 * seed)) for seed in range(4)]
    try:
        await asyncio.gather(*(answer.reach(10) for answer in answers))
        pid = cluster.pid("decode-0")
        assert pid is not None
        with stopped(pid):
            await asyncio.gather(*(answer.task for answer in answers))
            await suspects(session, cluster, {"decode-0"})
        judge = judge_of(paced_model)
        for answer in answers:
            assert len(answer.token_ids) == LONG["max_tokens"]
            assert answer.moonpool["decode_node"] == "decode-1"
            assert judge.wrong_tokens(answer, temperature=0.8, seed=42) == []
        moved = [answer for answer in answers if answer.moonpool["attempts"] == 2]
        assert moved
        gaps = [max(later - sooner for sooner, later in pairwise(answer.at_s)) for answer in moved]
        assert all(gap < NOTICED_S for gap in gaps), gaps
    finally:
        for answer in answers:
            answer.task.cancel()
        await asyncio.gather(*(answer.task for answer in answers), return_exceptions=True)
    await suspects(session, cluster, set())
    await cluster.validate()
    assert cluster.pid("decode-0") == pid  # it was neither restarted nor replaced


@pytest.mark.long
async def test_new_requests_are_served_while_a_prefill_node_hangs(
    cluster: Any, paced_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    pid = cluster.pid("prefill-0")
    assert pid is not None
    judge = judge_of(paced_model)
    with stopped(pid):
        # Half of these may be placed on the node before its silence is noticed.
        asked = [prompt(200 + seed, 150) for seed in range(4)]
        began_s = time.monotonic()
        early = await asyncio.gather(*(cluster.complete(session, p, max_tokens=6, temperature=0.0) for p in asked))
        assert time.monotonic() - began_s < NOTICED_S
        await suspects(session, cluster, {"prefill-0"})
        late = [await cluster.complete(session, prompt(300, 150), max_tokens=6, temperature=0.0)]
        for answer in (*early, *late):
            assert judge.wrong_tokens(answer) == []
            assert answer.moonpool["prefill_node"] == "prefill-1"
        assert late[0].moonpool["attempts"] == 1
    await suspects(session, cluster, set())
    await cluster.validate()
