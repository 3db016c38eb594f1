"""The hand-off from prefill to decode node: layer by layer, verified, fenced, cancellable at any moment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from engine import Model

Start = Callable[..., Awaitable[Any]]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def greedy(model: Model, ids: list[int], count: int) -> list[int]:
    out = list(ids)
    for _ in range(count):
        out.append(int(model.score(np.array(out, dtype=np.int32))[-1].argmax()))
    return out[len(ids) :]


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 64, 100])
async def test_tokens_are_those_of_one_process(transport: str, length: int, start_pair: Start, model: Model) -> None:
    pair = await start_pair(transport)
    request = await pair.frontend.submit(pair.submit(prompt(length), "r"))
    await request.ended.wait()
    assert request.failures == []
    assert request.token_ids == greedy(model, prompt(length), 12)
    await pair.at_rest()


async def test_many_requests_at_once(start_pair: Start, model: Model) -> None:
    pair = await start_pair()
    asked = [prompt(20 + 9 * i, seed=i) for i in range(8)]
    requests = [await pair.frontend.submit(pair.submit(p, f"r{i}")) for i, p in enumerate(asked)]
    for ids, request in zip(asked, requests, strict=True):
        await request.ended.wait()
        assert request.token_ids == greedy(model, ids, 12)
    await pair.at_rest()


async def test_a_repeated_prompt_is_held_on_both_sides(start_pair: Start, model: Model) -> None:
    pair = await start_pair()
    for name in ("a", "b"):
        request = await pair.frontend.submit(pair.submit(prompt(64), name))
        await request.ended.wait()
        await pair.at_rest()
        assert request.token_ids == greedy(model, prompt(64), 12)
    assert request.cached_tokens == 56
    pushed = pair.prefill.node.counters.snapshot()["kv_push_bytes"]
    assert pushed == 64 * pair.prefill.node.memory.spec.bytes_per_token  # the second time nothing had to travel


async def test_a_block_damaged_on_the_way_is_pushed_again(start_pair: Start, model: Model) -> None:
    pair = await start_pair()
    memory = pair.prefill.node.memory
    real, calls = memory.one_layer_digests, []

    def damaged(layer: int, slots: Any, valid: Any) -> Any:
        digests = real(layer, slots, valid)
        calls.append(layer)
        return digests ^ np.uint64(1) if len(calls) == 2 else digests

    memory.one_layer_digests = damaged
    request = await pair.frontend.submit(pair.submit(prompt(50), "r"))
    await request.ended.wait()
    assert request.token_ids == greedy(model, prompt(50), 12)
    assert pair.decode.node.counters.snapshot()["digest_mismatches"] > 0
    assert pair.prefill.node.counters.snapshot()["repushed_blocks"] > 0
    await pair.at_rest()


async def test_kv_that_stays_damaged_fails_the_attempt_by_name(start_pair: Start) -> None:
    pair = await start_pair()
    memory = pair.prefill.node.memory
    real = memory.one_layer_digests
    memory.one_layer_digests = lambda layer, slots, valid: real(layer, slots, valid) ^ np.uint64(1)
    request = await pair.frontend.submit(pair.submit(prompt(50), "r"))
    await request.ended.wait()
    assert list(request.tokens) == [0]
    assert [(f.retryable, f.suspect_node_id) for f in request.failures] == [(True, "decode")]
    assert "verification" in request.failures[0].message
    await pair.at_rest()


async def test_a_request_cancelled_while_decoding_frees_everything(start_pair: Start) -> None:
    pair = await start_pair()
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=400))
    await request.reaches(5)
    for node in ("prefill", "decode"):
        await pair.frontend.cancel(node, "r", 1)
    await pair.at_rest()


async def test_a_request_cancelled_during_prefill_frees_everything(start_pair: Start) -> None:
    pair = await start_pair()
    reserved = asyncio.Event()
    real = pair.decode._open_reservation

    def noted(*args: Any) -> Any:
        reserved.set()
        return real(*args)

    pair.decode._open_reservation = noted
    await pair.frontend.submit(pair.submit(prompt(400), "r"))
    await reserved.wait()
    for node in ("prefill", "decode"):
        await pair.frontend.cancel(node, "r", 1)
    await pair.at_rest()


async def test_a_stale_cancel_leaves_a_later_attempt_alone(start_pair: Start, model: Model) -> None:
    pair = await start_pair()
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", attempt=2, max_tokens=60))
    for node in ("prefill", "decode"):
        await pair.frontend.cancel(node, "r", 1)
    await request.ended.wait()
    assert request.token_ids == greedy(model, prompt(40), 60)


async def test_a_later_attempt_takes_the_place_of_an_earlier_one(start_pair: Start, model: Model) -> None:
    pair = await start_pair()
    first = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=400))
    await first.reaches(3)
    second = await pair.frontend.submit(pair.submit(prompt(40), "r", attempt=2))
    await second.ended.wait()
    assert second.token_ids == greedy(model, prompt(40), 12)
    await pair.at_rest()
    assert len(first.tokens) < 400


async def test_a_full_decode_node_makes_requests_wait_and_loses_none(start_pair: Start, model: Model) -> None:
    pair = await start_pair(capacity_tokens=64)  # room for one of them at a time
    asked = [prompt(30, seed=i) for i in range(5)]
    requests = [await pair.frontend.submit(pair.submit(p, f"r{i}", max_tokens=20)) for i, p in enumerate(asked)]
    for ids, request in zip(asked, requests, strict=True):
        await request.ended.wait()
        assert request.failures == []
        assert request.token_ids == greedy(model, ids, 20)
    await pair.at_rest()


async def test_a_request_that_can_never_fit_is_refused_by_name(start_pair: Start) -> None:
    pair = await start_pair(capacity_tokens=32)
    request = await pair.frontend.submit(pair.submit(prompt(40), "r"))
    await request.ended.wait()
    assert "too_long" in request.failures[0].message or request.failures[0].code == "too_long"
    await pair.at_rest()


async def test_the_end_of_a_frontends_stream_cancels_its_requests(start_pair: Start) -> None:
    pair = await start_pair()
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=400))
    await request.reaches(2)
    await pair.frontend.close()
    await pair.at_rest()


async def test_one_token_needs_no_commit(start_pair: Start, model: Model) -> None:
    pair = await start_pair()
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=1))
    await request.ended.wait()
    assert request.token_ids == greedy(model, prompt(40), 1)
    await pair.at_rest()
