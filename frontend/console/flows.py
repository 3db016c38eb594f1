"""How much came and went, of all conductors together: slices of time, with quantiles, and their sum. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Flow", "MergedSlice", "merged_slices", "quantile_s", "window"]

Json = Mapping[str, Any]
ALL = ""  # models together


@dataclass(slots=True)
class Flow:
    """Requests of one model, or of all. Times are counted by what stands for them, in seconds."""

    arrived: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    ttft: Counter[float] = field(default_factory=Counter)
    tbt: Counter[float] = field(default_factory=Counter)
    attained: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # class, objective, result

    def add(self, flow: Json) -> None:
        """What one conductor counted."""
        self.arrived += flow["arrived"]
        self.prompt_tokens += flow["prompt_tokens"]
        self.cached_tokens += flow["cached_tokens"]
        self.generated += flow["generated"]
        self.rejected.update(flow["rejected"])
        self.ended.update(flow["ended"])
        self.ttft.update(dict(flow["ttft"]))
        self.tbt.update(dict(flow["tbt"]))
        self.attained.update({(a, b, c): count for a, b, c, count in flow["attained"]})

    def include(self, other: "Flow") -> None:
        """Another one's, too."""
        self.arrived += other.arrived
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.generated += other.generated
        for name in ("rejected", "ended", "ttft", "tbt", "attained"):
            getattr(self, name).update(getattr(other, name))

    def to_json(self) -> dict[str, Any]:
        """With quantiles in place of counted times; null where nothing was measured."""
        return {
            "arrived": self.arrived,
            "rejected": sum(self.rejected.values()),
            "finished": self.ended["finished"],
            "generated": self.generated,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft": [quantile_s(self.ttft, share) for share in (0.5, 0.95)],
            "tbt": [quantile_s(self.tbt, share) for share in (0.5, 0.95)],
        }


@dataclass(slots=True)
class MergedSlice:
    """A slice of time by model; `ALL` has all of them together."""

    number: int  # of all slices since 1970
    flows: dict[str, Flow] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As the page takes it."""
        return {"number": self.number, "models": {model: flow.to_json() for model, flow in self.flows.items()}}


def merged_slices(overviews: Sequence[Json]) -> list[MergedSlice]:
    """Oldest first. Conductors' slices begin at other moments: they go into that of the time of day they begin in."""
    found: dict[int, MergedSlice] = {}
    for overview in overviews:
        for each in overview["slices"]:
            number = int(each["at_s"] // overview["slice_s"])
            merged = found.setdefault(number, MergedSlice(number))
            for model, flow in each["flows"].items():
                merged.flows.setdefault(ALL, Flow()).add(flow)
                if model != ALL:  # of models that nobody serves
                    merged.flows.setdefault(model, Flow()).add(flow)
    return [found[number] for number in sorted(found)]


def window(slices: Iterable[MergedSlice]) -> dict[str, Any]:
    """All slices as one, by model: quantiles, rejections by reason, and how often objectives were met."""
    flows: dict[str, Flow] = {}
    for each in slices:
        for model, flow in each.flows.items():
            flows.setdefault(model, Flow()).include(flow)
    return {
        model: {
            **flow.to_json(),
            "ended": dict(flow.ended),
            "reasons": dict(flow.rejected.most_common()),
            "attained": [[*key, count] for key, count in sorted(flow.attained.items())],
        }
        for model, flow in sorted(flows.items())
    }


def quantile_s(counted: Mapping[float, int], share: float) -> float | None:
    """The time that this share of all stays within; None of none."""
    left = share * sum(counted.values())
    for seconds, count in sorted(counted.items()):
        left -= count
        if left <= 0:
            return seconds
    return None
