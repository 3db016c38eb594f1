"""Detection of silent rails, which have work under way and complete nothing, as opposed to slow or idle ones. Pure.

Adapters give a request up after their own retries, but not all do in every case: soft-RoCE repeats some packets for
ever. So the completions are watched as well. Work is posted in units of at most 4 MiB, each with a completion of its
own, so a rail without a completion for ten seconds is not just slow.

Time is counted in ticks between polls of the completions: a process that was stopped for a minute, or got no processor
time, has not waited for its rails meanwhile.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

TICKS: Final = 8
"""Consecutive ticks without a completion, each an eighth of the limit, after which a rail is silent."""


class PostedCounts(NamedTuple):
    """A queue pair with its counts of requests: posted, signalled (`asked`) and done."""

    pair: object
    posted: int
    asked: int
    done: int


class SilenceDetector:
    """Detector for the rails of one connection, by index."""

    def __init__(self, limit_ns: int, now_ns: int) -> None:
        self._tick_ns = limit_ns // TICKS
        self.next_ns = now_ns + self._tick_ns
        """Time of the next tick."""
        self.is_at_rest = False
        """True if at the last tick nothing was under way and nothing was done: the next one may wait for work."""
        self._books: dict[int, PostedCounts] = {}
        self._stuck: dict[int, int] = {}

    def tick(self, books: Sequence[PostedCounts | None], now_ns: int) -> tuple[list[int], list[int]]:
        """Return (silent rails, rails from which a completion must be requested because no pending request reports
        one). None stands for an unused rail.
        """
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
