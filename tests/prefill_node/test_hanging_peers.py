"""Peers that hang: what waits for them is bounded, and a pool node that hangs is asked once, not by every request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine import Model
from kvpool import PoolClient
from kvpool.service import PoolService
from settings.keys import replaced

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


async def test_a_push_to_a_decode_node_that_takes_nothing_frees_the_prefill_slots_long_before_the_deadline(
    start_pair: Start, prompt: Prompt
) -> None:
    pair, going_on = await start_pair(), threading.Event()
    node = pair.prefill.node
    node.config = replaced(node.config, push_timeout_s=0.5)
    # Its thread for arrivals stands still: it acknowledges nothing.
    pair.decode.node.messenger.on_notify(lambda *_: going_on.wait(60))
    submit = pair.submit(prompt(64), "r")
    submit.timeout_s = 600
    try:
        request = await pair.frontend.submit(submit)
        async with asyncio.timeout(30):
            await request.ended.wait()
            while node.validate()[0]:
                await asyncio.sleep(0.01)
    finally:
        going_on.set()
    (failure,) = request.failures
    assert (failure.code, failure.retryable, failure.suspect_node_id) == ("push", True, "decode")
    assert "nothing was acknowledged for 0.5 s" in failure.message
    await pair.at_rest()


async def test_a_pool_node_that_hangs_costs_one_request_its_deadline_and_is_used_again_later(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, pin, asked, back = PoolClient._call, PoolService.Pin, 0, asyncio.Event()

    async def call_soon(self: Any, name: str, rpc: Any, deadline_s: float) -> Any:
        return await call(self, name, rpc, min(deadline_s, 0.5))

    async def hang(self: Any, request: Any, context: Any) -> Any:
        nonlocal asked
        asked += 1
        await back.wait()
        return await pin(self, request, context)

    monkeypatch.setattr(PoolClient, "_call", call_soon)
    monkeypatch.setattr(PoolService, "Pin", hang)
    pair, clock = await start_pair(pool=True), [1000.0]
    monkeypatch.setattr(pair.prefill.node.kv_connector, "_now_s", lambda: clock[0])

    async def answered(name: str) -> None:
        request = await pair.frontend.submit(pair.submit(prompt(64), name))
        await request.ended.wait()
        assert request.token_ids == greedy(model, prompt(64), 12)
        await pair.at_rest()

    for name in ("a", "b", "c"):
        await answered(name)
    assert asked == 1
    back.set()
    clock[0] += 60
    await answered("d")
    await answered("e")
    assert asked == 3
