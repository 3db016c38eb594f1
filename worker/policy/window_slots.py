"""Slots of KV groups with windows: a block has one only while some query may still see it, or nobody else needs it.

Blocks are those of `SlotPool`. A block with a slot is held (count > 0) or cached (count 0): the slot still has its KV,
until another block needs it. Blocks that a running sequence has left behind lose theirs first, then the least recently
released.

A request reserves the largest number of slots that it will hold at once before it takes its blocks, so that `hold`
within its reservation cannot fail, on whichever thread it is called.

Threads: all methods may be called on any thread; `_lock` guards everything. `slot_of` may be read without it for blocks
that the reader holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.policy.batch import BatchLimits


class OutOfSlots(Exception):
    """Fewer slots are available than requested; nothing was taken."""


def slots_of_answer(window_blocks: int) -> int:
    """Return the most window slots that a sequence holds at once while it decodes: what it sees, and a new block."""
    return window_blocks + 2


def slots_of_prompt(window_blocks: int, chunk_blocks: int) -> int:
    """Return the most window slots that a sequence holds at once until its prompt is computed.

    The ends of the blocks shared here and of those loaded from a pool, what one step writes, and two block ranges that
    it keeps for others.
    """
    return 4 * window_blocks + chunk_blocks + 3


def num_window_slots(limits: BatchLimits, window_blocks: int, num_blocks: int) -> int:
    """Return how many window slots a worker of `num_blocks` blocks has: the number in `limits`, or as many as full
    batches and two prompts at a time need, but at most one for each block.

    Raises ValueError if one prompt may need more than the given number.
    """
    most_of_prompt = slots_of_prompt(window_blocks, -(-limits.chunk_tokens // limits.block_tokens))
    if not limits.window_slots:
        return min(num_blocks, limits.max_batch * slots_of_answer(window_blocks) + 2 * most_of_prompt)
    least = min(num_blocks, most_of_prompt)
    if limits.window_slots < least:
        raise ValueError(
            f"--window-slots must be at least {least}, which one prompt of this model may need (a window has "
            f"{window_blocks} blocks), got {limits.window_slots}"
        )
    return min(num_blocks, limits.window_slots)


class WindowSlots:
    """Slots 0..num_slots-1 of the groups with windows; those of one block have the same number in each of them."""

    def __init__(
        self,
        num_blocks: int,
        num_slots: int,
        *,
        window_blocks: int,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`window_blocks`: blocks before a block that its first token may see. `lock` is needed if several threads call
        the methods.
        """
        self.num_slots = num_slots
        self.window_blocks = window_blocks
        self.slot_of: NDArray[np.int32] = np.full(num_blocks, -1, np.int32)
        self._free = list(range(num_slots))
        self._count = [0] * num_blocks
        self._behind: OrderedDict[int, None] = OrderedDict()  # cached blocks that sequences have left behind
        self._cached: OrderedDict[int, None] = OrderedDict()  # all others
        self._reserved = 0
        self._lock = lock or nullcontext()
        self._on_lost: Callable[[], object] | None = None
        self._lost: list[int] = []  # cached blocks that lost their slot since the last `take_lost`; only if watched

    @property
    def num_reserved(self) -> int:
        """Number of slots that requests have reserved."""
        return self._reserved

    def watch(self, on_lost: Callable[[], object]) -> None:
        """Call `on_lost`, on any thread and with the lock held, when `take_lost` has something to return."""
        self._on_lost = on_lost

    def take_lost(self) -> list[int]:
        """Return the blocks that lost their slots to others since the last call and have none now."""
        with self._lock:
            lost, self._lost = self._lost, []
            return [block for block in lost if self.slot_of[block] < 0]

    def first_seen(self, block: int) -> int:
        """Return the first block that the first token of `block` may see."""
        return max(0, block - self.window_blocks)

    def usable(self, blocks: Sequence[int], first_needed: int | None = None) -> int:
        """Return how many leading blocks of a prompt, at most those given, can be used.

        If n are used, those from `first_needed` on must have slots; by default those that block n may see.
        """
        with self._lock:
            present = [bool(has) for has in self.slot_of[list(blocks)] >= 0]
        if first_needed is not None:
            return next((i for i in range(first_needed, len(present)) if not present[i]), len(present))
        found = run = 0
        for i, has in enumerate(present):
            run = run + 1 if has else 0
            if run >= min(self.window_blocks, i + 1):
                found = i + 1
        return found

    def reserve(self, count: int) -> None:
        """Reserve slots. Raises OutOfSlots, and then reserves none."""
        with self._lock:
            if self._reserved + count > self.num_slots:
                raise OutOfSlots(
                    f"{count} window slots requested, {self.num_slots - self._reserved} of {self.num_slots} available"
                )
            self._reserved += count

    def unreserve(self, count: int) -> None:
        with self._lock:
            self._reserved -= count

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block; one without a slot gets one, whose content is undefined."""
        with self._lock:
            for block in blocks:
                if self.slot_of[block] < 0:
                    self.slot_of[block] = self._take()
                elif not self._count[block]:
                    self._uncache(block)
                self._count[block] += 1

    def try_hold(self, blocks: Sequence[int]) -> bool:
        """Add a reference to each block if all have a slot; return whether they had."""
        with self._lock:
            if any(self.slot_of[block] < 0 for block in blocks):
                return False
            for block in blocks:
                if not self._count[block]:
                    self._uncache(block)
                self._count[block] += 1
            return True

    def drop(self, blocks: Iterable[int], *, left_behind: bool = False) -> None:
        """Drop one reference to each block. `left_behind`: they are probably not used again."""
        with self._lock:
            for block in blocks:
                if self._count[block] <= 0:
                    raise ValueError(f"block {block} is dropped but not held")
                self._count[block] -= 1
                if not self._count[block]:
                    (self._behind if left_behind else self._cached)[block] = None

    def forget(self, block: int) -> None:
        """Free the block's slot, if it has one, because the block is free or will have other content.

        Raises ValueError if somebody holds it.
        """
        with self._lock:
            if self._count[block]:
                raise ValueError(f"block {block} loses its content, but its window slot is held")
            if self.slot_of[block] >= 0:
                self._uncache(block)
                self._free.append(int(self.slot_of[block]))
                self.slot_of[block] = -1

    def validate(self) -> list[str]:
        """Return inconsistencies; empty if there are none."""
        with self._lock:
            used = [int(slot) for slot in self.slot_of if slot >= 0]
            problems = []
            if sorted(used + self._free) != list(range(self.num_slots)):
                problems.append("a window slot is used twice, or by nobody")
            held = {block for block, count in enumerate(self._count) if count}
            cached = {*self._cached, *self._behind}
            if held & cached or len(held) + len(self._cached) + len(self._behind) != len(used):
                problems.append("a block with a window slot is neither held nor cached, or both")
            if len(held) > self._reserved:
                problems.append(f"{len(held)} window slots are held, {self._reserved} reserved")
            return problems

    def _uncache(self, block: int) -> None:
        if block in self._behind:
            del self._behind[block]
        else:
            del self._cached[block]

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._behind and not self._cached:
            raise OutOfSlots("more window slots are held than reserved")
        block, _ = (self._behind or self._cached).popitem(last=False)
        slot = int(self.slot_of[block])
        self.slot_of[block] = -1
        if self._on_lost is not None:
            self._lost.append(block)
            if len(self._lost) == 1:
                self._on_lost()
        return slot


class WindowHold:
    """The window slots that one request holds, by the index of the block in its prompt and answer.

    Used by one thread at a time: the event loop, and the engine's thread while the sequence is in the engine.
    """

    def __init__(self, slots: WindowSlots, blocks: list[int], reserved: int, *, keeps_all: bool = False) -> None:
        """`blocks` are the request's, in order; the list grows with the answer. The slots are reserved already.

        `keeps_all`: no block is left behind, since other nodes compute parts of the prompt.
        """
        self._slots = slots
        self.blocks = blocks
        self._reserved = reserved
        self._held: set[int] = set()
        self._first = 0  # none below is held, apart from kept ones
        self._kept: frozenset[int] = frozenset()
        self._is_checked = False
        self.keeps_all = keeps_all
        self._cycle = 0

    def roll(self, num_blocks: int) -> None:
        """Let the sequence's blocks use the first `num_blocks` of the request's in turn."""
        self._cycle = num_blocks

    def try_share(self, first: int, end: int) -> bool:
        """Hold blocks [first, end), which have content. Returns False, and holds none, if some have no slot."""
        if not self._slots.try_hold(self.blocks[first:end]):
            return False
        self._held.update(range(first, end))
        return True

    def reach(self, first: int, end: int) -> None:
        """Hold blocks [first, end), which are about to be written."""
        new = [i for i in range(first, end) if i not in self._held]
        if new:
            self._slots.hold(self._blocks_of(new))
            self._held.update(new)
            self._first = min(self._first, first)

    def step(self, first: int, end: int) -> None:
        """Hold blocks [first, end), which a step is about to write. Raises ValueError if it could see dropped ones."""
        if self._is_checked and end - 1 in self._held and first in self._held:
            return
        seen = self._slots.first_seen(first)
        if missing := [i for i in range(seen, first) if i not in self._held]:
            raise ValueError(
                f"blocks {missing[0]} to {missing[-1]} of a sequence are dropped, but block {first} sees them"
            )
        self.reach(first, end)
        self._is_checked = True

    def keep(self, blocks: Iterable[int]) -> None:
        """Hold these blocks and no others, once they are reached, until the request ends."""
        self._kept = frozenset(blocks)

    def leave(self, block: int) -> None:
        """Drop the blocks that no token from `block` on may see, apart from kept ones."""
        first = self._slots.first_seen(block)
        if first <= self._first or self.keeps_all:
            return
        behind = sorted(i for i in self._held if i < first and i not in self._kept)
        self._first = first
        if behind:
            self._held.difference_update(behind)
            self._slots.drop(self._blocks_of(behind), left_behind=True)

    def restart(self) -> None:
        """Check again, at the next step, that all blocks that it sees are held."""
        self._is_checked = False

    def give_up(self, end: int) -> None:
        """Drop the blocks before `end`, kept or not."""
        gone = sorted(i for i in self._held if i < end)
        self._held.difference_update(gone)
        self._slots.drop(self._blocks_of(gone))

    def tail(self, end: int) -> range | None:
        """Return the blocks before block `end` that its first token may see; None unless all of them are held."""
        blocks = range(self._slots.first_seen(end), end)
        return blocks if all(i in self._held for i in blocks) else None

    def close(self) -> None:
        """Drop everything. Idempotent."""
        held, self._held = sorted(self._held, reverse=True), set()
        self._slots.drop(self._blocks_of(held))  # the last ones are reused first
        self._slots.unreserve(self._reserved)
        self._reserved = 0

    def _blocks_of(self, indices: Iterable[int]) -> list[int]:
        return [self.blocks[i % self._cycle if self._cycle else i] for i in indices]
