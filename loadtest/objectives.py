"""Service level objectives, measured against the unloaded cluster.

Before the replay, single requests are measured without load, at quantiles of the replay's prompt lengths. They use the
replay's prompts, each with a unique cache salt, so that they neither reuse KV nor leave any for the replay. TTFT over
prompt length n is fitted as a + b·n + c·n² (fixed cost, linear layers, attention) with non-negative coefficients, by
relative errors.

The default rule follows the Mooncake paper: TTFT at most 10 times and TBT at most 5 times that of an unloaded request,
for 90 % of the requests. Precisely:

- The TTFT of a request (from sending to its first token) is compared with 10 times the fitted TTFT of an unloaded
  request of the same prompt length without reuse.
- The TBT of a request (the mean of the longest tenth of its intervals between tokens) is compared with 5 times the
  median of the same figure over the unloaded requests. A request of one token has no interval and meets the objective.

The rule holds if at least 90 % of the requests that ended meet each objective; rejected and failed requests count as
misses. `slo_attainment` is the fraction that meets both, `goodput_rps` their number per second.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.client import CompletionClient
from loadtest.plan import PlannedRequest
from loadtest.record import RequestRecord, SendOutcome
from loadtest.sender import new_record

__all__ = ["fit_durations"]


def fit_durations(terms: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the coefficients x ≥ 0 [k] that minimise the relative error of `terms` [n, k] · x against `seconds` [n].

    `seconds` must be positive and n at least 1. The method is exact and suits few terms: it solves least squares for
    every subset of terms (no larger than the number of distinct rows) and keeps the best solution without a negative
    coefficient. If there is none, the first term, assumed constant, gets the median as coefficient.
    """
    num_terms = terms.shape[1]
    weighted = terms / seconds[:, None]
    num_rows = len(np.unique(terms, axis=0))
    best, best_error = np.zeros(num_terms), math.inf
    best[0] = float(np.median(seconds))
    for size in range(1, min(num_terms, num_rows) + 1):
        for chosen in itertools.combinations(range(num_terms), size):
            part, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(seconds)), rcond=None)
            error = float(np.sum((weighted[:, chosen] @ part - 1) ** 2))
            if (part >= 0).all() and error < best_error - 1e-12:
                best, best_error = np.zeros(num_terms), error
                best[list(chosen)] = part
    return best


LENGTH_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.98)
REPEATS = 3
MAX_FAILED_IN_A_ROW = 3
_LEAST_OUTPUT = 8


@dataclass(frozen=True)
class Unloaded:
    """Latencies of unloaded requests. `ttft_coefficients`: a, b, c of TTFT(n) = a + b·n + c·n², seconds and tokens.

    `ttft_s`, `tbt_s`, `tbt_worst10_s`: medians over the requests of TTFT, of the mean interval between tokens, and of
    the mean of the longest tenth of intervals. (Single intervals are 0 when the client reads several tokens at once.)
    `samples`: (prompt tokens, TTFT in seconds) of each request.
    """

    ttft_s: float
    tbt_s: float
    tbt_worst10_s: float
    ttft_coefficients: tuple[float, float, float]
    samples: tuple[tuple[int, float], ...]

    def ttft_of(self, prompt_tokens: int) -> float:
        """Return the fitted TTFT in seconds of an unloaded request of that length."""
        a, b, c = self.ttft_coefficients
        return a + b * prompt_tokens + c * prompt_tokens * prompt_tokens

    def as_json(self) -> dict[str, Any]:
        """Return the figures for report.json."""
        return {
            "ttft_s": self.ttft_s,
            "tbt_s": self.tbt_s,
            "tbt_worst10_s": self.tbt_worst10_s,
            "ttft_fit_s": dict(
                zip(("constant", "per_token", "per_token_squared"), self.ttft_coefficients, strict=True)
            ),
            "samples": [{"prompt_tokens": n, "ttft_s": t} for n, t in self.samples],
        }


async def measure_unloaded(
    client: CompletionClient,
    requests: Sequence[PlannedRequest],
    *,
    clock: Callable[[], float],
    salt: str,
    max_model_len: int,
    stop: asyncio.Event,
    on_done: Callable[[int, int], None],
) -> tuple[Unloaded | None, list[str]]:
    """Measure requests one at a time; return their latencies and how each request that was not completed ended.

    The latencies are None if no request was completed, or if `stop` is set meanwhile. Calls `on_done(done, of)` after
    each request. The first request is not measured because it includes connecting and just-in-time compilation. After
    MAX_FAILED_IN_A_ROW failures in a row no more are sent, since each may take as long as a request's timeout.
    """
    plan = [chosen for _ in range(REPEATS) for chosen in typical_requests(requests, max_model_len)]
    records: list[RequestRecord] = []
    failures: list[str] = []
    failed_in_a_row = 0
    for number, request in enumerate([plan[0], *plan]):
        record = new_record(request, clock())
        sending = asyncio.ensure_future(client.send(request, record, cache_salt=f"{salt}-unloaded-{number}"))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
        for waiting in (sending, stopped):
            waiting.cancel()
        await asyncio.gather(sending, stopped, return_exceptions=True)
        if stop.is_set():
            return None, failures
        if record.outcome is not SendOutcome.COMPLETED:
            failures.append(
                f"an unloaded request of {record.prompt_tokens} prompt tokens was {record.outcome.value}: "
                f"{record.reason}"
            )
            failed_in_a_row += 1
            if failed_in_a_row == MAX_FAILED_IN_A_ROW:
                break
            continue
        failed_in_a_row = 0
        if number:
            records.append(record)
        on_done(number, len(plan))
    return unloaded_of(records) if records else None, failures


