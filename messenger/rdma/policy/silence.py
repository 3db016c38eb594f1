"""Rails that have work under way and complete nothing, told from those that are slow or at rest; pure.

Adapters give a request up after their own retries, but not all do, and not in every case: soft-RoCE repeats a packet
for ever that it cannot get rid of. So the completions are watched as well. A rail's work comes in posts of 4 MiB at
most, each with a completion of its own, so one that completes nothing for ten seconds is no slow one.

Time is counted in ticks, between which the completions were looked at: a process that was stopped for a minute, or did
not get the processor, has not waited for its rails meanwhile.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

TICKS: Final = 8
"""In a row, each an eighth of the limit, without a completion: the rail is silent."""


class Book(NamedTuple):
    """A queue pair, and how many requests were posted to it, were to tell of their completion, and are done."""

    pair: object
    posted: int
    asked: int
    done: int


class Silence:
    """The rails of one connection, by index."""

    def __init__(self, limit_ns: int, now_ns: int) -> None:
        self._tick_ns = limit_ns // TICKS
        self.next_ns = now_ns + self._tick_ns
        """When the next tick is due."""
        self.is_at_rest = False
        """Whether nothing was under way, and nothing was done, at the last tick: the next one may wait for work."""
        self._books: dict[int, Book] = {}
        self._stuck: dict[int, int] = {}

    def tick(self, books: Sequence[Book | None], now_ns: int) -> tuple[list[int], list[int]]:
        """(rails that are silent; rails to be asked for a completion, since nothing under way there is to tell of its
        own). None: a rail that is not in use."""
        self.next_ns = now_ns + self._tick_ns
        silent, unasked = [], []
        self.is_at_rest = True
        for rail, book in enumerate(books):
            before = self._books.get(rail)
            if book is None:
                self._books.pop(rail, None)
                self._stuck.pop(rail, None)
                continue
            self._books[rail] = book
            is_stuck = before is not None and before.pair is book.pair and before.done == book.done < before.posted
            self._stuck[rail] = self._stuck.get(rail, 0) + 1 if is_stuck else 0
            if self._stuck[rail] >= TICKS:
                silent.append(rail)
            elif book.asked <= book.done < book.posted:
                unasked.append(rail)
            if book.done < book.posted or before is None or before.done != book.done:
                self.is_at_rest = False
        return silent, unasked
