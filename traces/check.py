"""All problems of a trace in any format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from traces.errors import ProblemKind, TraceFormatError
from traces.reader import IdChain
from traces.source import TraceSource


@dataclass
class TraceCheck:
    """Problems of a trace: the first ones, and how many of each kind."""

    requests: int = 0
    problems: list[TraceFormatError] = field(default_factory=list)
    counts: Counter[ProblemKind] = field(default_factory=Counter)


def check_trace(source: TraceSource, *, most: int, on_request: Callable[[int], None] | None = None) -> TraceCheck:
    """Read a whole trace and return its problems, at most the first `most` one by one.

    `on_request` is called with the number of every valid request, from 1.

    Times that are earlier than before, and ids that are not those of chained hashes, count as problems, although a
    replay sorts the former and counts no reuse for the latter.
    """
    found = TraceCheck()

    def problem(error: TraceFormatError) -> None:
        found.counts[error.kind] += 1
        if len(found.problems) < most:
            found.problems.append(error)

    chain = IdChain()
    latest_ms: int | None = None
    rows = source.placed_rows(problem)
    while True:
        try:
            place, row = next(rows)
        except StopIteration:
            return found
        except TraceFormatError as error:  # nothing that follows can be read
            problem(error)
            return found
        found.requests += 1
        if on_request is not None:
            on_request(found.requests)
        if source.format.has_own_times:
            if latest_ms is not None and row.timestamp_ms < latest_ms:
                problem(
                    place.bad(f"a time {latest_ms - row.timestamp_ms} ms earlier", "rows in order of time", "order")
                )
            latest_ms = row.timestamp_ms if latest_ms is None else max(latest_ms, row.timestamp_ms)
        if source.format.keeps_ids and not chain.follow(row.hash_ids):
            problem(place.bad("an id after another prefix than before", "ids of chained hashes", "chain"))
