"""How much came and went in the last quarter of an hour, in slices of time, by model. Pure counting; bounded.

The recent past: the last requests that were judged, what was predicted of each, and what became of it. Bounded.

People look at it, and `preview` asks the rule of admission again; no decision goes by it.

How often requests met their objectives, by model and class, and by tenant. Pure counting; no decision goes by it.

How far predictions were off, as histograms per model, node and what was predicted. Counting only.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, isfinite, log
from typing import Any, Final, Literal

from conductor.policy.admission.rule import Forecast
from conductor.policy.config import NS
from conductor.policy.decisions import Reason
from conductor.policy.events import RequestCompleted
from conductor.policy.objectives import EffectiveObjectives

__all__ = [
    "ERROR_BOUNDS",
    "MAX_REMEMBERED",
    "SLICE_NS",
    "Attainment",
    "ErrorHistogram",
    "HotPrefix",
    "JudgedRequest",
    "PhaseMark",
    "Predicted",
    "PredictionErrors",
    "RequestHistory",
    "Result",
    "TimeSlice",
    "TrafficCounts",
    "TrafficStatistics",
    "bucket_of",
    "middle_s",
    "traffic_to_plain",
]

SLICE_NS: Final = 10 * NS
_SLICES: Final = 90
_GROWTH: Final = 1.1  # of a bucket over the one below: quantiles are that exact
_LEAST_S: Final = 1e-6


@dataclass(slots=True)
class TrafficCounts:
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
class TimeSlice:
    """From `start_ns` on for SLICE_NS."""

    start_ns: int
    flows: dict[str, TrafficCounts] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Number of the slice, counted from the clock's origin."""
        return self.start_ns // SLICE_NS


class TrafficStatistics:
    """Slices, oldest first; one in which nothing happened is not there."""

    def __init__(self) -> None:
        self._slices: deque[TimeSlice] = deque(maxlen=_SLICES)
        self._now_ns = 0

    def pass_time(self, now_ns: int) -> None:
        """It is `now_ns`."""
        self._now_ns = now_ns

    def slices(self) -> Iterator[TimeSlice]:
        """Those that are no older than there are slices."""
        oldest_ns = self._now_ns - _SLICES * SLICE_NS
        return (one for one in self._slices if one.start_ns > oldest_ns)

    def of(self, model: str) -> TrafficCounts:
        """The model's counts of now."""
        start_ns = self._now_ns - self._now_ns % SLICE_NS
        if not self._slices or self._slices[-1].start_ns != start_ns:
            self._slices.append(TimeSlice(start_ns))
        flows = self._slices[-1].flows
        flow = flows.get(model)
        if flow is None:
            flow = flows[model] = TrafficCounts()
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


def traffic_to_plain(flow: TrafficCounts) -> dict[str, Any]:
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


MAX_REMEMBERED: Final = 4096
_MAX_MARKS: Final = 24  # of one request: a few attempts' phases
_MAX_NAME: Final = 200  # of what clients call things; more of it is not kept

RequestOutcome = Literal["open", "finished", "failed", "cancelled", "rejected"]


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """A request reached a phase on a node, as this conductor heard."""

    phase: str
    node_id: str
    at_ns: int


