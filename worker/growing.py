"""Gives running answers more slots before they need them. Who gets none keeps its KV and waits: nothing is lost.

Lives on the event loop. What may be granted is `GrowthBook`'s to say: whoever runs can end, whatever it may need.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many

from worker.policy import OutOfSlots
from worker.policy.growth import GrowthBook
from worker.policy.turns import Key
from worker.request import Sequence

__all__ = ["Growing"]


class Growing:
    """The answers of one worker that were given fewer slots than they may need."""

    def __init__(
        self,
        num_slots: int,
        block_tokens: int,
        *,
        allocate: Callable[[int], list[int]],
        extend: Callable[[Sequence, list[int]], None],
        waits: Callable[[], None],
    ) -> None:
        """`allocate(count)` takes slots or raises OutOfSlots, `extend` hands them to the engine; `waits()` is called
        when one is not given what it asked for."""
        self._book = GrowthBook(num_slots)
        self._block_tokens = block_tokens
        self._allocate = allocate
        self._extend = extend
        self._waits = waits
        self._running: dict[int, Sequence] = {}
        self._asking: dict[int, Sequence] = {}

    def __len__(self) -> int:
        """Requests that may still take more."""
        return len(self._book)

    @property
    def is_short(self) -> bool:
        """Somebody who runs waits for slots: nobody new should get any."""
        return bool(self._asking)

    def begin(self, key: Key, slots: Many[int], wants: int) -> bool:
        """The request took `slots` and may need `wants` more. False where that could keep others from ending."""
        return self._book.begin(key, slots, wants)

    def end(self, key: Key) -> None:
        """The request is about to give back its slots."""
        self._book.end(key)

    def run(self, sequence: Sequence) -> None:
        """It goes to the engine."""
        if self._book.wants(sequence.request.key):
            self._running[id(sequence)] = sequence
            self.stepped(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It has left the engine."""
        self._running.pop(id(sequence), None)
        self._asking.pop(id(sequence), None)

    def stepped(self, sequence: Sequence) -> None:
        """It has one more token: the block after the next is asked for in time."""
        if id(sequence) not in self._running or id(sequence) in self._asking:
            return
        if sequence.num_tokens + self._block_tokens > len(sequence.slots) * self._block_tokens:
            self._asking[id(sequence)] = sequence
            self.serve()
            if id(sequence) in self._asking:
                self._waits()

    def serve(self) -> None:
        """Slots may have come back: give them to those who run, those who came first at their head."""
        now_s = time.monotonic()
        for sequence in sorted(self._asking.values(), key=lambda sequence: sequence.turn.rank(now_s)):
            key = sequence.request.key
            if not self._book.may_extend(key, 1):
                continue
            try:
                slots = self._allocate(1)
            except OutOfSlots:
                return
            self._book.extend(key, slots)
            self._extend(sequence, slots)
            del self._asking[id(sequence)]
            if not self._book.wants(key):
                del self._running[id(sequence)]
