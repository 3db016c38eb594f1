"""Two conductors, each of which places any request: one dies or hangs, the other goes on, and both know the same."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from messenger.control import open_channel
from moonpool_proto.v1 import common_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub

CONDUCTORS = ("conductor", "conductor-1")
KNOWN_S = 60.0


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


async def state_of(cluster: Any, name: str) -> dict[str, Any]:
    target = cluster.ready["nodes"][name]["target"]
    async with open_channel(target) as channel:
        reply = await ConductorStub(channel).State(common_pb2.JsonRequest(), wait_for_ready=True, timeout=30)
    state: dict[str, Any] = json.loads(reply.json)
    return state


async def placed_by(cluster: Any) -> dict[str, int]:
    """Requests placed, by conductor."""
    return {name: (await state_of(cluster, name))["counters"].get("placed", 0) for name in CONDUCTORS}


async def until(holds: Callable[[dict[str, dict[str, Any]]], bool], cluster: Any) -> dict[str, dict[str, Any]]:
    """Both conductors' states, once `holds` of them."""
    deadline_s = time.monotonic() + KNOWN_S
    while True:
        states = {name: await state_of(cluster, name) for name in CONDUCTORS}
        if holds(states):
            return states
        assert time.monotonic() < deadline_s, states
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any]) -> Any:
    with start_cluster(random_model, "--conductors", "2", "--hang-timeout", "0", "--block-tokens", "8") as running:
        yield running


async def test_both_know_the_nodes_the_blocks_and_what_the_other_placed(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    body = {"model": cluster.ready["model"], "prompt": prompt(1, 300), "max_tokens": 1200, "ignore_eos": True}
    running = asyncio.create_task(session.post(f"{cluster.url}/v1/completions", json=body))

    def agree(states: dict[str, dict[str, Any]]) -> bool:
        committed = {state["nodes"]["decode-0"]["committed_tokens"] for state in states.values()}
        return all(state["requests"] for state in states.values()) and len(committed) == 1

    states = await until(agree, cluster)
    assert sorted(state["counters"].get("placed", 0) for state in states.values()) == [0, 1]
    assert (await running).status == 200
    states = await until(lambda states: not any(state["requests"] for state in states.values()), cluster)

    def same_directory(states: dict[str, dict[str, Any]]) -> bool:
        first, second = (state["pools"]["pool-0"] for state in states.values())
        return bool(first["blocks"]) and first == second and first["state"] == "exact"

    await until(same_directory, cluster)
    await cluster.validate()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_go_on_and_new_ones_are_placed_when_the_one_that_is_asked(
    how: signal.Signals,
    cluster: Any,
    random_model: Path,
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    before = await placed_by(cluster)
    await cluster.complete(session, prompt(2, 100), max_tokens=4, temperature=0.0)
    after = await placed_by(cluster)
    (asked,) = (name for name in CONDUCTORS if after[name] > before[name])
    (other,) = (name for name in CONDUCTORS if name != asked)
    under_way = asyncio.create_task(
        cluster.complete(session, prompt(3, 200), max_tokens=600, temperature=0.0, ignore_eos=True)
    )
    await until(lambda states: bool(states[asked]["requests"]), cluster)
    victim = cluster.pid(asked)
    os.kill(victim, how)
    try:
        fresh = await cluster.complete(session, prompt(4, 200), max_tokens=8, temperature=0.0)
        assert (await state_of(cluster, other))["counters"]["placed"] == after[other] + 1
        judge = judge_of(random_model)
        for answer in (fresh, await under_way):
            assert judge.wrong_tokens(answer) == []
    finally:
        if how is signal.SIGSTOP:
            os.kill(victim, signal.SIGCONT)
    if how is signal.SIGKILL:
        await cluster.wait_restarted(asked, victim)
    await until(lambda states: all(state["ready_models"] for state in states.values()), cluster)
    await until(lambda states: not any(state["requests"] for state in states.values()), cluster)
    await until(lambda states: states[asked]["pools"].get("pool-0", {}).get("state") == "exact", cluster)
    await cluster.validate()
