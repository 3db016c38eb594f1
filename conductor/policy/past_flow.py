"""How much came and went in the last quarter of an hour, in slices of time, by model. Pure counting; bounded."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil, isfinite, log
from typing import Any, Final

from conductor.policy.config import NS

__all__ = ["SLICE_NS", "Flow", "PastFlow", "Slice", "bucket_of", "middle_s", "told"]

SLICE_NS: Final = 10 * NS
_SLICES: Final = 90
_GROWTH: Final = 1.1  # of a bucket over the one below: quantiles are that exact
_LEAST_S: Final = 1e-6


@dataclass(slots=True)
class Flow:
    """One model's requests in one slice of time. Times by bucket; `attained` by (class, objective, result)."""

    arrived: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    ended: Counter[str] = field(default_factory=Counter)  # by outcome
    prompt_tokens: int = 0  # of the finished
    cached_tokens: int = 0
    generated: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    tbt: Counter[int] = field(default_factory=Counter)
    attained: Counter[tuple[str, str, str]] = field(default_factory=Counter)


@dataclass(slots=True)
class Slice:
    """From `start_ns` on for SLICE_NS."""

    start_ns: int
    flows: dict[str, Flow] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Of all slices since the clock's origin."""
        return self.start_ns // SLICE_NS


class PastFlow:
    """Slices, oldest first; one in which nothing happened is not there."""

    def __init__(self) -> None:
        self._slices: deque[Slice] = deque(maxlen=_SLICES)
        self._now_ns = 0

    def pass_time(self, now_ns: int) -> None:
        """It is `now_ns`."""
        self._now_ns = now_ns

    def slices(self) -> Iterator[Slice]:
        """Those that are no older than there are slices."""
        oldest_ns = self._now_ns - _SLICES * SLICE_NS
        return (one for one in self._slices if one.start_ns > oldest_ns)

    def of(self, model: str) -> Flow:
        """The model's counts of now."""
        start_ns = self._now_ns - self._now_ns % SLICE_NS
        if not self._slices or self._slices[-1].start_ns != start_ns:
            self._slices.append(Slice(start_ns))
        flows = self._slices[-1].flows
        flow = flows.get(model)
        if flow is None:
            flow = flows[model] = Flow()
        return flow

    def attained(self, model: str, slo_class: str, results: Mapping[str, str]) -> None:
        """A request that had objectives is over: what became of each, by `ttft`, `tbt` and `all`."""
        counts = self.of(model).attained
        for objective, result in results.items():
            counts[slo_class, objective, result] += 1

    def finished(
        self, model: str, outcome: str, ttft_s: float, tbt_s: float, *, prompt: int, cached: int, generated: int
    ) -> None:
        """A frontend's last word on a request; `prompt`, `cached` and `generated` are tokens."""
        flow = self.of(model)
        flow.ended[outcome] += 1
        flow.generated += generated
        if outcome == "finished":
            flow.prompt_tokens += prompt
            flow.cached_tokens += min(cached, prompt)
        for counts, seconds in ((flow.ttft, ttft_s), (flow.tbt, tbt_s)):
            if seconds > 0 and isfinite(seconds):
                counts[bucket_of(seconds)] += 1


def bucket_of(seconds: float) -> int:
    """The bucket that a time falls into."""
    return ceil(log(max(seconds, _LEAST_S)) / log(_GROWTH))


def middle_s(bucket: int) -> float:
    """A time that stands for a bucket's."""
    return float(_GROWTH ** (bucket - 0.5))


def told(flow: Flow) -> dict[str, Any]:
    """As plain data."""
    return {
        "arrived": flow.arrived,
        "rejected": dict(flow.rejected),
        "ended": dict(flow.ended),
        "prompt_tokens": flow.prompt_tokens,
        "cached_tokens": flow.cached_tokens,
        "generated": flow.generated,
        "ttft": [[_short(middle_s(bucket)), count] for bucket, count in sorted(flow.ttft.items())],
        "tbt": [[_short(middle_s(bucket)), count] for bucket, count in sorted(flow.tbt.items())],
        "attained": [[*key, count] for key, count in sorted(flow.attained.items())],
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")
