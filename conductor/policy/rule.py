"""The rule of admission by itself: what was predicted of a request, against what it is held to. Nothing is looked up.

`admission` asks it of a request that arrives; `preview` asks it again of requests that have been, with other
objectives.
"""

from dataclasses import dataclass
from math import inf
from typing import Literal

from conductor.policy.decisions import Reason
from conductor.policy.quick import quick

__all__ = ["Forecast", "Loads", "loads_of", "unmet", "usable_s"]


@quick
@dataclass(frozen=True, slots=True)
class Forecast:
    """What was predicted at a request's best place. Margins are the shares of an objective that predictions like this
    must stay below it; `lacks_room`: no decode node has the pages that it needs."""

    ttft_s: float
    tbt_s: float  # 0: it has none, or it is judged once the prefill has ended
    waited_s: float  # of the TTFT, in queues
    lacks_room: bool
    ttft_margin: float
    tbt_margin: float


@quick
@dataclass(frozen=True, slots=True)
class Loads:
    """Predicted latency over its objective (Mooncake §6.1); more than 1 rejects. 0 where nothing is to be met."""

    ttft: float
    tbt: float


def usable_s(objective_s: float) -> float:
    """0 for what bounds nothing; an absurd bound is none."""
    return objective_s if 0 < objective_s < inf else 0.0


def loads_of(forecast: Forecast, ttft_objective_s: float, tbt_objective_s: float) -> Loads:
    """Compared with what leaves room for the errors of predictions like this. Objectives of 0 are off."""
    ttft_bound_s = ttft_objective_s * (1 - forecast.ttft_margin)
    tbt_bound_s = tbt_objective_s * (1 - forecast.tbt_margin)
    return Loads(
        forecast.ttft_s / ttft_bound_s if ttft_objective_s else 0.0,
        forecast.tbt_s / tbt_bound_s if tbt_objective_s else 0.0,
    )


def unmet(forecast: Forecast, ttft_objective_s: float, tbt_objective_s: float) -> Reason | Literal[""]:
    """Why a request with these objectives, which must be usable, is not admitted; "": it is."""
    if not ttft_objective_s and not tbt_objective_s:
        return ""
    if forecast.lacks_room:
        return "decode_capacity"
    loads = loads_of(forecast, ttft_objective_s, tbt_objective_s)
    if max(loads.ttft, loads.tbt) <= 1:
        return ""
    return "ttft" if loads.ttft >= loads.tbt else "tbt"
