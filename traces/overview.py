"""Overview of a trace: lengths, rates, reuse and turns per session, from requests in order of time. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

from traces.row import TraceRow
from traces.statistics import ReuseCount

_MINUTE_MS = 60_000


class TraceOverview:
    """Figures of the requests added so far.

    Memory grows with the number of different lengths, minutes, sessions and, with `counts_reuse`, blocks.
    """

    def __init__(self, block_tokens: int, *, counts_reuse: bool) -> None:
        self._block_tokens = block_tokens
        self._reuse = ReuseCount(block_tokens) if counts_reuse else None
        self._prompts: Counter[int] = Counter()
        self._outputs: Counter[int] = Counter()
        self._minutes: Counter[int] = Counter()
        self._turns: Counter[str] = Counter()
        self._first_ms = self._last_ms = 0

    def add(self, row: TraceRow) -> None:
        """Count a request, which must not be earlier than the ones before."""
        if not self._prompts:
            self._first_ms = row.timestamp_ms
        self._last_ms = row.timestamp_ms
        self._prompts[row.input_length] += 1
        self._outputs[row.output_length] += 1
        self._minutes[(row.timestamp_ms - self._first_ms) // _MINUTE_MS] += 1
        if row.session:
            self._turns[row.session] += 1
        if self._reuse is not None:
            self._reuse.add(row)

    def figures(self) -> dict[str, Any]:
        """Return the figures; rates are null if all requests arrive at once, `sessions` if none is named."""
        requests = self._prompts.total()
        duration_s = (self._last_ms - self._first_ms) / 1000
        prompts, outputs = _distribution(self._prompts), _distribution(self._outputs)
        return {
            "requests": requests,
            "duration_s": duration_s,
            "requests_per_s": _per_second(requests, duration_s),
            "busiest_minute_requests": max(self._minutes.values(), default=0),
            "prompt_tokens": prompts,
            "output_tokens": outputs,
            "prompt_tokens_per_s": _per_second(prompts["sum"], duration_s),
            "output_tokens_per_s": _per_second(outputs["sum"], duration_s),
            "reuse": self._reuse_figures(),
            "sessions": self._session_figures(requests),
        }

    def _reuse_figures(self) -> dict[str, Any] | None:
        if self._reuse is None:
            return None
        found = self._reuse.statistics()
        return {
            "block_tokens": self._block_tokens,
            "token_hit_rate": found.token_hit_rate,
            "full_block_hit_rate": found.full_block_hit_rate,
            "unique_blocks": found.unique_blocks,
        }

    def _session_figures(self, requests: int) -> dict[str, Any] | None:
        if not self._turns:
            return None
        return {
            "sessions": len(self._turns),
            "turns": _distribution(Counter(self._turns.values())),
            "requests_without_session": requests - self._turns.total(),
        }


def _per_second(amount: float, duration_s: float) -> float | None:
    return amount / duration_s if duration_s else None


def _distribution(values: Counter[int]) -> dict[str, Any]:
    """Return the sum, mean, percentiles (nearest rank) and largest of values that are given with their frequencies."""
    count, total = values.total(), sum(value * times for value, times in values.items())
    ordered = sorted(values.items())
    found: dict[str, Any] = {"sum": total, "mean": total / count if count else None}
    for percent in (50, 90, 99):
        rank, seen = -(-count * percent // 100), 0
        for value, times in ordered:
            seen += times
            if seen >= rank:
                found[f"p{percent}"] = value
                break
    return found | {"max": ordered[-1][0] if ordered else None}
