"""The admission rule, which compares a request's predictions with its objectives, and the margins that it applies.

`admission.judge` applies the rule to arriving requests; `admission_evaluation.preview` to past ones, with other
objectives.

A prediction is an expected value: if requests were admitted up to the objective itself, half of them would miss it,
and more as later requests share the node. A margin is the share of the objective by which predictions must stay below
it. It is learned as a quantile of the prediction errors of requests that were predicted near their objective. A large
margin admits no such requests, and so could not be corrected; it therefore decays while nothing confirms it.
"""

from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from conductor.policy.decisions import Reason
from conductor.policy.events import NS
from jit.fast_dataclass import fast_dataclass

__all__ = [
    "Forecast",
    "Margin",
    "Margins",
    "PredictedLoad",
    "predicted_load",
    "unmet",
    "usable_s",
]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class Forecast:
    """Predictions for a request, as planned, and the margins that apply to them."""

    ttft_s: float
    tbt_s: float  # 0: it does not decode, or it is judged after the prefill
    waited_s: float  # part of the TTFT that it waits in queues
    lacks_room: bool  # no decode node has enough free pages
    ttft_margin: float  # share of the objective by which the prediction must stay below it, any reserve included
    tbt_margin: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PredictedLoad:
    """Predicted latency over its objective (Mooncake §6.1), 0 without one; a value above 1 rejects the request."""

    ttft: float
    tbt: float


def usable_s(objective_s: float) -> float:
    """Return the objective if it is positive and finite, otherwise 0, which means none."""
    return objective_s if 0 < objective_s < inf else 0.0


def predicted_load(forecast: Forecast, ttft_objective_s: float, tbt_objective_s: float) -> PredictedLoad:
    """Return the predicted load relative to the objectives reduced by their margins; objectives of 0 are off."""
    ttft_bound_s = ttft_objective_s * (1 - forecast.ttft_margin)
    tbt_bound_s = tbt_objective_s * (1 - forecast.tbt_margin)
    return PredictedLoad(
        forecast.ttft_s / ttft_bound_s if ttft_objective_s else 0.0,
        forecast.tbt_s / tbt_bound_s if tbt_objective_s else 0.0,
    )


def unmet(forecast: Forecast, ttft_objective_s: float, tbt_objective_s: float) -> Reason | Literal[""]:
    """Return the reason to reject a request with these objectives (as of `usable_s`), or "" to admit it."""
    if not ttft_objective_s and not tbt_objective_s:
        return ""
    if forecast.lacks_room:
        return "decode_capacity"
    loads = predicted_load(forecast, ttft_objective_s, tbt_objective_s)
    if max(loads.ttft, loads.tbt) <= 1:
        return ""
    return "ttft" if loads.ttft >= loads.tbt else "tbt"


_STEP: Final = 0.01  # share of the objective by which a larger error raises the margin; others lower it in proportion
_MOST: Final = 0.5
_NEAR: Final = 0.5  # predictions below this share of the objective are not learned from
_FADES_NS: Final = 120 * NS  # half-life of a margin without samples


class Margin:
    """Margin of one objective: tracks a quantile of (measured - predicted) / objective by counting exceedances."""

    def __init__(self) -> None:
        self.share = 0.0  # the margin, as a share of the objective
        self.num_samples = 0
        self._looked_at = 0  # value of `num_samples` at the last `pass_time`
        self._taught_ns: int | None = None  # when it last changed, or the margin last decayed

    def learn(self, met: float, predicted_s: float, measured_s: float, objective_s: float) -> None:
        """Learn from an admitted request; `met` is the share of requests that should meet the objective (0: ignore).

        Times and objectives of 0 are ignored.
        """
        if not (met > 0 and objective_s > 0 and measured_s > 0 and _NEAR * objective_s <= predicted_s < float("inf")):
            return
        self.num_samples += 1
        exceeds = measured_s - predicted_s > self.share * objective_s
        self.share += _STEP * met if exceeds else -_STEP * (1 - met)
        self.share = min(max(self.share, 0.0), _MOST)

    def pass_time(self, now_ns: int) -> None:
        """Advance to `now_ns`: halve the margin if no sample has arrived for long. Call this regularly."""
        if self._taught_ns is None or self.num_samples != self._looked_at:
            self._taught_ns, self._looked_at = now_ns, self.num_samples
        elif now_ns - self._taught_ns >= _FADES_NS:
            self._taught_ns = now_ns
            self.share /= 2


class Margins:
    """Margins of a model's TTFT and TBT objectives."""

    def __init__(self) -> None:
        self.ttft = Margin()
        self.tbt = Margin()

    def pass_time(self, now_ns: int) -> None:
        """Advance both margins to `now_ns`."""
        self.ttft.pass_time(now_ns)
        self.tbt.pass_time(now_ns)

    def summary(self) -> dict[str, float]:
        """Return both margins, as shares of the objective."""
        return {"ttft": self.ttft.share, "tbt": self.tbt.share}
