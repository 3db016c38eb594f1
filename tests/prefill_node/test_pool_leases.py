"""Leases and puts at the pool are given back, whenever a request is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine import Model
from rpc.control import Unavailable
from tests.worker.node_pair import forget
from worker.prefix_blocks import PrefixSave

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


async def test_reused_blocks_come_from_the_pool_to_both_nodes(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    first = await pair.frontend.submit(pair.submit(prompt(64), "first"))
    await first.ended.wait()
    await pair.at_rest()
    pair.forget()
    second = await pair.frontend.submit(pair.submit(prompt(64), "second"))
    await second.ended.wait()
    assert second.token_ids == greedy(model, prompt(64), 12)
    assert second.cached_tokens == 56
    assert pair.decode.node.counters.snapshot()["kv_pull_bytes"] > 0
    await pair.at_rest()


async def test_blocks_that_change_under_a_lease_are_computed_instead(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    first = await pair.frontend.submit(pair.submit(prompt(64), "first"))
    await first.ended.wait()
    await pair.at_rest()
    pair.forget()
    # As if the lease had run out and the slots had gone to others: the third block of all in the arena.
    slot = pair.prefill.node.memory.spec.slot_nbytes(0)
    pair.pool.memory.array[2 * slot : 3 * slot] ^= 1
    second = await pair.frontend.submit(pair.submit(prompt(64), "second"))
    await second.ended.wait()
    assert second.failures == []
    assert second.token_ids == greedy(model, prompt(64), 12)
    for face in (pair.prefill, pair.decode):
        assert face.node.counters.snapshot()["digest_mismatches"] > 0
    await pair.at_rest()


@pytest.mark.parametrize("reader", ["prefill", "decode"])
async def test_a_damaged_block_is_stored_again_at_the_end_of_the_request_that_found_it(
    reader: str, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    first = await pair.frontend.submit(pair.submit(prompt(64), "first"))
    await first.ended.wait()
    await pair.at_rest()
    faces = {"prefill": pair.prefill, "decode": pair.decode}
    forget(faces[reader])  # the other node has the prompt's blocks in its own pages
    slot = pair.prefill.node.memory.spec.slot_nbytes(0)
    pair.pool.memory.array[2 * slot : 3 * slot] ^= 1
    for name, mismatches in (("second", 1), ("third", 0)):
        before = sum(face.node.counters.snapshot().get("digest_mismatches", 0) for face in faces.values())
        request = await pair.frontend.submit(pair.submit(prompt(64), name))
        await request.ended.wait()
        assert request.token_ids == greedy(model, prompt(64), 12)
        await pair.at_rest()
        after = sum(face.node.counters.snapshot().get("digest_mismatches", 0) for face in faces.values())
        assert (after - before > 0) == (mismatches > 0)
        pair.forget()
    assert request.cached_tokens == 56


@pytest.mark.parametrize("call", ["pin", "allocate", "seal"])
async def test_a_request_cancelled_while_the_pool_answers_leaves_nothing_there(
    call: str, start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair(pool=True)
    warm = await pair.frontend.submit(pair.submit(prompt(64), "warm"))
    await warm.ended.wait()
    await pair.at_rest()
    client = pair.prefill.node.kv_connector.client(pair.prefill.node.config.pool_target)
    real, answered, may_go = getattr(client, call), asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        reply = await real(*args, **options)
        answered.set()
        await may_go.wait()
        return reply

    monkeypatch.setattr(client, call, slow)
    await pair.frontend.submit(pair.submit(prompt(64) + prompt(40, seed=1), "r", max_tokens=200))
    await answered.wait()
    for _ in range(2):
        for face in (pair.prefill, pair.decode):
            face.node.jobs.cancel("r", 1)
        await asyncio.sleep(0.01)
    may_go.set()
    await pair.at_rest()


async def test_a_pool_that_went_away_during_a_store_does_not_swallow_a_cancel(
    start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair(pool=True)
    connector = pair.prefill.node.kv_connector
    storing, may_go = asyncio.Event(), asyncio.Event()

    async def stuck(*args: Any) -> None:
        storing.set()
        await may_go.wait()

    monkeypatch.setattr(connector._writer, "_fill", stuck)
    monkeypatch.setattr(connector.client(pair.prefill.node.config.pool_target), "abort_put", _refuse)
    slots = pair.prefill.node.slots.pool.allocate(1)
    store = asyncio.ensure_future(connector.store(PrefixSave((bytes(range(16)),)), slots, 0))
    await storing.wait()
    store.cancel()
    with pytest.raises(asyncio.CancelledError):
        await store
    pair.prefill.node.slots.give(slots)


async def _refuse(*args: Any) -> None:
    raise Unavailable("gone", what="Pool.AbortPut", target="pool", code="UNAVAILABLE")