def typical_requests(requests: Sequence[PlannedRequest], max_model_len: int) -> list[PlannedRequest]:
    """Return one request per length quantile, with at least a few output tokens so that intervals can be measured.

    A prompt that leaves no room for them is truncated.
    """
    by_length = sorted(requests, key=lambda r: (len(r.prompt), r.index))
    chosen = [by_length[min(int(q * len(by_length)), len(by_length) - 1)] for q in LENGTH_QUANTILES]
    outputs = [max(r.max_tokens, min(_LEAST_OUTPUT, max_model_len // 2)) for r in chosen]
    return [
        replace(request, max_tokens=output, prompt=request.prompt[: max_model_len - output])
        for request, output in dict(zip(chosen, outputs, strict=True)).items()
    ]


def unloaded_of(records: Sequence[RequestRecord]) -> Unloaded:
    """Return the latencies of completed unloaded requests."""
    samples = tuple((r.prompt_tokens, r.ttft_s) for r in records if math.isfinite(r.ttft_s))
    means = [fmean(r.intervals_s) for r in records if r.intervals_s]
    worst = [r.tbt_worst10_s for r in records if r.intervals_s]
    return Unloaded(
        ttft_s=median(t for _, t in samples) if samples else math.nan,
        tbt_s=median(means) if means else math.nan,
        tbt_worst10_s=median(worst) if worst else math.nan,
        ttft_coefficients=fit_ttft(samples),
        samples=samples,
    )


def fit_ttft(samples: Sequence[tuple[int, float]]) -> tuple[float, float, float]:
    """Fit t = a + b·n + c·n² to the median t of each n, by non-negative least squares on relative errors."""
    lengths = sorted({n for n, _ in samples})
    if not lengths:
        return math.nan, math.nan, math.nan
    times = np.array([median(t for m, t in samples if m == n) for n in lengths])
    n = np.array(lengths, float)
    best = fit_durations(np.stack([np.ones_like(n), n, n * n], axis=1), times)
    return float(best[0]), float(best[1]), float(best[2])


TTFT_FACTOR = 10.0
TBT_FACTOR = 5.0
RULE_SHARE = 0.9


@dataclass(frozen=True)
class ReplayObjectives:
    """Objectives of a replay. `ttft_s`, `tbt_s`: fixed objectives in seconds; 0: relative to `unloaded`."""

    ttft_s: float
    tbt_s: float
    unloaded: Unloaded | None

    def ttft_of(self, prompt_tokens: int) -> float:
        """Return the TTFT objective in seconds for that prompt length; infinite if unknown."""
        if self.ttft_s > 0:
            return self.ttft_s
        relative = TTFT_FACTOR * self.unloaded.ttft_of(prompt_tokens) if self.unloaded else math.nan
        return relative if math.isfinite(relative) else math.inf

    @property
    def tbt_objective_s(self) -> float:
        """TBT objective in seconds; infinite if unknown."""
        if self.tbt_s > 0:
            return self.tbt_s
        relative = TBT_FACTOR * self.unloaded.tbt_worst10_s if self.unloaded else math.nan
        return relative if math.isfinite(relative) else math.inf

    @property
    def known(self) -> bool:
        """True if both objectives are given or measured."""
        return (self.ttft_s > 0 or self.unloaded is not None) and math.isfinite(self.tbt_objective_s)

    def meets_ttft(self, record: RequestRecord) -> bool:
        """Return True if a completed request met its TTFT objective."""
        return record.outcome is SendOutcome.COMPLETED and record.ttft_s <= self.ttft_of(record.prompt_tokens)

    def meets_tbt(self, record: RequestRecord) -> bool:
        """Return True if a completed request met the TBT objective."""
        worst = record.tbt_worst10_s
        return record.outcome is SendOutcome.COMPLETED and (math.isnan(worst) or worst <= self.tbt_objective_s)

    def describe(self) -> str:
        """Return the objectives as one sentence for the report."""
        if not self.known:
            return "not evaluated: no unloaded requests were measured, and --ttft-slo and --tbt-slo are not both given"
        ttft = f"{self.ttft_s:g} s" if self.ttft_s > 0 else f"{TTFT_FACTOR:g}× an unloaded request of the same length"
        tbt = f"{self.tbt_s:g} s" if self.tbt_s > 0 else f"{TBT_FACTOR:g}× an unloaded request's"
        bound = f" ({self.tbt_objective_s * 1000:.1f} ms)" if math.isfinite(self.tbt_objective_s) else ""
        return f"TTFT ≤ {ttft}; mean of the longest tenth of intervals between tokens ≤ {tbt}{bound}"


def attainment(objectives: ReplayObjectives, records: Sequence[RequestRecord], seconds: float) -> dict[str, Any]:
    """Return the report's objective keys over the requests that ended; None if the objectives are unknown."""
    ended = [r for r in records if r.outcome is not SendOutcome.UNFINISHED]
    if not objectives.known or not ended:
        keys = ("slo_attainment", "slo_ttft_attainment", "slo_tbt_attainment", "slo_rule_met", "goodput_rps")
        return dict.fromkeys(keys) | {"slo_rule": objectives.describe()}
    ttft = sum(objectives.meets_ttft(r) for r in ended)
    tbt = sum(objectives.meets_tbt(r) for r in ended)
    both = sum(objectives.meets_ttft(r) and objectives.meets_tbt(r) for r in ended)
    return {
        "slo_attainment": both / len(ended),
        "slo_ttft_attainment": ttft / len(ended),
        "slo_tbt_attainment": tbt / len(ended),
        "slo_rule_met": min(ttft, tbt) >= RULE_SHARE * len(ended),
        "goodput_rps": both / seconds if seconds > 0 else 0.0,
        "slo_rule": objectives.describe(),
    }
