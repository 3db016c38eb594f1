"""The rule of admission by itself: what was predicted of a request, against what it is held to. Nothing is looked up.

`admission` asks it of a request that arrives; `preview` asks it again of requests that have been, with other
objectives.

How far predictions must stay below an objective so that nearly all who are admitted meet it. Learned; no clock.

A prediction is an expectation: admitting up to the objective itself lets half of the admitted miss it, the more so as
those admitted later share the node. What is learned is the error that all but a share of requests stay below, as a
share of the objective. Requests that were never near their objective say nothing about it. A margin that lets in
nobody who is near it would never learn that times have changed: what no request has confirmed for long fades.
"""

from dataclasses import dataclass
from math import inf
from typing import Final, Literal

from conductor.policy.config import NS
from conductor.policy.decisions import Reason
from conductor.policy.fast_dataclass import fast_dataclass

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
    """Predictions for a request at its best place.

    Margins are the shares of an objective by which such predictions must stay below it. `lacks_room`: no decode node
    has the pages that it needs.
    """

    ttft_s: float
    tbt_s: float  # 0: it has none, or it is judged once the prefill has ended
    waited_s: float  # of the TTFT, in queues
    lacks_room: bool
    ttft_margin: float
    tbt_margin: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class PredictedLoad:
    """Predicted latency over its objective (Mooncake §6.1); more than 1 rejects. 0 where nothing is to be met."""

    ttft: float
    tbt: float


def usable_s(objective_s: float) -> float:
    """0 for what bounds nothing; an absurd bound is none."""
    return objective_s if 0 < objective_s < inf else 0.0


def predicted_load(forecast: Forecast, ttft_objective_s: float, tbt_objective_s: float) -> PredictedLoad:
    """Compared with what leaves room for the errors of predictions like this. Objectives of 0 are off."""
    ttft_bound_s = ttft_objective_s * (1 - forecast.ttft_margin)
    tbt_bound_s = tbt_objective_s * (1 - forecast.tbt_margin)
    return PredictedLoad(
        forecast.ttft_s / ttft_bound_s if ttft_objective_s else 0.0,
        forecast.tbt_s / tbt_bound_s if tbt_objective_s else 0.0,
    )


def unmet(forecast: Forecast, ttft_objective_s: float, tbt_objective_s: float) -> Reason | Literal[""]:
    """Why a request with these objectives, which must be usable, is not admitted; "": it is."""
    if not ttft_objective_s and not tbt_objective_s:
        return ""
    if forecast.lacks_room:
        return "decode_capacity"
    loads = predicted_load(forecast, ttft_objective_s, tbt_objective_s)
    if max(loads.ttft, loads.tbt) <= 1:
        return ""
    return "ttft" if loads.ttft >= loads.tbt else "tbt"


_STEP: Final = 0.01  # of the objective, by which errors beyond the margin raise it; others lower it in proportion
_MOST: Final = 0.5
_NEAR: Final = 0.5  # predictions below this share of the objective teach nothing
_FADES_NS: Final = 120 * NS  # without a request that teaches something, after which a margin is half of what it was


class Margin:
    """Margin of one objective: tracks the quantile of (measured - predicted) / objective by counting exceedances."""

    def __init__(self) -> None:
        self.share = 0.0  # of the objective
        self.num_samples = 0
        self._looked_at = 0  # of the samples
        self._taught_ns: int | None = None

    def learn(self, met: float, predicted_s: float, measured_s: float, objective_s: float) -> None:
        """Add the outcome of an admitted request; `met` is the share that is to meet the objective, 0 for none.

        Times and objectives of 0 are ignored.
        """
        if not (met > 0 and objective_s > 0 and measured_s > 0 and _NEAR * objective_s <= predicted_s < float("inf")):
            return
        self.num_samples += 1
        exceeds = measured_s - predicted_s > self.share * objective_s
        self.share += _STEP * met if exceeds else -_STEP * (1 - met)
        self.share = min(max(self.share, 0.0), _MOST)

    def pass_time(self, now_ns: int) -> None:
        """It is `now_ns`, once in a while."""
        if self._taught_ns is None or self.num_samples != self._looked_at:
            self._taught_ns, self._looked_at = now_ns, self.num_samples
        elif now_ns - self._taught_ns >= _FADES_NS:
            self._taught_ns = now_ns
            self.share /= 2


class Margins:
    """Margins of a model's two objectives."""

    def __init__(self) -> None:
        self.ttft = Margin()
        self.tbt = Margin()

    def pass_time(self, now_ns: int) -> None:
        """It is `now_ns`, once in a while."""
        self.ttft.pass_time(now_ns)
        self.tbt.pass_time(now_ns)

    def summary(self) -> dict[str, float]:
        """For export, as shares of the objective."""
        return {"ttft": self.ttft.share, "tbt": self.tbt.share}
