"""The slot pool against a simple model: no slot is ever in two hands."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.policy import OutOfSlots, SlotPool
from worker.policy.held_blocks import HeldBlocks

NUM_SLOTS = 8


class SlotPoolMachine(RuleBasedStateMachine):
    """Requests come, share prefixes, and go in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.held = HeldBlocks()
        self.pool = SlotPool(NUM_SLOTS, on_indexed=self.held.add, on_forgotten=self.held.discard)
        self.reported: set[bytes] = set()  # blocks held, by the changes reported so far
        self.requests: list[list[int]] = []
        self.quarantined: list[int] = []

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def admit(self, prompt: list[int]) -> None:
        keys = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
        indexed = self.pool.match(keys)
        before = self.pool.num_held, self.pool.num_available
        try:
            slots, num_shared, *_ = self.pool.acquire(keys, len(keys))
        except OutOfSlots:
            assert (self.pool.num_held, self.pool.num_available) == before
            assert self.pool.num_available < len(keys)
            return
        assert slots[:num_shared] == indexed
        fresh = set(slots[num_shared:])
        owned = {slot for request in self.requests for slot in request}
        assert not fresh & (owned | set(indexed) | set(self.quarantined))
        for slot, key in zip(slots, keys, strict=True):
            self.pool.index(slot, key)
        self.requests.append(slots)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pool.release(self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1))))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def fence(self, data: st.DataObject) -> None:
        slots = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        mine = [s for s in slots if all(s not in request for request in self.requests)]
        self.pool.release([s for s in slots if s not in mine])
        self.pool.quarantine(mine)
        self.quarantined += mine

    @rule(key=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def forget(self, key: list[int]) -> None:
        self.pool.forget(bytes(key))
        assert self.pool.match([bytes(key)]) == []

    @precondition(lambda self: self.quarantined)
    @rule()
    def readmit(self) -> None:
        self.pool.readmit(self.quarantined)
        self.quarantined = []

    @rule()
    def report(self) -> None:
        """Take the changes: with the reports before, they add up to the index, and nothing is reported twice."""
        stored, removed = self.held.take_changes()
        assert not self.reported & set(stored)
        assert set(removed) <= self.reported
        assert len(stored) + len(removed) == len({*stored, *removed})
        self.reported = self.reported - set(removed) | set(stored)
        assert self.reported == set(self.held.keys()) == set(self.pool._index)

    @invariant()
    def the_books_agree(self) -> None:
        assert self.pool.validate() == []
        held = {slot for request in self.requests for slot in request}
        assert self.pool.num_held == len(held)
        assert self.pool.num_available == NUM_SLOTS - len(held) - len(self.quarantined)


TestSlotPool = SlotPoolMachine.TestCase
TestSlotPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_released_blocks_are_found_again() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(2)
    pool.index(slots[0], b"a")
    pool.index(slots[1], b"b")
    pool.release(slots)
    assert pool.match([b"a", b"b", b"c"]) == slots


def test_a_gap_in_the_prefix_ends_the_match() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(1)
    pool.index(slots[0], b"b")
    assert pool.match([b"a", b"b"]) == []


def test_the_end_of_a_prefix_is_reused_before_its_head() -> None:
    pool = SlotPool(2)
    slots = pool.allocate(2)
    pool.index(slots[0], b"a")
    pool.index(slots[1], b"b")
    pool.release(slots)
    assert pool.allocate(1) == [slots[1]]
    assert pool.match([b"a", b"b"]) == [slots[0]]


def test_a_forgotten_block_is_shared_no_more_but_stays_with_those_who_hold_it() -> None:
    pool = SlotPool(2)
    [slot] = pool.allocate(1)
    pool.index(slot, b"a")
    pool.forget(b"a")
    assert pool.match([b"a"]) == []
    [other] = pool.allocate(1)
    assert other != slot
    pool.index(other, b"a")
    assert pool.match([b"a"]) == [other]


def test_quarantined_slots_are_not_handed_out() -> None:
    pool = SlotPool(2)
    slots = pool.allocate(2)
    pool.index(slots[0], b"a")
    pool.quarantine(slots)
    assert pool.match([b"a"]) == []
    with pytest.raises(OutOfSlots):
        pool.allocate(1)
    pool.readmit(slots)
    assert sorted(pool.allocate(2)) == sorted(slots)


def test_releasing_twice_is_refused() -> None:
    pool = SlotPool(1)
    slots = pool.allocate(1)
    pool.release(slots)
    with pytest.raises(ValueError, match="not held"):
        pool.release(slots)
