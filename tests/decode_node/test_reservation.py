"""When a reservation says what is missing: not before everything that landed has been looked at."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from decode_node.reservation import Reservation
from messenger import Endpoint, RemoteKey
from moonpool_proto.v1.worker_pb2 import Submit
from worker.policy import TakenSlots
from worker.request import Request

BLOCK = 8


@pytest.fixture
async def reservation() -> Reservation:
    prompt = np.zeros(20, dtype="<i4").tobytes()
    submit = Submit(request_id="r", prompt_ids=prompt, chain=bytes(32), chain_seed=bytes(16))
    submit.sampling.max_tokens = 4
    submit.sampling.top_p = 1.0
    return Reservation(
        Request.from_proto(submit, vocab_size=8, max_model_len=64, block_tokens=BLOCK),
        TakenSlots([0, 1, 2], 1),
        num_layers=2,
        block_tokens=BLOCK,
        key=RemoteKey(1, 1, 0, 8, False, True),
        writer=Endpoint("w", 1, "h", "127.0.0.1", 1, ""),
    )


def test_the_last_block_counts_only_the_prompts_tokens(reservation: Reservation) -> None:
    assert reservation.valid_tokens(np.arange(3)).tolist() == [8, 8, 4]


async def test_held_blocks_are_there_and_a_block_needs_all_its_layers(reservation: Reservation) -> None:
    for layer, right in ((0, [True, True]), (1, [True, False])):
        reservation.announce()
        reservation.landed([layer], np.array([1, 2]), np.array(right))
    assert await reservation.missing_blocks() == [2]


async def test_what_landed_in_the_meantime_is_waited_for_too(reservation: Reservation) -> None:
    """A read that is announced in the very step in which the one before it ends leaves no gap to look through."""
    blocks, layers = np.array([1, 2]), [0, 1]
    reservation.announce()
    missing = asyncio.ensure_future(reservation.missing_blocks())
    await asyncio.sleep(0)
    reservation.landed(layers, blocks, np.ones(2, dtype=bool))
    reservation.announce()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not missing.done()
    reservation.landed(layers, blocks, np.array([True, False]))
    assert await missing == [2]
