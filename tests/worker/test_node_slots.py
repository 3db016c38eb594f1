"""A worker's slots: whoever waits for them, at the start or while it runs, is given what comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

import numpy as np

from moonpool_proto.v1.worker_pb2 import Submit
from settings.keys import assemble
from worker.config import WorkerConfig
from worker.node_slots import NodeSlots, SlotCalls
from worker.own_blocks import OwnBlocks
from worker.policy.scheduling_order import WaitQueue
from worker.request import EngineSequence, Request

BLOCK = 8


def slots_of(num_slots: int) -> NodeSlots:
    config = assemble(
        WorkerConfig,
        device="cpu",
        threads=1,
        node_id="n",
        listen="",
        conductor_targets=("nobody",),
        pool_target="",
        model=Path(),
        served_model_name=("m",),
        block_tokens=BLOCK,
        capacity_tokens=num_slots * BLOCK,
    )
    return NodeSlots(
        config,
        (),
        WaitQueue(),
        SlotCalls(extend=EngineSequence.extend, waits=lambda: None, preempt=lambda _: None, broken=lambda _: None),
        own_blocks=OwnBlocks(bytes(16), 1),
    )


async def answer(name: str, slots: NodeSlots, count: int, wants: int) -> EngineSequence:
    """One that runs and has filled its slots but the last one."""
    taken, *_ = await slots.take((name, 0), (), count, wants)
    prompt = np.zeros((count - 1) * BLOCK + 1, "<i4")
    submit = Submit(request_id=name, prompt_ids=prompt.tobytes(), chain=bytes(16 * (count - 1)), chain_seed=bytes(16))
    submit.sampling.top_p, submit.sampling.max_tokens = 1.0, (wants + 1) * BLOCK
    request = Request.from_proto(submit, vocab_size=10, max_model_len=512, block_tokens=BLOCK)
    return EngineSequence.of(request, taken, num_computed=len(prompt), prefill_only=False)


async def soon(work: Awaitable[tuple[list[int], int]]) -> list[int]:
    async with asyncio.timeout(30):
        return (await work)[0]


async def test_slots_of_a_request_that_is_cancelled_as_it_gets_them_go_to_an_answer_that_waits() -> None:
    slots = slots_of(4)
    running = await answer("running", slots, 1, 2)
    held = await soon(slots.take(("holder", 0), (), 2))
    newcomer = asyncio.ensure_future(slots.take(("newcomer", 0), (), 3))
    await asyncio.sleep(0)
    slots.give(held)  # which the newcomer gets
    slots.growing.run(running)
    assert len(running.slots) == 1
    newcomer.cancel()
    await asyncio.wait([newcomer])
    assert newcomer.cancelled()
    assert len(running.slots) == 2


async def test_who_waits_is_served_once_the_answer_that_kept_it_waiting_has_left_the_engine() -> None:
    slots = slots_of(10)
    wide, other = await answer("wide", slots, 4, 4), await answer("other", slots, 2, 4)
    slots.growing.run(other)
    assert len(other.slots) == 3
    slots.growing.run(wide)
    assert len(wide.slots) == 4  # with one more, neither could be sure to end
    newcomer = asyncio.ensure_future(slots.take(("newcomer", 0), (), 1))
    await asyncio.sleep(0)
    assert slots.num_waiting == 1
    slots.left(wide)  # its KV is still being stored
    assert len(await soon(newcomer)) == 1
