"""A cancel that says that the answer is whole: what was computed is stored for the next turn, then all is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from decode_node.reservation import Reservation
from engine import Model
from kvpool import node_metrics

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


@pytest.mark.parametrize(
    ("options", "cached"), [({"keep_kv": True, "kept_tokens": 27}, 64 + 27), ({"keep_kv": True}, 64 + 24), ({}, 64)]
)
async def test_the_next_turn_finds_the_answer_only_if_it_was_kept(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, options: dict[str, Any], cached: int
) -> None:
    pair = await start_pair(pool=True)
    first = await pair.frontend.submit(pair.submit(prompt(64), "first", max_tokens=300))
    await first.reaches(30)
    for node in ("prefill", "decode"):
        await pair.frontend.cancel(node, "first", 1, **options)
    await pair.at_rest()
    assert len(first.tokens) < 300
    assert first.failures == []
    turn = [*prompt(64), *first.token_ids[:27], *prompt(9, seed=1)]
    second = await pair.frontend.submit(pair.submit(turn, "second", max_tokens=5))
    await second.ended.wait()
    assert second.cached_tokens == cached
    assert second.token_ids == greedy(model, turn, 5)
    await pair.at_rest()


async def test_a_plain_cancel_that_follows_frees_everything_at_once(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True)
    request = await pair.frontend.submit(pair.submit(prompt(64), "r", max_tokens=300))
    await request.reaches(30)
    storing, never = asyncio.Event(), asyncio.Event()

    async def store(*args: Any, **options: Any) -> None:
        storing.set()
        await never.wait()

    pair.decode.node.kv_connector.store = store
    await pair.frontend.cancel("decode", "r", 1, keep_kv=True)
    async with asyncio.timeout(20):
        await storing.wait()
    assert len(pair.decode.node.jobs) == 1
    await pair.frontend.cancel("decode", "r", 1)
    await pair.at_rest()


async def test_an_answer_ended_by_its_first_token_leaves_the_prompt_in_the_pool(
    start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair(pool=True)
    committing, cancelled, never = asyncio.Event(), asyncio.Event(), asyncio.Event()
    node = pair.prefill.node
    real_store, real_cancel = node.kv_connector.store, node.jobs.cancel

    async def missing_blocks(reservation: Reservation) -> list[int]:
        committing.set()
        await never.wait()
        return []

    async def store(*args: Any, **options: Any) -> None:
        await cancelled.wait()
        await real_store(*args, **options)

    def cancel(*args: Any, **options: Any) -> None:
        real_cancel(*args, **options)
        cancelled.set()

    monkeypatch.setattr(Reservation, "missing_blocks", missing_blocks)
    node.kv_connector.store, node.jobs.cancel = store, cancel
    request = await pair.frontend.submit(pair.submit(prompt(64), "r", max_tokens=300))
    async with asyncio.timeout(20):
        await request.reaches(1)
        await committing.wait()
    for name in ("prefill", "decode"):
        await pair.frontend.cancel(name, "r", 1, keep_kv=True)
    await pair.at_rest()
    assert request.failures == []
    assert node_metrics.validate(pair.pool)["counts"]["blocks"] == 8
