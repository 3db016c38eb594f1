"""Scaling, draining and hanging under load: every running answer ends with its right tokens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

LONG: dict[str, Any] = {"max_tokens": 500, "ignore_eos": True, "temperature": 0.8, "seed": 42}
HANG_S = 4


def prompt(seed: int, length: int = 120) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


class Streamed:
    """One streamed completion and the nodes that the last of it came from."""

    def __init__(self, session: aiohttp.ClientSession, cluster: Any, prompt_ids: list[int]) -> None:
        self.prompt_ids = prompt_ids
        self.token_ids: list[int] = []
        self.moonpool: dict[str, Any] = {}
        self._news = asyncio.Event()
        self.task = asyncio.create_task(self._read(session, cluster))

    async def _read(self, session: aiohttp.ClientSession, cluster: Any) -> None:
        body = {"model": cluster.ready["model"], "prompt": self.prompt_ids, "stream": True, "return_token_ids": True}
        async with session.post(f"{cluster.url}/v1/completions", json={**body, **LONG}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    self.token_ids += choice.get("token_ids") or []
                self.moonpool = event.get("moonpool") or self.moonpool
                self._news.set()

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.token_ids) < count:
                self._news.clear()
                await self._news.wait()


@pytest.fixture(scope="module")
def cluster(start_paced: Callable[..., Any]) -> Any:
    with start_paced("--block-tokens", "8", "--hang-timeout", str(HANG_S), "--worker-drain-grace", "3") as running:
        yield running


async def moonpool(cluster: Any, *arguments: str) -> tuple[int, str]:
    """(exit code, output) of a command on this cluster."""
    command = [sys.executable, "-m", "moonpool", *arguments, "--ready-file", str(cluster.ready_file)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=200)
    return done.returncode, done.stdout.decode() + done.stderr.decode()


def workers(cluster: Any) -> set[str]:
    cluster.reload()
    return {node_id for node_id in cluster.ready["nodes"] if node_id.startswith(("prefill", "decode"))}


async def check(answers: list[Streamed], judge: Any) -> None:
    await asyncio.gather(*(answer.task for answer in answers))
    for answer in answers:
        assert len(answer.token_ids) == LONG["max_tokens"]
        assert judge.wrong_tokens(answer, temperature=0.8, seed=42) == []


@pytest.mark.nightly
async def test_scaling_up_and_down_under_load_loses_nothing(
    cluster: Any, paced_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    code, said = await moonpool(cluster, "scale", "prefill=2", "decode=2")
    assert code == 0, said
    assert workers(cluster) == {"prefill-0", "prefill-1", "decode-0", "decode-1"}
    answers = [Streamed(session, cluster, prompt(seed)) for seed in range(6)]
    await asyncio.gather(*(answer.reach(10) for answer in answers))
    code, said = await moonpool(cluster, "scale", "prefill=1", "decode=1")
    assert code == 0, said
    assert [line.split()[:2] for line in said.splitlines() if "decode-1" in line] == [
        ["decode-1", "draining"],
        ["decode-1", "gone"],
    ]
    assert workers(cluster) == {"prefill-0", "decode-0"}
    await check(answers, judge_of(paced_model))
    # New ids are fresh: a node that left is never taken for a new one.
    code, said = await moonpool(cluster, "scale", "decode=2")
    assert code == 0, said
    assert workers(cluster) == {"prefill-0", "decode-0", "decode-2"}
    await cluster.validate()


async def test_a_drained_node_hands_over_what_it_does_not_finish_and_does_not_come_back(
    cluster: Any, paced_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    code, said = await moonpool(cluster, "scale", "decode=2")
    assert code == 0, said
    (newest,) = workers(cluster) - {"prefill-0", "decode-0"}
    answers = [Streamed(session, cluster, prompt(10 + seed)) for seed in range(4)]
    await asyncio.gather(*(answer.reach(10) for answer in answers))
    code, said = await moonpool(cluster, "drain", newest)
    assert code == 0, said
    await check(answers, judge_of(paced_model))
    assert {answer.moonpool["decode_node"] for answer in answers} <= {"decode-0", newest}
    async with asyncio.timeout(30):  # the conductor told that the node has left before its supervisor sees its end
        while workers(cluster) != {"prefill-0", "decode-0"}:
            await asyncio.sleep(0.05)
    await cluster.validate()
    assert workers(cluster) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("scale", "decode=0"), "--force"),
        (("scale", "pool=2"), "one pool node"),
        (("drain", "decode-0"), "--force"),
        (("drain", "pool-0"), "drain these first"),
        (("drain", "decode-77"), "joined nodes: decode-0"),
    ],
)
async def test_what_would_stop_the_service_is_refused(cluster: Any, arguments: tuple[str, ...], said: str) -> None:
    code, output = await moonpool(cluster, *arguments)
    assert code != 0
    assert said in output
    assert {"prefill-0", "decode-0"} <= workers(cluster)


@pytest.mark.parametrize(
    "victim",
    [
        "decode-0",
        pytest.param("conductor", marks=pytest.mark.long),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("pool-0", "frontend")),
    ],
)
async def test_a_process_that_hangs_is_started_again(
    victim: str, cluster: Any, paced_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    pid = cluster.pid(victim)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await cluster.wait_restarted(victim, pid)
    answer = await cluster.complete(session, prompt(20), max_tokens=6, temperature=0.0)
    assert judge_of(paced_model).wrong_tokens(answer) == []
    assert re.search(rf"{victim} +ended \(it hung: silent for", cluster.log.read_text())
