"""What one run came to: goodput, waste, rejections, swing. Pure sums over requests that have ended."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.serving.clock import NS
from simulator.serving.settings import ServingSettings
from simulator.serving.swing import Swing
from simulator.serving.work import End, Work

__all__ = ["Outcome", "is_good", "outcome_of"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of the requests that arrived in the measured window; rates are per second of it.

    A request is good when it was served and met both objectives: TTFT, and TBT as the mean of the longest tenth of
    its intervals. Wasted prefill tokens were computed for requests that were not good: `wasted_withheld` for those that
    were rejected after their prefill, `wasted_missed` for those that were served too slowly.
    """

    window_s: float
    arrived: int
    good: int
    goodput: float
    rejected: int  # at arrival
    withheld: int  # rejected after prefill, the first token withheld
    missed_ttft: int  # served, and late
    missed_tbt: int  # served, in time, and slow
    rejected_by: dict[str, int]
    computed_tokens: int
    wasted_withheld: int
    wasted_missed: int
    reused_share: float
    undivided_share: float  # of the served: prefilled where they decoded
    grouped_share: float  # of the served: computed by several prefill nodes together
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    tbt_p50_s: float
    tbt_p90_s: float
    ttft_error_s: float  # mean |predicted - true|
    tbt_bias: float  # true over predicted, mean
    swing: Swing

    @property
    def attainment(self) -> float:
        """Good ones of all that arrived."""
        return self.good / self.arrived if self.arrived else 0.0

    @property
    def wasted_tokens(self) -> int:
        return self.wasted_withheld + self.wasted_missed


def is_good(work: Work, settings: ServingSettings) -> bool:
    """Was it served within both objectives?"""
    return (
        work.end is End.FINISHED and work.ttft_s <= settings.ttft_objective_s and work.tbt_s <= settings.tbt_objective_s
    )


def outcome_of(
    works: Sequence[Work], settings: ServingSettings, swing: Swing, *, from_s: float, until_s: float
) -> Outcome:
    """Of those that arrived in [from_s, until_s)."""
    chosen = [work for work in works if from_s * NS <= work.job.arrival_ns < until_s * NS]
    served = [work for work in chosen if work.end is End.FINISHED]
    good = [work for work in served if is_good(work, settings)]
    late = [work for work in served if work.ttft_s > settings.ttft_objective_s]
    withheld = [work for work in chosen if work.end is End.WITHHELD]
    prompts = sum(work.job.prompt_tokens for work in served)
    ttft = np.array([work.ttft_s for work in served] or [0.0])
    tbt = np.array([work.tbt_s for work in served if work.intervals] or [0.0])
    bias = [work.mean_tbt_s / work.predicted_tbt_s for work in served if work.predicted_tbt_s and work.intervals]
    window_s = until_s - from_s
    return Outcome(
        window_s=window_s,
        arrived=len(chosen),
        good=len(good),
        goodput=len(good) / window_s,
        rejected=sum(work.end is End.REJECTED for work in chosen),
        withheld=len(withheld),
        missed_ttft=len(late),
        missed_tbt=len(served) - len(good) - len(late),
        rejected_by=dict(sorted(Counter(work.reason for work in chosen if work.reason).items())),
        computed_tokens=sum(work.computed_tokens for work in chosen),
        wasted_withheld=sum(work.computed_tokens for work in withheld),
        wasted_missed=sum(work.computed_tokens for work in served) - sum(work.computed_tokens for work in good),
        reused_share=sum(work.reused_tokens for work in served) / prompts if prompts else 0.0,
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
