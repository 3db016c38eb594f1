"""Blocks that are on the pool node's SSD: fetched ahead for those who wait, waited for by those who do not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine import Model
from moonpool_proto.v1.worker_pb2 import Timing

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


async def on_ssd_alone(pair: Any) -> None:
    """Nothing of what was computed is left but on the SSD."""
    pair.forget()
    _, left = await pair.pool.flush(None, dram_only=True)
    assert left == 0


def timing_of(request: Any) -> Timing:
    timing: Timing = request.messages[min(request.messages)].timing
    return timing


@pytest.fixture
async def pair(start_pair: Start, tmp_path: Path) -> Any:
    return await start_pair(pool={"pool_ssd_dir": tmp_path, "pool_ssd_bytes": 64 << 20})


async def test_a_turn_waits_for_its_blocks_and_its_tail_on_ssd(
    pair: Any, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    first = await pair.ask(prompt(60), "first")
    turn = [*prompt(60), *first.token_ids, *prompt(5, seed=1)]
    await on_ssd_alone(pair)
    second = await pair.ask(turn, "second")
    assert second.token_ids == greedy(model, turn, 12)
    timing = timing_of(second)
    assert timing.cached_tokens == 71
    assert timing.cached_ssd_tokens == 64
    assert timing.cached_dram_tokens + timing.cached_ssd_tokens == 71


async def test_blocks_of_a_request_that_waits_for_its_turn_are_fetched_meanwhile(
    pair: Any, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    await pair.ask(prompt(65), "first")
    await on_ssd_alone(pair)
    async with contextlib.AsyncExitStack() as turns:
        for place in range(pair.prefill.node.config.engine.prefill_lookahead):
            await turns.enter_async_context(pair.prefill._places.take((f"other-{place}", 0)))
        waiting = await pair.frontend.submit(pair.submit(prompt(65), "second"))
        async with asyncio.timeout(30):
            while pair.pool.counters["loaded_blocks"] < 8:
                await asyncio.sleep(0.01)
        assert waiting.tokens == {}
    await waiting.ended.wait()
    assert waiting.token_ids == greedy(model, prompt(65), 12)
    assert timing_of(waiting).cached_ssd_tokens == 64


async def test_blocks_of_a_request_that_waits_for_pages_are_fetched_meanwhile(pair: Any, prompt: Prompt) -> None:
    await pair.ask(prompt(65), "first")
    await on_ssd_alone(pair)
    node = pair.prefill.node
    others = node.slots.pool.allocate(node.slots.pool.num_available)
    waiting = await pair.frontend.submit(pair.submit(prompt(65), "second"))
    async with asyncio.timeout(30):
        while pair.pool.counters["loaded_blocks"] < 8:
            await asyncio.sleep(0.01)
    assert waiting.tokens == {}
    node.slots.give(others)
    await waiting.ended.wait()
    assert waiting.cached_tokens == 64


async def test_what_the_ssd_does_not_give_in_time_is_computed(
    pair: Any, model: Model, prompt: Prompt, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pair.ask(prompt(65), "first")
    await on_ssd_alone(pair)
    may_read = asyncio.Event()
    real = pair.pool.ssd.loader._work

    async def stuck() -> None:
        await may_read.wait()
        await real()

    monkeypatch.setattr(pair.pool.ssd.loader, "_work", stuck)
    pair.prefill.node.kv_connector._wait_s = 0.05
    second = await pair.frontend.submit(pair.submit(prompt(65), "second"))
    await second.ended.wait()
    assert second.token_ids == greedy(model, prompt(65), 12)
    assert second.cached_tokens == 0
    may_read.set()
    await pair.pool.ssd.loader.idle()
    await pair.at_rest()
