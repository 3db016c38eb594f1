"""A node changes its role while requests run: none is lost, no token is wrong, and its model and KV stay warm."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest


def prompt(seed: int, length: int = 200) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


def switch(cluster: Any, node_id: str, role: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moonpool", "switch", node_id, role, "--ready-file", str(cluster.ready_file)]
    return subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture(scope="module")
def cluster(start_paced: Callable[..., Any]) -> Any:
    with start_paced("--prefill-nodes", "2", "--decode-nodes", "1", "--block-tokens", "8") as running:
        yield running


async def test_a_prefill_node_decodes_and_prefills_again_while_requests_run(
    cluster: Any, paced_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    asked = [prompt(seed) for seed in range(32)]
    pid = cluster.pid("prefill-1")
    running = [
        asyncio.create_task(cluster.complete(session, ids, max_tokens=150, temperature=0.0, ignore_eos=True))
        for ids in asked[:8]
    ]
    done = await asyncio.to_thread(switch, cluster, "prefill-1", "decode")
    assert done.returncode == 0, done.stderr
    assert "prefill-1 is a decode node" in done.stdout
    running += [
        asyncio.create_task(cluster.complete(session, ids, max_tokens=150, temperature=0.0, ignore_eos=True))
        for ids in asked[8:24]  # more than decode-0 has still to decode: both nodes get some
    ]
    spread = await asyncio.gather(*running[8:])
    assert {answer.moonpool["decode_node"] for answer in spread} == {"decode-0", "prefill-1"}
    assert {answer.moonpool["prefill_node"] for answer in spread} == {"prefill-0"}
    done = await asyncio.to_thread(switch, cluster, "prefill-1", "prefill")
    assert done.returncode == 0, done.stderr
    running += [
        asyncio.create_task(cluster.complete(session, ids, max_tokens=20, temperature=0.0, ignore_eos=True))
        for ids in asked[24:]
    ]
    answers = await asyncio.gather(*running)
    assert "prefill-1" in {answer.moonpool["prefill_node"] for answer in answers[24:]}
    judge = judge_of(paced_model)
    assert [judge.wrong_tokens(answer) for answer in answers] == [[]] * len(asked)
    assert cluster.pid("prefill-1") == pid
    await cluster.validate()


@pytest.mark.parametrize(
    ("node_id", "role", "said"),
    [
        ("decode-0", "prefill", "the last decode node"),
        ("prefill-0", "prefill", "is already a prefill node"),
        ("pool-0", "decode", "is a pool node and cannot become a decode"),
        ("nobody", "decode", "unknown node 'nobody'"),
        ("prefill-0", "aggregated", "ROLE must be prefill or decode"),
    ],
)
def test_a_change_that_cannot_be_is_refused_by_name(cluster: Any, node_id: str, role: str, said: str) -> None:
    done = switch(cluster, node_id, role)
    assert done.returncode != 0
    assert said in done.stderr
