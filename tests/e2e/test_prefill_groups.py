"""A live cluster whose prefill nodes compute long prompts together: right tokens, also when a member is killed."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine.random_model import RandomModelSpec, write_random_model
from moonpool_proto.v1.common_pb2 import JsonRequest
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import open_channel
from tests.long_cases import others_long

MEMBERS = ("prefill-0", "prefill-1")


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory: pytest.TempPathFactory, random_model: Path) -> Path:
    """A prompt of some thousand tokens takes it seconds."""
    return write_random_model(
        tmp_path_factory.mktemp("slow"),
        RandomModelSpec(layers=4, hidden=256, heads=8, kv_heads=4, vocab=2048, max_len=4096, scale=2.0, seed=11),
        tokenizer=random_model,
    )


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "decisions"


@pytest.fixture(scope="module")
def cluster(slow_model: Path, start_cluster: Callable[..., Any], log: Path) -> Any:
    flags = ["--prefill-nodes", "2", "--prefill-group-size", "2", "--prefill-group-min-tokens", "512"]
    flags += ["--prefill-chunk-tokens", "256", "--decision-log", str(log)]
    with start_cluster(slow_model, *flags) as running:
        yield running


async def state(cluster: Any, node_id: str) -> dict[str, Any]:
    cluster.reload()
    channel = open_channel(cluster.ready["nodes"][node_id]["target"])
    try:
        reply = await WorkerStub(channel).State(JsonRequest(), timeout=60)
        return dict(json.loads(reply.json))
    finally:
        await channel.close()


async def group_of(cluster: Any) -> tuple[str, str]:
    """(head, helper) of the group that computes now."""
    async with asyncio.timeout(60):
        while True:
            for helper, head in (MEMBERS, MEMBERS[::-1]):
                found = await state(cluster, helper)
                if found["counts"]["receiving"] and not found["counts"]["held"]:
                    return head, helper
            await asyncio.sleep(0.01)


async def test_a_long_prompt_is_computed_by_both_and_the_decision_says_so(
    cluster: Any, slow_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession,
    moonpool: Callable[..., subprocess.CompletedProcess[str]],
) -> None:  # fmt: skip
    answer = await cluster.complete(session, prompt(1, 1200), max_tokens=8, temperature=0.8, seed=3)
    short = await cluster.complete(session, prompt(2, 200), max_tokens=4, temperature=0.0)
    states = [await state(cluster, node_id) for node_id in MEMBERS]
    assert sum(one["counters"].get("prefill_groups", 0) for one in states) == 1
    assert sum(one["counters"].get("helped_tokens", 0) for one in states) == 624  # of 1200 in 6 chunks
    await cluster.validate()
    told = moonpool("explain", answer.body["id"], "--ready-file", cluster.ready_file)
    assert "computed together with prefill-1" in told.stdout, told.stdout + told.stderr
    assert judge_of(slow_model).wrong_tokens(answer, temperature=0.8, seed=3) == []
    assert judge_of(slow_model).wrong_tokens(short) == []


@pytest.mark.parametrize("victim", others_long(["head", "helper"], ["head"]))
async def test_a_prompt_survives_the_death_of_its(
    victim: str, cluster: Any, slow_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    ids = prompt(5 if victim == "head" else 6, 2500)
    asked = asyncio.ensure_future(cluster.complete(session, ids, max_tokens=8, temperature=0.0))
    head, helper = await group_of(cluster)
    killed = head if victim == "head" else helper
    old = cluster.kill(killed)
    answer = await asked
    assert judge_of(slow_model).wrong_tokens(answer) == []
    assert (answer.moonpool["attempts"] == 1) == (victim == "helper")
    await cluster.wait_restarted(killed, old)
    await cluster.validate()
