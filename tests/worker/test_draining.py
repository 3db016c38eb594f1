"""A node that is asked to stop: what runs is finished, what comes is refused for another node to take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from engine import Model
from kvpool import chain_keys, chain_seed
from moonpool.role_process.worker import serve_worker
from moonpool_proto.v1.common_pb2 import ROLE_DECODE
from moonpool_proto.v1.conductor_pb2 import DrainNodeRequest
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from moonpool_proto.v1.worker_pb2 import Submit
from rpc.control import open_channel
from settings.keys import assemble
from tests.worker.node_pair import Frontend
from worker.config import WorkerConfig

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


@pytest.mark.parametrize("node", ["prefill", "decode"])
async def test_a_draining_node_finishes_what_it_has_and_refuses_what_comes(
    node: str, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair()
    running = await pair.frontend.submit(pair.submit(prompt(40), "running", max_tokens=100))
    await running.reaches(2)
    draining = getattr(pair, node).node
    draining.draining.set()
    late = await pair.frontend.submit(pair.submit(prompt(40), "late"))
    await late.ended.wait()
    assert [(f.retryable, "draining" in f.message) for f in late.failures] == [(True, True)]
    await draining.jobs.wait_idle(20)
    await running.ended.wait()
    assert running.token_ids == greedy(model, prompt(40), 100)
    await pair.at_rest()


async def test_a_prompt_that_comes_to_a_node_turned_decode_is_refused_for_another_node_and_holds_nothing(
    start_pair: Start, prompt: Prompt, model: Model, greedy: Greedy
) -> None:
    """Two nodes that change in opposite directions would otherwise wait for each other's pages."""
    pair = await start_pair()
    turned = pair.prefill.node
    turned.role.begin(ROLE_DECODE)
    async with asyncio.timeout(60):
        await turned.jobs.wait_idle(60)
        assert turned.role._task is not None
        await turned.role._task
        late = await pair.frontend.submit(pair.submit(prompt(40), "late"))
        await late.ended.wait()
        assert [(f.code, f.retryable) for f in late.failures] == [("draining", True)]
        whole = pair.submit(prompt(40), "whole")
        whole.placement.ClearField("decode")  # as `--colocated-prefill` places it
        answered = await pair.frontend.submit(whole)
        await answered.ended.wait()
    assert answered.token_ids == greedy(model, prompt(40), 12)
    await pair.at_rest()


async def test_a_worker_that_waits_for_its_pool_node_refuses_what_comes_and_stops(
    tmp_path: Path, model_path: Path, prompt: Prompt
) -> None:
    config = assemble(
        WorkerConfig,
        device="cpu",
        threads=1,
        node_id="lonely",
        listen=f"unix:{tmp_path}/lonely.sock",
        conductor_targets=(f"unix:{tmp_path}/nobody.sock",),
        pool_target=f"unix:{tmp_path}/nobody.sock",
        model=model_path,
        served_model_name=("m",),
        block_tokens=8,
        capacity_tokens=256,
    )
    stop, frontend = asyncio.Event(), Frontend()
    ids = np.array(prompt(20), "<i4")
    seed = chain_seed("", "test", 8)
    early = Submit(
        request_id="early",
        attempt=1,
        frontend_id="front",
        model="m",
        prompt_ids=ids.tobytes(),
        chain=chain_keys(seed, ids, 8).tobytes(),
        chain_seed=seed,
        timeout_s=60,
    )
    early.sampling.max_tokens = 4
    async with asyncio.timeout(60):
        serving = asyncio.create_task(
            serve_worker(config, "aggregated", stop, lambda target: pytest.fail("it was never ready"))
        )
        while not (tmp_path / "lonely.sock").exists():
            await asyncio.sleep(0.01)
        await frontend.attach("lonely", f"unix:{tmp_path}/lonely.sock")
        request = await frontend.submit(early, "lonely")
        await request.ended.wait()
        assert [(f.code, f.retryable) for f in request.failures] == [("starting", True)]
        await frontend.close()
        stop.set()
        await serving


async def test_a_worker_that_the_conductor_drains_leaves_and_says_so(tmp_path: Path, model_path: Path) -> None:
    conductor = f"unix:{tmp_path}/c.sock"
    config = assemble(
        WorkerConfig,
        device="cpu",
        threads=1,
        node_id="leaver",
        listen=f"unix:{tmp_path}/leaver.sock",
        conductor_targets=(conductor,),
        pool_target="",
        model=model_path,
        served_model_name=("m",),
        block_tokens=8,
        capacity_tokens=256,
    )
    stop, ready = asyncio.Event(), asyncio.Event()
    scheduling = asyncio.create_task(
        serve_conductor(assemble(ConductorConfig, listen=conductor), stop, lambda target: None)
    )
    async with asyncio.timeout(60):
        leaving = asyncio.create_task(serve_worker(config, "aggregated", asyncio.Event(), lambda target: ready.set()))
        await ready.wait()
        async with open_channel(conductor) as channel:
            await ConductorStub(channel).DrainNode(DrainNodeRequest(node_id="leaver"))
        assert await leaving is True
        stop.set()
        await scheduling