@dataclass(slots=True)
class JudgedRequest:
    """One request, as judged when it came. Measured times are 0 where there are none."""

    request_id: str
    at_ns: int
    model: str
    tenant: str
    slo_class: str  # as it asked for; "" for none
    header_ttft_s: float  # its own objectives; 0: none
    header_tbt_s: float
    prompt_tokens: int
    objectives: EffectiveObjectives
    forecast: Forecast
    predicted_tbt_s: float  # also where that was not judged at its arrival
    idle_ttft_s: float  # predicted for an idle cluster: objectives may be multiples of it
    idle_tbt_s: float
    rejection: Reason | Literal[""] = ""  # why it was turned away, when it came or after its prefill
    lost_to: Reason | Literal[""] = ""  # why no further attempt had a place, after its first one was lost
    unwanted: Reason | Literal[""] = ""  # why it would have been, had that been enforced
    prefill: str = ""  # where it was placed last
    decode: str = ""
    reused_tokens: int = 0  # of its prompt, as planned
    late: Forecast | None = None  # judged once more after its prefill
    outcome: RequestOutcome = "open"
    ended_ns: int = 0
    attempts: int = 1
    ttft_s: float = 0.0
    tbt_s: float = 0.0  # mean
    generated: int = 0
    cached_tokens: int = 0
    marks: list[PhaseMark] = field(default_factory=list)
    match_key: int = 0  # of the prefix that it shared with the pool; 0: none


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that several of the remembered requests began with."""

    key: int
    uses: int
    blocks: int  # its length


class RequestHistory:
    """Requests by id, oldest first; one whose id comes again is forgotten."""

    def __init__(self) -> None:
        self.traffic = TrafficStatistics()
        self.num_forgotten = 0
        self._requests: dict[str, JudgedRequest] = {}
        self._uses: Counter[int] = Counter()  # by match_key, of the remembered requests
        self._prefixes: dict[int, int] = {}  # of the same keys: blocks

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[JudgedRequest]:
        return iter(self._requests.values())

    def find(self, request_id: str) -> JudgedRequest | None:
        """The request, if it is still remembered."""
        return self._requests.get(request_id)

    def newest(self, count: int) -> list[JudgedRequest]:
        """The last ones to come, newest first."""
        return list(islice(reversed(self._requests.values()), count))

    def judged(self, request: JudgedRequest, *, shared_blocks: int) -> None:
        """A first attempt was planned, and admitted or not; `shared_blocks`: of the prefix that `match_key` names."""
        self._forget(self._requests.pop(request.request_id, None))
        if key := request.match_key:
            self._uses[key] += 1
            self._prefixes[key] = shared_blocks
        request.slo_class = request.slo_class[:_MAX_NAME]
        self._requests[request.request_id] = request
        if len(self._requests) > MAX_REMEMBERED:
            self._forget(self._requests.pop(next(iter(self._requests))))
            self.num_forgotten += 1

    def placed(self, request_id: str, attempt: int, prefill: str, decode: str, reused_tokens: int) -> None:
        """An attempt has its nodes."""
        if (known := self._requests.get(request_id)) is not None:
            known.prefill, known.decode, known.reused_tokens = prefill, decode, reused_tokens
            known.attempts = max(known.attempts, attempt + 1)

    def reached(self, now_ns: int, request_id: str, phase: str, node_id: str) -> None:
        """A worker told of a phase."""
        known = self._requests.get(request_id)
        if known is not None and len(known.marks) < _MAX_MARKS:
            known.marks.append(PhaseMark(phase, node_id, now_ns))

    def judged_late(self, request_id: str, forecast: Forecast) -> None:
        """After its prefill, by the decode load of that moment."""
        if (known := self._requests.get(request_id)) is not None:
            known.late = forecast

    def turned_away(self, now_ns: int, request_id: str, reason: Reason) -> None:
        """After its prefill."""
        if (known := self._requests.get(request_id)) is not None:
            known.rejection, known.outcome, known.ended_ns = reason, "rejected", now_ns

    def lost(self, now_ns: int, request_id: str, reason: Reason) -> None:
        """It had been admitted, and a later attempt found no place."""
        if (known := self._requests.get(request_id)) is not None:
            known.lost_to, known.outcome, known.ended_ns = reason, "rejected", now_ns

    def completed(self, now_ns: int, event: RequestCompleted) -> None:
        """The frontend's last word, or on one attempt of several."""
        known = self._requests.get(event.request_id)
        if known is None or known.rejection or event.outcome == "retry":
            return
        known.outcome = event.outcome if event.outcome in ("finished", "cancelled") else "failed"  # type: ignore[assignment]
        known.ended_ns, known.generated, known.cached_tokens = now_ns, event.generated, event.cached_tokens
        known.ttft_s, known.tbt_s = event.ttft_s, event.mean_tbt_s

    def hottest(self, count: int) -> list[HotPrefix]:
        """The prefixes that most of the remembered requests began with."""
        return [HotPrefix(key, uses, self._prefixes[key]) for key, uses in self._uses.most_common(count)]

    def _forget(self, gone: JudgedRequest | None) -> None:
        if gone is None or not gone.match_key:
            return
        self._uses[gone.match_key] -= 1
        if not self._uses[gone.match_key]:
            del self._uses[gone.match_key], self._prefixes[gone.match_key]


Result = Literal["met", "missed", "rejected", "failed"]
_MAX_TENANTS = 32  # told apart beside those of the record; clients may be any number
_OTHERS = "other"


