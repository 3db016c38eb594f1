"""The unloaded cluster, measured before the replay: what a request takes when it is alone.

Lengths are quantiles of the replay's own prompts; the texts are the replay's own too, but each under a cache salt of
its own: nothing is reused and nothing is left warm. TTFT over prompt length n is fitted as a + b·n + c·n² (fixed
cost, linear layers, attention) with no coefficient below 0, on relative errors.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from loadtest.client import CompletionClient
from loadtest.errors import ServerUnusable
from loadtest.fitting import fit_durations
from loadtest.plan import PlannedRequest
from loadtest.record import Outcome, RequestRecord
from loadtest.sender import new_record

LENGTH_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.98)
REPEATS = 3
_LEAST_OUTPUT = 8


@dataclass(frozen=True)
class Unloaded:
    """Figures of lone requests. `ttft_coefficients`: a, b, c of TTFT(n) = a + b·n + c·n², seconds and tokens.

    `ttft_s`, `tbt_s`, `tbt_worst10_s`: medians over the requests of TTFT, of the mean interval (single ones are 0 where
    a busy client reads several tokens at once), and of the mean of the longest tenth of intervals. `samples`: (prompt
    tokens, TTFT in seconds) of each request.
    """

    ttft_s: float
    tbt_s: float
    tbt_worst10_s: float
    ttft_coefficients: tuple[float, float, float]
    samples: tuple[tuple[int, float], ...]

    def ttft_of(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a lone request of that length, by the fit."""
        a, b, c = self.ttft_coefficients
        return a + b * prompt_tokens + c * prompt_tokens * prompt_tokens

    def as_json(self) -> dict[str, Any]:
        """For report.json."""
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
) -> Unloaded | None:
    """One request at a time; None when `stop` is set meanwhile. `on_done(done, of)` after each.

    The first request is thrown away: it pays for connections and for code that is compiled at its first use. Raises
    ServerUnusable when a lone request is not answered: then there is nothing to replay against.
    """
    plan = [chosen for _ in range(REPEATS) for chosen in typical_requests(requests, max_model_len)]
    records: list[RequestRecord] = []
    for number, request in enumerate([plan[0], *plan]):
        record = new_record(request, clock())
        sending = asyncio.ensure_future(client.send(request, record, cache_salt=f"{salt}-unloaded-{number}"))
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait([sending, stopped], return_when=asyncio.FIRST_COMPLETED)
        for waiting in (sending, stopped):
            waiting.cancel()
        await asyncio.gather(sending, stopped, return_exceptions=True)
        if stop.is_set():
            return None
        if record.outcome is not Outcome.COMPLETED:
            raise ServerUnusable(
                f"a lone request of {record.prompt_tokens} prompt tokens was {record.outcome.value}: {record.reason}"
            )
        if number:
            records.append(record)
        on_done(number, len(plan))
    return unloaded_of(records)


def typical_requests(requests: Sequence[PlannedRequest], max_model_len: int) -> list[PlannedRequest]:
    """One request per length quantile, with at least a few output tokens so that there are intervals to measure; a
    prompt that leaves no room for them is cut."""
    by_length = sorted(requests, key=lambda r: (len(r.prompt), r.index))
    chosen = [by_length[min(int(q * len(by_length)), len(by_length) - 1)] for q in LENGTH_QUANTILES]
    outputs = [max(r.max_tokens, min(_LEAST_OUTPUT, max_model_len // 2)) for r in chosen]
    return [
        replace(request, max_tokens=output, prompt=request.prompt[: max_model_len - output])
        for request, output in dict(zip(chosen, outputs, strict=True)).items()
    ]


def unloaded_of(records: Sequence[RequestRecord]) -> Unloaded:
    """The figures of completed lone requests."""
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
    """Non-negative least squares of t = a + b·n + c·n², on relative errors of the median t of each n."""
    lengths = sorted({n for n, _ in samples})
    if not lengths:
        return math.nan, math.nan, math.nan
    times = np.array([median(t for m, t in samples if m == n) for n in lengths])
    n = np.array(lengths, float)
    best = fit_durations(np.stack([np.ones_like(n), n, n * n], axis=1), times)
    return float(best[0]), float(best[1]), float(best[2])
