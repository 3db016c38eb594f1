"""Cluster capacity: the highest request rate at which, without rejections, most requests meet their objectives."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import sqrt

from simulator.errors import BadSetting
from simulator.serving.runs import RunSpec, ServingRun, with_mode

ATTAINMENT = 0.9
_LEAST, _MOST = 1e-3, 1e5
_FIRST = 4.0
_PRECISION = 1.03  # largest ratio between the rate that fails and the rate that passes


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity found. `tried`: (rate, attainment) in order of trial."""

    rate_per_s: float
    tried: tuple[tuple[float, float], ...]


def find_capacity(
    spec: RunSpec,
    seeds: int,
    run: Callable[[list[RunSpec]], list[ServingRun]],
    on_trial: Callable[[float, float], None],
) -> Capacity:
    """Find the capacity by bisection over rates, with admission mode "none" and the mean attainment over `seeds` seeds.

    `on_trial(rate, attainment)` is called after each trial. Raises BadSetting if even one request in a thousand seconds
    misses the objectives, or if no rate does.
    """
    tried: list[tuple[float, float]] = []

    def is_met(rate: float) -> bool:
        base = with_mode(replace(spec, rate_per_s=rate, look_into=0.0), "none")
        runs = run([replace(base, seed=seed) for seed in range(seeds)])
        attainment = sum(one.outcome.attainment for one in runs) / seeds
        tried.append((rate, attainment))
        on_trial(rate, attainment)
        return attainment >= ATTAINMENT

    low, high = _bracket(is_met)
    while high / low > _PRECISION:
        middle = sqrt(low * high)
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return Capacity(low, tuple(tried))


def _bracket(is_met: Callable[[float], bool]) -> tuple[float, float]:
    """Return (a rate that meets the target, twice that rate, which does not)."""
    rate = _FIRST
    if is_met(rate):
        while is_met(rate * 2):
            rate *= 2
            if rate > _MOST:
                raise BadSetting(f"the objectives are met even at {rate:g} requests/s: nothing limits this cluster")
        return rate, rate * 2
    while not is_met(rate / 2):
        rate /= 2
        if rate < _LEAST:
            raise BadSetting("the objectives are not met at any rate: they are too strict for this profile and trace")
    return rate / 2, rate
