"""Slots of groups with windows: no step sees anything but what was written for the blocks before it."""

import threading
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.policy import (
    BatchLimits,
    OutOfSlots,
    SlotPool,
    TakenSlots,
    WindowHold,
    WindowSlots,
    num_window_slots,
    slots_of_prompt,
)

NUM_SLOTS, NUM_WINDOW_SLOTS, WINDOW = 12, 9, 2


@dataclass
class Request:
    keys: list[bytes]
    taken: TakenSlots
    at: int  # the next block to compute
    since: list[bytes] = field(default_factory=list)

    @property
    def window(self) -> WindowHold:
        assert self.taken.window is not None
        return self.taken.window


class WindowMachine(RuleBasedStateMachine):
    """Prompts share prefixes, are computed block by block in turns, and end in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.windows = WindowSlots(NUM_SLOTS, NUM_WINDOW_SLOTS, window_blocks=WINDOW)
        self.indexed, self.announced = set[bytes](), set[bytes]()
        self.pool = SlotPool(
            NUM_SLOTS,
            windows=self.windows,
            on_indexed=self.indexed.add,
            on_forgotten=self.indexed.remove,
            on_window_indexed=self.announced.add,
            on_window_forgotten=self.announced.remove,
        )
        self.has_lost = False
        self.windows.watch(self._lose)
        self.content: dict[int, bytes] = {}  # of window slots
        self.requests: list[Request] = []

    def _lose(self) -> None:
        assert not self.has_lost  # it is called once until the blocks are taken
        self.has_lost = True

    def _of(self, data: st.DataObject) -> Request:
        return self.requests[data.draw(st.integers(0, len(self.requests) - 1))]

    def _holds(self, request: Request, block: int) -> bool:
        slot = int(self.windows.slot_of[request.taken.slots[block]])
        return slot >= 0 and self.content.get(slot) == request.keys[block]

    @rule(prompt=st.lists(st.integers(0, 1), min_size=2, max_size=8), branch=st.integers(0, 8))
    def admit(self, prompt: list[int], branch: int) -> None:
        keys = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
        before = self.pool.num_held, self.windows.num_reserved
        most = min(len(keys), slots_of_prompt(WINDOW, 1))
        try:
            taken = self.pool.acquire(keys[:-1], len(keys), window_slots=most)
        except OutOfSlots:
            assert (self.pool.num_held, self.windows.num_reserved) == before
            return
        request = Request(keys, taken, taken.num_shared)
        assert all(self._holds(request, i) for i in range(max(0, request.at - WINDOW), request.at))
        if request.at < branch < len(keys):
            request.window.keep(range(max(0, branch - WINDOW), branch))
        self.requests.append(request)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=2, max_size=8))
    def receive(self, prompt: list[int]) -> None:
        """A decode node takes the slots of a prompt that another node computes, and gets what its next token sees."""
        keys = [bytes(prompt[: i + 1]) for i in range(len(prompt))]
        seen_from = self.windows.first_seen(len(keys))
        try:
            taken = self.pool.acquire(keys, len(keys), window_slots=min(len(keys), WINDOW + 2), seen_from=seen_from)
        except OutOfSlots:
            return
        request = Request(keys, taken, len(keys))
        shared = max(seen_from, taken.num_shared)
        assert all(self._holds(request, i) for i in range(seen_from, taken.num_shared))
        request.window.reach(shared, len(keys))
        for i in range(shared, len(keys)):
            self.content[int(self.windows.slot_of[taken.slots[i]])] = keys[i]
        self.requests.append(request)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        request = self._of(data)
        if request.at < len(request.keys):
            request.window.step(request.at, request.at + 1)
            assert all(self._holds(request, i) for i in range(max(0, request.at - WINDOW), request.at))
            self.content[int(self.windows.slot_of[request.taken.slots[request.at]])] = request.keys[request.at]
            request.at += 1
            request.window.leave(request.at)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), saves=st.booleans())
    def finish(self, data: st.DataObject, saves: bool) -> None:
        request = self._of(data)
        self.requests = [each for each in self.requests if each is not request]
        tail = request.window.tail(request.at)
        assert tail is not None
        assert all(self._holds(request, i) for i in tail)
        if saves:
            for slot, key in zip(request.taken.slots[: request.at], request.keys, strict=False):
                self.pool.index(slot, key)
        request.window.close()
        self.pool.release(request.taken.slots)

    @invariant()
    def the_books_agree(self) -> None:
        assert self.pool.validate() == []

    @invariant()
    def the_announced_blocks_are_those_with_the_right_content(self) -> None:
        if self.has_lost:
            self.has_lost = False
            self.pool.settle_windows()
        slots = {key: int(self.windows.slot_of[block]) for key in self.indexed for block in self.pool.match([key])}
        assert self.announced == {key for key, slot in slots.items() if slot >= 0}
        assert all(self.content[slot] == key for key, slot in slots.items() if slot >= 0)


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def computed(pool: SlotPool, keys: list[bytes], *, window_slots: int) -> TakenSlots:
    """Take slots for a prompt, compute it block by block, and index it."""
    taken = pool.acquire(keys, len(keys), window_slots=window_slots)
    assert taken.window is not None
    for i in range(taken.num_shared, len(keys)):
        taken.window.step(i, i + 1)
        taken.window.leave(i + 1)
    for slot, key in zip(taken.slots, keys, strict=True):
        pool.index(slot, key)
    return taken


def keys_of(name: str, count: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(count)]


def ended(pool: SlotPool, taken: TakenSlots) -> None:
    assert taken.window is not None
    taken.window.close()
    pool.release(taken.slots)


def test_a_long_prompt_holds_no_more_than_its_window_and_a_step() -> None:
    windows = WindowSlots(1000, 4, window_blocks=2)
    pool = SlotPool(1000, windows=windows)
    taken = computed(pool, keys_of("a", 1000), window_slots=4)
    assert int((windows.slot_of >= 0).sum()) <= 4
    ended(pool, taken)


def test_a_prefix_is_shared_up_to_a_block_before_which_the_window_is_complete() -> None:
    windows = WindowSlots(32, 6, window_blocks=2)
    pool = SlotPool(32, windows=windows)
    ended(pool, computed(pool, keys_of("a", 10), window_slots=4))
    other = computed(pool, keys_of("b", 10), window_slots=4)  # takes the slots that the first one left behind
    assert pool.acquire(keys_of("a", 10), 12, window_slots=2).num_shared == 10
    assert pool.acquire(keys_of("a", 9), 10, window_slots=0).num_shared == 0
    ended(pool, other)
    assert pool.validate() == []


def test_indexed_blocks_that_lose_their_slots_are_announced_once_they_are_settled() -> None:
    windows, announced, calls = WindowSlots(64, 8, window_blocks=2), set[bytes](), list[None]()
    windows.watch(lambda: calls.append(None))
    pool = SlotPool(64, windows=windows, on_window_indexed=announced.add, on_window_forgotten=announced.remove)
    for name in "abc":
        ended(pool, computed(pool, keys_of(name, 10), window_slots=4))
        assert calls
        pool.settle_windows()
        calls.clear()
        held = {
            key for n in "abc" for key in keys_of(n, 10) for slot in pool.match([key]) if windows.slot_of[slot] >= 0
        }
        assert announced == held
        assert len(held) == 8
        assert set(keys_of(name, 10)[-2:]) <= held
    pool.forget(b"c9")
    assert b"c9" not in announced


def test_slots_left_behind_are_taken_before_ends_of_sequences() -> None:
    windows = WindowSlots(64, 8, window_blocks=2)
    pool = SlotPool(64, windows=windows)
    for name in "ab":
        ended(pool, computed(pool, keys_of(name, 10), window_slots=4))
    assert [pool.acquire(keys_of(name, 10), 10, window_slots=2).num_shared for name in "ab"] == [10, 10]


def test_a_request_that_finds_no_window_slots_takes_nothing() -> None:
    pool = SlotPool(8, windows=WindowSlots(8, 3, window_blocks=2))
    first = pool.acquire([], 4, window_slots=3)
    with pytest.raises(OutOfSlots, match="1 window slots requested, 0 of 3 available"):
        pool.acquire([], 1, window_slots=1)
    assert pool.num_held == 4
    ended(pool, first)
    assert pool.validate() == []


def test_a_step_that_would_see_a_dropped_block_is_refused() -> None:
    pool = SlotPool(8, windows=WindowSlots(8, 8, window_blocks=2))
    taken = pool.acquire([], 8, window_slots=8)
    assert taken.window is not None
    taken.window.step(0, 4)
    taken.window.leave(6)
    taken.window.restart()
    with pytest.raises(ValueError, match="blocks 1 to 2 of a sequence are dropped, but block 3 sees them"):
        taken.window.step(3, 5)


def test_slots_taken_on_another_thread_are_not_shared() -> None:
    """The engine's thread takes cached slots while the event loop shares them."""
    windows = WindowSlots(64, 8, window_blocks=2, lock=threading.Lock())
    pool = SlotPool(64, windows=windows)
    ended(pool, computed(pool, keys_of("a", 4), window_slots=4))
    runner = pool.acquire([], 40, window_slots=6)
    assert runner.window is not None
    go_on = threading.Event()

    def run() -> None:
        assert runner.window is not None
        for i in range(40):
            runner.window.step(i, i + 1)
            runner.window.leave(i + 1)
            go_on.set()

    thread = threading.Thread(target=run)
    thread.start()
    go_on.wait(10)
    for _ in range(200):
        taken = pool.acquire(keys_of("a", 4), 4, window_slots=2)
        assert taken.window is not None
        assert taken.window.tail(taken.num_shared) is not None
        ended(pool, taken)
    thread.join()
    ended(pool, runner)
    assert pool.validate() == []


def test_a_worker_has_window_slots_for_a_full_batch_and_two_prompts() -> None:
    assert num_window_slots(BatchLimits(64, 512, 16), 3, 1000) == 64 * 5 + 2 * (4 * 3 + 32 + 3)
    assert num_window_slots(BatchLimits(64, 512, 16), 3, 100) == 100


def test_a_worker_has_the_window_slots_of_its_setting_but_no_fewer_than_one_prompt_needs() -> None:
    assert num_window_slots(BatchLimits(64, 512, 16, window_slots=50), 3, 1000) == 50
    assert num_window_slots(BatchLimits(64, 512, 16, window_slots=50), 3, 40) == 40
    assert num_window_slots(BatchLimits(64, 512, 16, window_slots=40), 3, 40) == 40
    with pytest.raises(ValueError, match=r"--window-slots must be at least 47, which one prompt .*, got 46"):
        num_window_slots(BatchLimits(64, 512, 16, window_slots=46), 3, 1000)
