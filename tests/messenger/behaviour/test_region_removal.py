"""Regions that come and go: nobody keeps the memory of those that are gone mapped, and nobody is hurt by its going."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from messenger import SharedMemory
from messenger.shm import transport

pytestmark = pytest.mark.transports("shm")

NBYTES = 1 << 16


def num_mapped(name: str) -> int:
    """Mappings of memory of this name in this process, which is both sides."""
    return Path("/proc/self/maps").read_text().count(f"/memfd:{name} ")


def test_what_was_read_from_regions_that_are_gone_is_not_kept(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    for value in range(20):
        memory = SharedMemory.create(NBYTES, "churn")
        memory.array[:] = value
        region = b.messenger.register(memory)
        key = b.messenger.grant(region, 0, NBYTES, read=True, write=False)
        peer.read(key, a.region, [[0, 0, NBYTES]]).result()
        assert set(np.unique(a.array).tolist()) == {value}
        b.messenger.deregister(region)
        del region
        memory.close()
        assert num_mapped("churn") <= 2, "the last one, until its successor is offered"


def test_what_was_written_from_regions_that_are_gone_is_not_kept(pair: Any, wait_until: Callable[..., None]) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    key = b.grant()
    for value in range(20):
        memory = SharedMemory.create(NBYTES, "churn")
        memory.array[:] = value
        region = a.messenger.register(memory)
        peer.write(key, region, [[0, 0, NBYTES]]).result()
        assert set(np.unique(b.array).tolist()) == {value}
        a.messenger.deregister(region)
        del region
        memory.close()
        assert num_mapped("churn") <= 3, "the last one, and one that a thread is about to let go of"

    def is_gone() -> bool:
        peer.write(key, a.region, [[0, 0, 10]]).result()
        return num_mapped("churn") == 0

    wait_until(is_gone, "any write brings word of what is gone")


def test_a_loan_outlives_its_region_and_is_not_confirmed_then(pair: Any) -> None:
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    memory = SharedMemory.create(NBYTES, "lent")
    memory.array[:] = 7
    region = b.messenger.register(memory)
    loan = peer.borrow(b.messenger.grant(region, 0, NBYTES, read=True, write=False), 0, NBYTES)
    assert loan.confirm()
    b.messenger.deregister(region)
    del region
    memory.close()
    peer.read(b.grant(), a.region, [[0, 0, 10]]).result()  # brings word that it is gone
    assert not loan.confirm()
    assert num_mapped("lent") == 1
    assert set(np.unique(loan.array).tolist()) == {7}
    del loan
    assert num_mapped("lent") == 0


def test_more_regions_than_stay_mapped_are_used_in_turn(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "MAX_OFFERED", 3)
    a, b = pair
    peer = a.messenger.connect(b.endpoint)
    key = b.grant()
    memories = [SharedMemory.create(NBYTES, "many") for _ in range(8)]
    local = [a.messenger.register(memory) for memory in memories]
    remote = [b.messenger.register(memory) for memory in memories]
    keys = [b.messenger.grant(region, 0, NBYTES, read=True, write=False) for region in remote]
    for _ in range(3):
        for value, memory in enumerate(memories, start=1):
            memory.array[:] = value
            peer.write(key, local[value - 1], [[0, 0, NBYTES]]).result()
            assert set(np.unique(b.array).tolist()) == {value}
            peer.read(keys[value - 1], a.region, [[0, 0, NBYTES]]).result()
            assert set(np.unique(a.array).tolist()) == {value}
    assert num_mapped("many") == len(memories) + 2 * 3
    assert a.messenger.counters()["connects"] == 2
    for memory in memories:
        memory.close()
