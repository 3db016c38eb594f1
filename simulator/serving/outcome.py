"""Result of one run: goodput, wasted work, rejections, load swing. Pure sums over ended requests.

Load swing is the anti-phase fluctuation of prefill and decode load that admission by current load causes (Mooncake,
section 7.2).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.serving.clock import NS
from simulator.serving.requests import RequestEnd, SimulatedRequest
from simulator.serving.settings import ServingSettings

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LoadSwing:
    """Fluctuation of two loads, as fractions of their objectives, around their slow trend.

    `lag_correlation` is the most negative correlation of prefill load with decode load `lag_s` later; -1 would be
    perfect anti-phase.
    """

    prefill_mean: float
    decode_mean: float
    prefill_std: float
    decode_std: float
    lag_correlation: float
    lag_s: float


def swing_of(
    prefill: Floats, decode: Floats, *, step_s: float, trend_s: float = 600.0, most_lag_s: float = 60.0
) -> LoadSwing:
    """Compute the swing of two series [samples], one sample every `step_s` seconds.

    The trend, a moving mean over `trend_s`, is subtracted first. Series shorter than twice the longest lag have
    correlation 0.
    """
    most_lag = round(most_lag_s / step_s)
    x, y = (_detrended(series, max(1, round(trend_s / step_s))) for series in (prefill, decode))
    correlation, lag = 0.0, 0
    if len(x) >= 2 * most_lag:
        for shift in range(most_lag + 1):
            found = _correlation(x[: len(x) - shift], y[shift:])
            if found < correlation:
                correlation, lag = found, shift
    return LoadSwing(
        prefill_mean=float(np.mean(prefill)) if len(prefill) else 0.0,
        decode_mean=float(np.mean(decode)) if len(decode) else 0.0,
        prefill_std=float(np.std(x)) if len(x) else 0.0,
        decode_std=float(np.std(y)) if len(y) else 0.0,
        lag_correlation=correlation,
        lag_s=lag * step_s,
    )


def _detrended(series: Floats, window: int) -> Floats:
    if not len(series):
        return series
    sums = np.concatenate([[0.0], np.cumsum(series)])
    places = np.arange(len(series))
    low, high = np.maximum(0, places - window // 2), np.minimum(len(series), places + window // 2 + 1)
    trend: Floats = (sums[high] - sums[low]) / (high - low)
    return series - trend


def _correlation(x: Floats, y: Floats) -> float:
    if np.std(x) == 0 or np.std(y) == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])


@dataclass(frozen=True, slots=True)
class ServingOutcome:
    """Figures of the requests that arrived in the measured window; rates are per second of it.

    A request is good if it was served and met both objectives: TTFT, and TBT as the mean of the longest tenth of its
    intervals. Wasted prefill tokens were computed for requests that were not good: `wasted_withheld` for those rejected
    after their prefill, `wasted_missed` for those served too slowly.
    """

    window_s: float
    arrived: int
    good: int
    goodput: float
    rejected: int  # at arrival
    withheld: int  # rejected after prefill, the first token withheld
    missed_ttft: int  # served, but TTFT missed
    missed_tbt: int  # served, TTFT met, but TBT missed
    rejected_by: dict[str, int]
    computed_tokens: int
    wasted_withheld: int
    wasted_missed: int
    reused_share: float
    sibling_share: float  # of the served prompts' tokens: another model computed their KV
    quality_loss: float  # mean over the served; 0 for those that reuse no sibling's KV
    undivided_share: float  # of the served: with colocated prefill
    grouped_share: float  # of the served: computed by a prefill group
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    tbt_p50_s: float
    tbt_p90_s: float
    ttft_error_s: float  # mean |predicted - actual|
    tbt_bias: float  # mean of actual over predicted
    swing: LoadSwing

    @property
    def attainment(self) -> float:
        """Fraction of good requests among all that arrived."""
        return self.good / self.arrived if self.arrived else 0.0

    @property
    def wasted_tokens(self) -> int:
        return self.wasted_withheld + self.wasted_missed

    @property
    def useful_tokens_per_s(self) -> float:
        """Prompt tokens computed per second for good requests."""
        return (self.computed_tokens - self.wasted_tokens) / self.window_s


def is_good(work: SimulatedRequest, settings: ServingSettings) -> bool:
    """Return True if the request was served within both objectives."""
    return (
        work.end is RequestEnd.FINISHED
        and work.ttft_s <= settings.ttft_objective_s
        and work.tbt_s <= settings.tbt_objective_s
    )


def _quality_loss(work: SimulatedRequest) -> float:
    return work.sibling.quality_loss if work.sibling is not None and work.sibling_tokens else 0.0


def outcome_of(
    works: Sequence[SimulatedRequest], settings: ServingSettings, swing: LoadSwing, *, from_s: float, until_s: float
) -> ServingOutcome:
    """Compute the outcome of the requests that arrived in [from_s, until_s)."""
    chosen = [work for work in works if from_s * NS <= work.job.arrival_ns < until_s * NS]
    served = [work for work in chosen if work.end is RequestEnd.FINISHED]
    good = [work for work in served if is_good(work, settings)]
    late = [work for work in served if work.ttft_s > settings.ttft_objective_s]
    withheld = [work for work in chosen if work.end is RequestEnd.WITHHELD]
    prompts = sum(work.job.prompt_tokens for work in served)
    ttft = np.array([work.ttft_s for work in served] or [0.0])
    tbt = np.array([work.tbt_s for work in served if work.intervals] or [0.0])
    bias = [work.mean_tbt_s / work.predicted_tbt_s for work in served if work.predicted_tbt_s and work.intervals]
    window_s = until_s - from_s
    return ServingOutcome(
        window_s=window_s,
        arrived=len(chosen),
        good=len(good),
        goodput=len(good) / window_s,
        rejected=sum(work.end is RequestEnd.REJECTED for work in chosen),
        withheld=len(withheld),
        missed_ttft=len(late),
        missed_tbt=len(served) - len(good) - len(late),
        rejected_by=dict(sorted(Counter(work.reason for work in chosen if work.reason).items())),
        computed_tokens=sum(work.computed_tokens for work in chosen),
        wasted_withheld=sum(work.computed_tokens for work in withheld),
        wasted_missed=sum(work.computed_tokens for work in served) - sum(work.computed_tokens for work in good),
        reused_share=sum(work.reused_tokens for work in served) / prompts if prompts else 0.0,
        sibling_share=sum(work.sibling_tokens for work in served) / prompts if prompts else 0.0,
        quality_loss=float(np.mean([_quality_loss(work) for work in served] or [0.0])),
        undivided_share=sum(not work.decode_node for work in served) / len(served) if served else 0.0,
        grouped_share=sum(bool(work.helpers) for work in served) / len(served) if served else 0.0,
        ttft_mean_s=float(ttft.mean()),
        ttft_p50_s=float(np.percentile(ttft, 50)),
        ttft_p90_s=float(np.percentile(ttft, 90)),
        tbt_p50_s=float(np.percentile(tbt, 50)),
        tbt_p90_s=float(np.percentile(tbt, 90)),
        ttft_error_s=float(np.mean([abs(work.ttft_s - work.predicted_ttft_s) for work in served] or [0.0])),
        tbt_bias=float(np.mean(bias or [1.0])),
        swing=swing,
    )