class Attainment:
    """Requests that had an objective, by what became of it. `all`: of all that a request had, at once."""

    def __init__(
        self, is_named: Callable[[str], bool], tell: Callable[[str, str, Mapping[str, Result]], None] | None = None
    ) -> None:
        """`is_named(tenant)`: the record names it, so that its numbers are wanted however many tenants there are.
        `tell(model, class, results)` hears of each request, too."""
        self._is_named = is_named
        self._tell = tell
        self._tenants: set[str] = set()
        self._by_class: Counter[tuple[str, str, str, Result]] = Counter()
        self._by_tenant: Counter[tuple[str, str, Result]] = Counter()

    def finished(
        self, model: str, tenant: str, objectives: EffectiveObjectives, ttft_s: float, mean_tbt_s: float
    ) -> None:
        """A request ended well; a mean of 0 is that of an answer of one token, which has no time between tokens."""
        results: dict[str, Result] = {}
        if objectives.ttft_s and ttft_s > 0:
            results["ttft"] = "met" if ttft_s <= objectives.ttft_s else "missed"
        if objectives.tbt_s and mean_tbt_s > 0:
            results["tbt"] = "met" if mean_tbt_s <= objectives.tbt_s else "missed"
        if results:
            self._count(model, tenant, objectives.slo_class, results, _all(results.values()))

    def lost(self, model: str, tenant: str, objectives: EffectiveObjectives, how: Result) -> None:
        """A request was rejected or failed, and met nothing."""
        results = {kind: how for kind, bound_s in (("ttft", objectives.ttft_s), ("tbt", objectives.tbt_s)) if bound_s}
        if results:
            self._count(model, tenant, objectives.slo_class, results, how)

    def by_class(self) -> Iterator[tuple[dict[str, str], int]]:
        """Labels and requests."""
        for (model, slo_class, objective, result), count in sorted(self._by_class.items()):
            yield {"model_name": model, "slo_class": slo_class, "objective": objective, "result": result}, count

    def by_tenant(self) -> Iterator[tuple[dict[str, str], int]]:
        """Labels and requests; tenants beyond the first few that the record does not name are one, `other`."""
        for (tenant, objective, result), count in sorted(self._by_tenant.items()):
            yield {"tenant": tenant, "objective": objective, "result": result}, count

    def _count(self, model: str, tenant: str, slo_class: str, results: dict[str, Result], whole: Result) -> None:
        label = self._label(tenant)
        results["all"] = whole
        if self._tell is not None:
            self._tell(model, slo_class, results)
        for objective, result in results.items():
            self._by_class[model, slo_class, objective, result] += 1
            self._by_tenant[label, objective, result] += 1

    def _label(self, tenant: str) -> str:
        if not tenant or self._is_named(tenant) or tenant in self._tenants:
            return tenant
        if len(self._tenants) >= _MAX_TENANTS:
            return _OTHERS
        self._tenants.add(tenant)
        return tenant


def _all(results: Iterable[Result]) -> Result:
    return "met" if all(result == "met" for result in results) else "missed"


Predicted = Literal["prefill", "step", "ttft", "tbt"]

# Of (predicted - measured) / measured: -0.5 was predicted half as long as it took, 1 twice as long.
ERROR_BOUNDS: Final = (-0.75, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0)
_MAX_NODES: Final = 32  # of a model, by name; those beyond share one


@dataclass(frozen=True, slots=True)
class ErrorHistogram:
    """`counts[i]`: errors of at most ERROR_BOUNDS[i] and above the bound before; the last one: above all bounds."""

    what: Predicted
    model: str
    node_id: str
    counts: tuple[int, ...]


class PredictionErrors:
    """Prediction errors of the present nodes, a bounded number per model in the order of their names."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, Predicted], list[int]] = {}
        self._nodes: dict[str, set[str]] = {}

    def add(self, what: Predicted, model: str, node_id: str, predicted_s: float, measured_s: float) -> None:
        """One prediction and what came of it; both above 0 (an error relative to nothing is none).

        `node_id` "": of a node that has left."""
        if not (measured_s > 0 and predicted_s > 0):
            return
        nodes = self._nodes.setdefault(model, set())
        if node_id not in nodes:
            if node_id and len(nodes) < _MAX_NODES:
                nodes.add(node_id)
            else:
                node_id = _OTHERS
        key = model, node_id, what
        counts = self._counts.get(key)
        if counts is None:
            counts = self._counts[key] = [0] * (len(ERROR_BOUNDS) + 1)
        counts[bisect_left(ERROR_BOUNDS, (predicted_s - measured_s) / measured_s)] += 1

    def forget(self, model: str, node_id: str) -> None:
        """The node has left."""
        self._nodes.get(model, set()).discard(node_id)
        for key in [key for key in self._counts if key[:2] == (model, node_id)]:
            del self._counts[key]

    def __iter__(self) -> Iterator[ErrorHistogram]:
        for (model, node_id, what), counts in sorted(self._counts.items()):
            yield ErrorHistogram(what, model, node_id, tuple(counts))
