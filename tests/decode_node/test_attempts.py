"""Attempts, cancels and calls that overtake each other, get lost or come late: the newest attempt lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import prefill_node.handoff
from engine import Model
from messenger import RemoteAccessError
from prefill_node.push import Pusher
from rpc.control import ControlDeadlineExceeded

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


async def test_a_late_reservation_of_an_earlier_attempt_leaves_the_later_one_alone(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair()
    later = await pair.frontend.submit(pair.submit(prompt(40), "r", attempt=2, max_tokens=60))
    await later.reaches(3)
    earlier = await pair.frontend.submit(pair.submit(prompt(40), "r", attempt=1))
    await earlier.ended.wait()
    assert "superseded" in earlier.failures[0].message  # by the decode node, where the later one is
    await later.ended.wait()
    assert later.token_ids == greedy(model, prompt(40), 60)
    await pair.at_rest()


async def test_a_cancel_that_overtakes_the_reservation_refuses_it(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair()
    asked = asyncio.Event()
    real = pair.decode.node.jobs.cancel

    def noted(*args: Any, **options: Any) -> None:
        real(*args, **options)
        asked.set()

    pair.decode.node.jobs.cancel = noted
    await pair.frontend.cancel("decode", "r", 1)
    await asked.wait()
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=400))
    await request.ended.wait()
    assert request.failures[0].code == "reserve"
    await pair.at_rest()


@pytest.mark.parametrize("lost", ["an error", "a cancellation"])
async def test_a_reservation_whose_answer_was_lost_is_aborted_by_its_attempt(
    lost: str, start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair()
    real = prefill_node.handoff.call

    reserved = asyncio.Event()
    open_reservation = pair.decode._open_reservation

    def noted(*args: Any) -> Any:
        reserved.set()
        return open_reservation(*args)

    async def losing(rpc: Any, *, what: str, target: str, deadline_s: float) -> Any:
        reply = await real(rpc, what=what, target=target, deadline_s=deadline_s)
        if what != "Reserve":
            return reply
        if lost == "an error":
            raise ControlDeadlineExceeded("lost", what=what, target=target, code="DEADLINE_EXCEEDED")
        raise asyncio.CancelledError

    monkeypatch.setattr(pair.decode, "_open_reservation", noted)
    monkeypatch.setattr(prefill_node.handoff, "call", losing)
    await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=400))
    await reserved.wait()
    await pair.at_rest()


async def test_a_second_cancel_does_not_keep_the_abort_from_being_sent(
    start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair()
    stopping, may_stop = asyncio.Event(), asyncio.Event()
    real = Pusher.stop

    async def slow(self: Pusher) -> None:
        stopping.set()
        await may_stop.wait()
        await real(self)

    monkeypatch.setattr(Pusher, "stop", slow)
    monkeypatch.setattr(pair.prefill.node.engine, "submit", lambda sequence: None)  # it waits for its first token
    monkeypatch.setattr(
        pair.prefill.node.engine, "cancel", lambda sequence: pair.prefill.node._leaving[id(sequence)].set_result(None)
    )
    await pair.frontend.submit(pair.submit(prompt(40), "r"))
    async with asyncio.timeout(10):
        while not pair.prefill.node._leaving:
            await asyncio.sleep(0.005)
    pair.prefill.node.jobs.cancel("r", 1)
    await stopping.wait()
    pair.prefill.node.jobs.cancel("r", 1)
    await asyncio.sleep(0)
    may_stop.set()
    await pair.at_rest()


async def test_a_prompt_that_fills_the_decode_node_is_refused_and_the_node_goes_on(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(capacity_tokens=64)
    request = await pair.frontend.submit(pair.submit(prompt(63), "full"))
    await request.ended.wait()
    assert "too_long" in request.failures[0].message
    request = await pair.frontend.submit(pair.submit(prompt(30), "fits"))
    await request.ended.wait()
    assert request.token_ids == greedy(model, prompt(30), 12)
    await pair.at_rest()


async def test_blocks_that_could_not_be_verified_are_asked_for_again(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair()
    memory = pair.decode.node.memory
    real, calls = memory.pushed_digests, []

    def failing(layer: int, *where: Any) -> Any:
        calls.append(layer)
        if len(calls) == 2:
            raise RuntimeError("planted")
        return real(layer, *where)

    memory.pushed_digests = failing
    request = await pair.frontend.submit(pair.submit(prompt(50), "r"))
    async with asyncio.timeout(20):
        await request.ended.wait()
    assert request.token_ids == greedy(model, prompt(50), 12)
    await pair.at_rest()


async def test_a_write_that_comes_after_its_reservation_touches_nothing(
    start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair()
    opened: list[Any] = []
    real = pair.decode._open_reservation

    def noted(*args: Any) -> Any:
        opened.append(real(*args))
        return opened[-1]

    monkeypatch.setattr(pair.decode, "_open_reservation", noted)
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=400))
    await request.reaches(2)  # the second token is the decode node's: its reservation is open
    for node in ("prefill", "decode"):
        await pair.frontend.cancel(node, "r", 1)
    await pair.at_rest()
    ours, theirs = pair.prefill.node.memory, pair.decode.node.memory
    before = theirs.region.array.copy()
    rows = [(0, int(theirs.offsets(0, [slot])[0]), 64) for slot in opened[0].slots]
    late = pair.prefill.node.messenger.connect(pair.decode.node.endpoint).write(opened[0].key, ours.region, rows)
    with pytest.raises(RemoteAccessError, match="revoked"):
        await asyncio.wrap_future(late)
    assert (theirs.region.array == before).all()
