"""Reused blocks pulled from pool nodes: the hand-off waits for every range before it asks for anything to be pushed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from decode_node.reservation import Reservation
from kvpool import Lease, layer_digests
from messenger import Messenger, MessengerConfig, RemoteKey, SharedMemory
from settings.keys import assemble
from telemetry.tracing import OFF
from worker.policy import TakenSlots
from worker.prefix_blocks import StoredPart
from worker.request import Request

BLOCK = 8


async def test_nothing_is_asked_for_while_a_later_range_is_still_to_be_pulled(
    start_pair: Callable[..., Awaitable[Any]], tmp_path: Path
) -> None:
    pair = await start_pair()
    node, pulls = pair.decode.node, pair.decode._pulls
    spec = node.memory.spec
    pool = Messenger(assemble(MessengerConfig, shm_dir=tmp_path), node_id="pool", incarnation=9)
    pool.start()
    memory = SharedMemory.create(4 * spec.slot_nbytes(0), "pool")
    region = pool.register(memory)
    source = np.random.default_rng(0).integers(0, 255, memory.nbytes, dtype=np.uint8)
    memory.array[:] = source
    slots, *_ = await node.slots.take(("r", 0), [], 4)
    key = pool.grant(region, 0, memory.nbytes, read=True, write=False)
    full = np.full(4, BLOCK, dtype=np.int32)
    digests = layer_digests(source.reshape(4, -1), spec, 0, full)
    offsets = (np.arange(4) * spec.slot_nbytes(0)).reshape(1, 4)

    def pull_range(first: int, count: int) -> Any:
        part = slice(first, first + count)
        return Lease("", key, pool.endpoint, offsets[:, part], [digests[part]]).to_pull_range(first)

    request = Request.from_proto(
        pair.submit(list(range(32)), "r"), vocab_size=256, max_model_len=512, block_tokens=BLOCK
    )
    reservation = Reservation(
        request,
        TakenSlots(slots, 0),
        num_layers=2,
        block_tokens=BLOCK,
        key=RemoteKey.unpack(key.pack()),
        writer=pool.endpoint,
    )
    real, gate, second = pulls._pull_range, asyncio.Event(), asyncio.Event()

    async def gated(reservation: Reservation, part: StoredPart, lease: Lease, first: int, skip: int) -> None:
        if first:
            second.set()
            await gate.wait()
        await real(reservation, part, lease, first, skip)

    pulls._pull_range = gated
    pulling = asyncio.ensure_future(pulls.pull(reservation, [pull_range(0, 2), pull_range(2, 2)], OFF))
    await second.wait()
    asking = asyncio.ensure_future(reservation.missing_blocks())
    await asyncio.sleep(0)
    assert not asking.done()
    gate.set()
    assert await asking == []
    await pulling
    assert (
        node.memory._memory.array[node.memory.offsets(0, slots[2:])[0] :][:16].tolist()
        == source[2 * spec.slot_nbytes(0) :][:16].tolist()
    )
    node.slots.give(slots)
    pool.close()
    memory.close()
