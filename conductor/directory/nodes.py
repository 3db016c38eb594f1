"""What a directory knows of the nodes it follows, beside their blocks: numbers and places in their streams. Pure."""

import enum
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["DirectoryState", "FollowedNode", "NodeNumbers", "Position"]

_PATIENCE = 4096  # events between snapshots taken because sums disagree, doubled each time


class DirectoryState(enum.Enum):
    """How far a node's part of the directory can be trusted."""

    EXACT = "exact"
    DEGRADED = "degraded"


class Position(NamedTuple):
    """A place in a node's stream of events; (0, 0): none."""

    incarnation: int
    seq: int


@dataclass
class FollowedNode:
    """One node. `synced`: a snapshot is in, and every event since up to `seq`."""

    number: int
    incarnation: int = 0
    seq: int = 0
    synced: bool = False
    state: DirectoryState = DirectoryState.DEGRADED
    shadow: int | None = None  # the number under which a snapshot is being taken in
    why: str = "new"  # what the next snapshot is for
    right_at: int = 0  # a restored dump is right from this event on
    generation: int = 0  # of the number: what is known was begun anew so many times
    disagreements: int = 0  # in a row
    patient_until: int = 0  # event up to which no further snapshot is asked for because of them

    def restart(self, incarnation: int) -> None:
        """Another incarnation: what was known is of no use."""
        self.why = "restart" if self.incarnation else self.why
        self.incarnation, self.synced, self.state = incarnation, False, DirectoryState.DEGRADED
        self.generation += 1
        self.right_at = self.disagreements = self.patient_until = 0

    def restore(self, position: Position, right_at: int) -> None:
        self.incarnation, self.seq = position
        self.synced, self.right_at, self.why = True, right_at, "behind"

    def begin_snapshot(self, shadow: int) -> None:
        self.shadow, self.synced, self.state = shadow, False, DirectoryState.DEGRADED

    def end_snapshot(self, seq: int) -> None:
        assert self.shadow is not None
        self.number, self.shadow = self.shadow, None
        self.generation += 1
        self.seq, self.synced, self.right_at, self.why = seq, True, 0, "behind"

    def refuse(self, why: str) -> None:
        """The stream cannot go on without a snapshot."""
        if self.synced or self.why == "behind":
            self.why = why
        self.synced, self.state = False, DirectoryState.DEGRADED

    def agree(self) -> None:
        """The node's sum is the one that is known."""
        self.state, self.disagreements = DirectoryState.EXACT, 0

    def go_on(self) -> None:
        """A message without a sum: as right as before it."""
        if not self.disagreements:
            self.state = DirectoryState.EXACT

    def disagree(self) -> bool:
        """The node's sum is another. A snapshot may mend it; True: take one.

        If that did not help, more of them soon would not either: the stream goes on, DEGRADED. As a rule two blocks
        have the same short key then, until one of them leaves.
        """
        self.state = DirectoryState.DEGRADED
        if self.disagreements and self.seq < self.patient_until:
            return False
        self.patient_until = self.seq + (_PATIENCE << min(self.disagreements, 20))
        self.disagreements += 1
        return True


class NodeNumbers:
    """Small numbers from 1 on, each for one node at a time; a retired one is free once nothing is held under it."""

    def __init__(self) -> None:
        self._names: list[str | None] = [None]
        self.version = 0  # of the names
        self._free: list[int] = []
        self._dying: set[int] = set()
        self._late: set[int] = set()  # of these, those that the pass under way has not seen from its begin

    @property
    def dying(self) -> Set[int]:
        """Numbers under which blocks are still to be taken out."""
        return self._dying

    @property
    def names(self) -> Sequence[str | None]:
        """By number; see `name`."""
        return self._names

    def name(self, number: int) -> str | None:
        """Whose number it is; None when what it holds is not to be seen."""
        return self._names[number]

    def take(self, name: str | None) -> int:
        """A number for a node, or for what is not to be seen yet."""
        self.version += 1
        if not self._free:
            self._names.append(name)
            return len(self._names) - 1
        number = self._free.pop()
        self._names[number] = name
        return number

    def rename(self, number: int, name: str) -> None:
        self.version += 1
        self._names[number] = name

    def retire(self, number: int, *, holds: bool, in_pass: bool) -> None:
        """The node has no use for it any more. `in_pass`: a pass that takes blocks out is under way."""
        self.version += 1
        self._names[number] = None
        if not holds:
            self._free.append(number)
            return
        self._dying.add(number)
        if in_pass:
            self._late.add(number)

    def end_pass(self) -> None:
        """All blocks of numbers that were dying when this pass began are out."""
        self._free += sorted(self._dying - self._late)
        self._dying, self._late = self._late, set()
