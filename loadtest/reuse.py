"""Where the reused tokens of a replay came from, and what each place saved. Pure.

A place's saving is estimated from the replay itself: prefill seconds are fitted as a + b·(n - p) + c·(n² - p²) over
prompts of n tokens of which p were reused (fixed cost, linear layers, attention; least squares on relative errors).
Computing a request's reused prefix would so have taken b·p + c·p² more, which is shared out by tokens; from the pool's
parts the time is taken off that loading took. What a request waited for an SSD is part of its queueing, not of this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from loadtest.fitting import fit_durations
from loadtest.record import RequestRecord

__all__ = ["PLACES", "PrefillFit", "fit_prefill", "reuse_by_tier", "tokens_by_place"]

PLACES: Final = ("pages", "dram", "ssd", "remote")
"""The prefill worker's own pages; its pool node's memory; that one's SSD; another pool node."""
_LEAST_REQUESTS: Final = 10


@dataclass(frozen=True)
class PrefillFit:
    """Seconds of prefill by tokens, from so many requests."""

    constant: float
    per_token: float
    per_token_squared: float
    requests: int

    def of_prefix(self, tokens: int) -> float:
        """What computing a prefix of so many tokens adds to a prefill."""
        return self.per_token * tokens + self.per_token_squared * tokens * tokens


def tokens_by_place(record: RequestRecord) -> dict[str, int] | None:
    """The request's reused tokens by where they were; None where the server does not tell."""
    told = [record.extension.get(f"cached_{place}_tokens") for place in PLACES[1:]]
    counts = [count for count in told if isinstance(count, int)]
    if len(counts) < len(told):
        return None
    return dict(zip(PLACES, (max(0, record.cached_tokens - sum(counts)), *counts), strict=True))


def fit_prefill(records: Sequence[RequestRecord]) -> PrefillFit | None:
    """Over completed requests; None for a server that does not tell prefill times, or for too few requests."""
    samples = [
        (float(record.prompt_tokens), float(record.cached_tokens), seconds)
        for record in records
        if (seconds := _seconds(record, "prefill_s")) > 0
    ]
    if len(samples) < _LEAST_REQUESTS:
        return None
    n, p, seconds = np.array(samples).T
    a, b, c = fit_durations(np.stack([np.ones_like(n), n - p, n * n - p * p], axis=1), seconds)
    return PrefillFit(float(a), float(b), float(c), len(samples))


def reuse_by_tier(records: Sequence[RequestRecord], fit: PrefillFit | None) -> dict[str, dict[str, Any]] | None:
    """Per place: tokens, requests with any, seconds of computing spared, of loading, and the difference.

    None where the server does not tell where reused tokens were; seconds of computing are None without a fit.
    """
    found = [(record, places) for record in records if (places := tokens_by_place(record)) is not None]
    if not found:
        return None
    return {place: _saved(place, found, fit) for place in PLACES}


def _saved(place: str, found: Sequence[tuple[RequestRecord, dict[str, int]]], fit: PrefillFit | None) -> dict[str, Any]:
    mine = [(record, places) for record, places in found if places[place]]
    load_s = 0.0
    if place != "pages":
        load_s = math.fsum(
            _seconds(record, "load_s") * places[place] / (sum(places.values()) - places["pages"])
            for record, places in mine
        )
    compute_s = None
    if fit is not None:
        compute_s = math.fsum(
            fit.of_prefix(sum(places.values())) * places[place] / sum(places.values()) for _, places in mine
        )
    return {
        "tokens": sum(places[place] for _, places in mine),
        "requests": len(mine),
        "compute_s": compute_s,
        "load_s": load_s,
        "saved_s": None if compute_s is None else compute_s - load_s,
    }


def _seconds(record: RequestRecord, key: str) -> float:
    value = record.extension.get(key)
    return float(value) if isinstance(value, int | float) else 0.0
