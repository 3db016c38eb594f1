"""A prefill and a decode worker on a GPU: the tokens are those of the dense reference on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import ForwardBatch, Model, SamplingRow, SequenceChunk, load_model, sample
from messenger.rdma.topology import rdma_ports
from messenger.staging import DirectStaging, MirrorStaging

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


def without_adapter() -> str:
    """Return why GPU memory cannot be registered with an adapter here; empty if it may be possible."""
    if not rdma_ports():
        return "this machine has no RDMA adapter"
    try:
        import pyverbs.device  # noqa: F401
    except ImportError as error:
        return f"pyverbs cannot be imported ({error}): install python3-pyverbs"
    return ""


def test_steps_give_the_logits_of_a_cpu(model_path: Path, model: Model, cuda: str) -> None:
    on_gpu = load_model(model_path, device=cuda, dtype="float32")
    ids = np.random.default_rng(0).integers(0, 256, 100).astype(np.int32)
    logits = []
    for each in (model, on_gpu):
        cache = each.new_cache((20,) * len(each.kv_groups), 8)
        tables = (np.array([7, 3, 11, 0, 19, 5, 2, 9, 1, 15, 6, 4, 8], np.int32),) * len(each.kv_groups)
        written: list[int] = []
        for start, end in ((0, 32), (32, 64), (64, 99), (99, 100)):
            chunk = SequenceChunk(ids[start:end], start, tables, want_logits=True)
            last = each.forward(ForwardBatch([chunk]), cache, written.append)
        logits.append(last.cpu())
        assert written == list(range(each.config.num_layers)) * 4
    assert torch.allclose(*logits, atol=2e-3, rtol=2e-3)
    assert int(logits[0].argmax()) == int(logits[1].argmax())


def test_sampling_gives_the_ids_of_a_cpu(cuda: str) -> None:
    logits = torch.randn((64, 2048), generator=torch.Generator().manual_seed(1)) * 4
    rows = [SamplingRow((i % 4) * 0.5, 0.9, 40, i, 0, i, 0.01) for i in range(64)]
    assert sample(logits.to(cuda), rows).tolist() == sample(logits, rows).tolist()


def on(device: str, **options: Any) -> dict[str, Any]:
    """Return the options of `start_pair` for workers on a device."""
    worker = {"device": device, "dtype": "float32", **options}
    return {"prefill_options": worker, **worker}


async def check_tokens(pair: Any, model: Model, prompt: Prompt, greedy: Greedy) -> None:
    prompts = [prompt(120), prompt(120)[:60] + prompt(70, seed=1), prompt(9, seed=2), prompt(250, seed=3)]
    for turn in range(2):  # the second time from the pool
        requests = [await pair.frontend.submit(pair.submit(ids, f"{turn}-{i}")) for i, ids in enumerate(prompts)]
        async with asyncio.timeout(120):
            await asyncio.gather(*(request.ended.wait() for request in requests))
        for request, ids in zip(requests, prompts, strict=True):
            assert (request.failures, request.token_ids) == ([], greedy(model, ids, 12))
        await pair.at_rest()
        for node in (pair.prefill.node, pair.decode.node):
            for key in list(node.slots.pool._index):
                node.slots.pool.forget(key)
    assert sum(request.cached_tokens for request in requests) > 200


@pytest.mark.parametrize(("transport", "helpers"), [("tcp", 0), ("auto", 0), ("auto", 1)])
async def test_tokens_of_workers_with_a_mirror_are_those_of_the_reference(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, cuda: str, transport: str, helpers: int
) -> None:
    pair = await start_pair(transport, pool=True, helpers=helpers, **on(cuda))
    assert isinstance(pair.prefill.node.memory.staging, MirrorStaging)
    await check_tokens(pair, model, prompt, greedy)


async def test_int8_in_the_pool_and_a_gpu_in_the_worker_go_together(
    start_pair: Start, prompt: Prompt, cuda: str
) -> None:
    pair = await start_pair(pool=True, storage="int8", **on(cuda))
    for turn in range(2):
        request = await pair.frontend.submit(pair.submit(prompt(200), f"{turn}"))
        async with asyncio.timeout(120):
            await request.ended.wait()
        assert (request.failures, len(request.token_ids)) == ([], 12)
        await pair.at_rest()


async def test_automatic_staging_starts_and_names_what_it_chose(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, cuda: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = await start_pair(pool=True, **on(cuda, kv_staging="auto"))
    assert isinstance(pair.prefill.node.memory.staging, MirrorStaging), "peers may connect by shared memory"
    assert "which move host memory only" in caplog.text
    await check_tokens(pair, model, prompt, greedy)


async def test_tokens_of_workers_whose_gpu_memory_adapters_access_are_those_of_the_reference(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, cuda: str
) -> None:
    missing = without_adapter()
    if missing:
        pytest.skip(f"NOT PROVEN here: {missing}")
    pair = await start_pair("rdma", pool=True, **on(cuda, kv_staging="direct"))
    assert isinstance(pair.prefill.node.memory.staging, DirectStaging)
    await check_tokens(pair, model, prompt, greedy)
