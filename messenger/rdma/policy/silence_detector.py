"""Detection of silent rails, which have work in flight and complete nothing, as opposed to slow or idle ones. Pure.

Adapters fail a request after their own retries, but not in every case: soft-RoCE repeats some packets indefinitely. So
the completions are monitored as well. Work is posted in units of at most 4 MiB, each with its own completion, so a rail
without a completion for ten seconds is not just slow.

Time is counted in ticks between polls of the completions, so that time in which this process was stopped, or got no
processor time, does not count.
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
        """True if at the last tick nothing was in flight and nothing had completed: no tick is needed without work."""
        self._books: dict[int, PostedCounts] = {}
        self._stuck: dict[int, int] = {}

    def tick(self, books: Sequence[PostedCounts | None], now_ns: int) -> tuple[list[int], list[int]]:
        """Process a tick; `books` has one entry per rail, None if it is unused.

        Returns (silent rails, rails on which a completion must be requested because all pending requests are
        unsignalled).
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
