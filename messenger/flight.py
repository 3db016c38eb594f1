"""What one stream has begun: the parts in flight, in order, and those that are to be sent again. Pure.

A part that is sent again because its connection broke keeps its number, by which the owner recognises it.
"""

from collections import deque
from collections.abc import Collection

from messenger.operation import READ, Operation, Part

__all__ = ["Flight"]


class Flight:
    def __init__(self) -> None:
        self.in_flight: deque[Part] = deque()
        """On the wire, the oldest first; they are answered in this order."""
        self.again: deque[Part] = deque()
        """To be begun before anything new."""
        self._next_seq = 1

    def begin(self, part: Part) -> None:
        """The part is in flight from now on."""
        if not part.seq:
            part.seq = self._next_seq
            self._next_seq += 1
        part.operation.flying += 1
        self.in_flight.append(part)

    def waiting(self, place: int = 0) -> Part | None:
        """The part that is answered after so many others. With or without the lock: the newest may be taken back."""
        try:
            return self.in_flight[place]
        except IndexError:
            return None

    def reads_next(self) -> bool:
        """Whether the part that is answered next reads. With or without the lock."""
        part = self.waiting()
        return part is not None and part.operation.kind is READ

    def answered(self) -> Part:
        """The oldest part was answered."""
        part = self.in_flight.popleft()
        part.operation.flying -= 1
        return part

    def ended(self, part: Part) -> None:
        """A part that was just begun ended without an answer."""
        assert self.in_flight.pop() is part
        part.operation.flying -= 1

    def one_step_more(self) -> None:
        """The oldest part was answered, and is to be sent once more as a new request."""
        part = self.answered()
        part.seq = 0
        self.again.appendleft(part)

    def connection_lost(self) -> None:
        """What was in flight is sent again, before everything else."""
        for part in self.in_flight:
            part.copied = False
            part.operation.flying -= 1
        self.again.extendleft(reversed(self.in_flight))
        self.in_flight.clear()

    def carries(self, operations: Collection[Operation]) -> bool:
        """Whether a part of one of them is in flight."""
        return any(part.operation in operations for part in self.in_flight)

    def drop(self, operations: Collection[Operation]) -> list[Part]:
        """Take the parts of these operations out of what is to be sent again."""
        dropped = [part for part in self.again if part.operation in operations]
        if dropped:
            self.again = deque(part for part in self.again if part.operation not in operations)
        return dropped
