"""Sampling of smaller traces that keep the prefix reuse of the larger one. Pure.

Rows that share a prefix are kept or dropped together, because a sample would otherwise lose the trace's reuse. In the
conversation trace every row starts with id 0 (the system prompt), so the family of a row is its second id.
"""

from __future__ import annotations

import hashlib

from traces.errors import EmptySelection, TraceError
from traces.row import Trace, TraceRow

FamilyKey = tuple[str, int]

SAMPLING_SEED = 8
"""Default seed: of the first 300 seeds, the one whose 10 % sample of the conversation trace is closest to the whole.

The sample has 1,217 requests; its block and token hit rates, mean prompt and mean output are within 1.2 % of the whole
trace's. Other seeds' hit rates are within about 0.06 of it.
"""


def family_keys(trace: Trace) -> list[FamilyKey]:
    """Return the prefix family of every row, in row order.

    Rows of the same single id form a family, unless longer rows start with that id: then the id is in every sample
    anyway, and each such row is its own family.
    """
    roots = {row.hash_ids[0] for row in trace if len(row.hash_ids) > 1}

    def key(row: TraceRow) -> FamilyKey:
        if len(row.hash_ids) > 1:
            return "second", row.hash_ids[1]
        first = row.hash_ids[0]
        return ("row", row.index) if first in roots else ("first", first)

    return [key(row) for row in trace]


def sample_families(trace: Trace, fraction: float, *, seed: int = SAMPLING_SEED) -> Trace:
    """Keep `fraction` of the prefix families (rounded, at least one).

    The choice by a hash of (seed, family) is deterministic, and the families of a smaller fraction are a subset of
    those of a larger one. Raises TraceError for an invalid fraction.
    """
    if not 0 < fraction <= 1:
        raise TraceError(f"cannot sample a fraction of {fraction} of the families; expected more than 0, at most 1")
    keys = family_keys(trace)
    families = sorted(set(keys), key=lambda family: (_rank(family, seed), family))
    kept = set(families[: max(1, round(fraction * len(families)))])
    rows = tuple(row for row, family in zip(trace, keys, strict=True) if family in kept)
    return trace.with_rows(rows, f"{len(kept)} of {len(families)} prefix families sampled (seed {seed})")


def first_requests(trace: Trace, limit: int) -> Trace:
    """Return the first `limit` requests."""
    if limit < 1:
        raise TraceError(f"cannot limit a trace to {limit} requests; expected at least 1")
    return trace.with_rows(trace.rows[:limit], f"limited to the first {limit} requests")


def first_seconds(trace: Trace, duration_s: float) -> Trace:
    """Return the requests of the first `duration_s` seconds of the trace's own time."""
    rows = tuple(row for row in trace if row.timestamp_ms < duration_s * 1000)
    if not rows:
        raise EmptySelection(f"no request arrives in the first {duration_s:g} s of {trace.source}")
    return trace.with_rows(rows, f"limited to the first {duration_s:g} s")


def _rank(family: FamilyKey, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}:{family[0]}:{family[1]}".encode(), digest_size=16).digest()
