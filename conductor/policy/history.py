"""Request history and statistics: recent requests, traffic of the last 15 minutes, attainment of objectives, and
prediction errors.

Operators and `admission_evaluation.preview` read it; placement and admission do not use it. All of it is bounded.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import ceil, isfinite, log
from typing import Any, Final, Literal

from conductor.policy.admission_rule import Forecast
from conductor.policy.decisions import Reason
from conductor.policy.events import NS, RequestCompleted
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
    "RefusedRequest",
    "RequestHistory",
    "Result",
    "SessionTurns",
    "TimeSlice",
    "TrafficCounts",
    "TrafficStatistics",
    "bucket_of",
    "middle_s",
    "traffic_to_plain",
]

SLICE_NS: Final = 10 * NS
_SLICES: Final = 90
_GROWTH: Final = 1.1  # ratio of adjacent bucket bounds, which limits the error of quantiles
_LEAST_S: Final = 1e-6


@dataclass(slots=True)
class TrafficCounts:
    """Counts of one model's requests in one time slice."""

    arrived: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # by reason
    ended: Counter[str] = field(default_factory=Counter)  # by outcome
    prompt_tokens: int = 0  # of finished requests, as is `cached_tokens`
    cached_tokens: int = 0
    generated: int = 0
    ttft: Counter[int] = field(default_factory=Counter)  # by bucket (`bucket_of`), as is `tbt`
    tbt: Counter[int] = field(default_factory=Counter)
    attained: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by (class, objective, result)


@dataclass(slots=True)
class TimeSlice:
    """Counts by model of the SLICE_NS that begin at `start_ns`."""

    start_ns: int
    flows: dict[str, TrafficCounts] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """Number of the slice, counted from the clock's origin."""
        return self.start_ns // SLICE_NS


class TrafficStatistics:
    """Counts of recent requests by time slice and model; slices without requests are omitted."""

    def __init__(self) -> None:
        self._slices: deque[TimeSlice] = deque(maxlen=_SLICES)
        self._now_ns = 0

    def pass_time(self, now_ns: int) -> None:
        """Advance to `now_ns`."""
        self._now_ns = now_ns

    def slices(self) -> Iterator[TimeSlice]:
        """Return the slices of the last 15 minutes, oldest first."""
        oldest_ns = self._now_ns - _SLICES * SLICE_NS
        return (one for one in self._slices if one.start_ns > oldest_ns)

    def of(self, model: str) -> TrafficCounts:
        """Return the model's counts in the current slice."""
        start_ns = self._now_ns - self._now_ns % SLICE_NS
        if not self._slices or self._slices[-1].start_ns != start_ns:
            self._slices.append(TimeSlice(start_ns))
        flows = self._slices[-1].flows
        flow = flows.get(model)
        if flow is None:
            flow = flows[model] = TrafficCounts()
        return flow

    def attained(self, model: str, slo_class: str, results: Mapping[str, str]) -> None:
        """Count the result of each objective ("ttft", "tbt", "all") of a request that has ended."""
        counts = self.of(model).attained
        for objective, result in results.items():
            counts[slo_class, objective, result] += 1

    def finished(
        self, model: str, outcome: str, ttft_s: float, tbt_s: float, *, prompt: int, cached: int, generated: int
    ) -> None:
        """Count a completed request; `prompt`, `cached` and `generated` are numbers of tokens."""
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
    """Return the bucket of a time."""
    return ceil(log(max(seconds, _LEAST_S)) / log(_GROWTH))


def middle_s(bucket: int) -> float:
    """Return the geometric middle of a bucket, in seconds."""
    return float(_GROWTH ** (bucket - 0.5))


def traffic_to_plain(flow: TrafficCounts) -> dict[str, Any]:
    """Return the counts as a JSON object, with times as [seconds, count] pairs."""
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
_MAX_REFUSED: Final = 64
_MAX_MARKS: Final = 24  # of one request: a few attempts' phases
_MAX_NAME: Final = 200  # characters kept of names that clients choose

RequestOutcome = Literal["open", "finished", "failed", "cancelled", "rejected"]


@dataclass(frozen=True, slots=True)
class PhaseMark:
    """Phase that a request reached on a node, with the time of the report."""

    phase: str
    node_id: str
    at_ns: int


@dataclass(slots=True)
class JudgedRequest:
    """One request: its admission when it arrived, its placement, and its outcome. Unmeasured times are 0."""

    request_id: str
    at_ns: int
    model: str
    tenant: str
    slo_class: str  # as requested; "": none
    header_ttft_s: float  # objectives of its headers; 0: none
    header_tbt_s: float
    prompt_tokens: int
    objectives: EffectiveObjectives
    forecast: Forecast
    predicted_tbt_s: float  # also set if the TBT was not judged on arrival
    idle_ttft_s: float  # predicted for an idle cluster, for objectives that are multiples of it
    idle_tbt_s: float
    rejection: Reason | Literal[""] = ""  # why it was rejected, on arrival or after its prefill
    lost_to: Reason | Literal[""] = ""  # why a later attempt was rejected, after an earlier one was lost
    unwanted: Reason | Literal[""] = ""  # why enforced admission would have rejected it
    prefill: str = ""  # node id of its latest placement
    decode: str = ""
    reused_tokens: int = 0  # prompt tokens to be reused, as planned
    late: Forecast | None = None  # inputs of the second judgement, after its prefill
    outcome: RequestOutcome = "open"
    ended_ns: int = 0
    attempts: int = 1
    ttft_s: float = 0.0
    tbt_s: float = 0.0  # mean
    generated: int = 0
    cached_tokens: int = 0
    marks: list[PhaseMark] = field(default_factory=list)
    match_key: int = 0  # key of its longest prefix in the pool; 0: none
    session: int = 0  # hash of its session's id and its tenant; 0: none
    parent_session: int = 0  # likewise, of the session that started its session
    pause_s: float = 0.0  # until the session's next request, as announced; 0: unknown
    lifetime_s: float = 0.0  # for which its KV was to be retained; 0: nothing was announced


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """Request that was rejected before its placement was planned, so that nothing was predicted for it."""

    request_id: str
    at_ns: int
    model: str
    tenant: str
    slo_class: str  # as requested; "": none
    prompt_tokens: int
    reason: Reason


@dataclass(slots=True)
class SessionTurns:
    """Remembered requests of one session by id, oldest first."""

    session: int
    first_ns: int  # arrival of its first request, remembered or not
    num_turns: int = 0  # remembered or not
    requests: dict[str, JudgedRequest] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """Prefix that several of the remembered requests share."""

    key: int
    uses: int
    blocks: int


class RequestHistory:
    """The last `MAX_REMEMBERED` requests by id, oldest first; a new request replaces an older one of the same id.

    Sessions are known as long as one of their requests is remembered.
    """

    def __init__(self) -> None:
        self.traffic = TrafficStatistics()
        self.num_forgotten = 0
        self.num_decided = 0  # requests, by the decision on their first attempt
        self._refused: deque[RefusedRequest] = deque(maxlen=_MAX_REFUSED)
        self._sessions: dict[int, SessionTurns] = {}  # least recently used first
        self._requests: dict[str, JudgedRequest] = {}
        self._uses: Counter[int] = Counter()  # by match_key, of the remembered requests
        self._prefixes: dict[int, int] = {}  # length in blocks, by match_key

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[JudgedRequest]:
        return iter(self._requests.values())

    def find(self, request_id: str) -> JudgedRequest | None:
        """Return the request, or None if it is not remembered."""
        return self._requests.get(request_id)

    def newest(self, count: int) -> list[JudgedRequest]:
        """Return the latest `count` requests, newest first."""
        return list(islice(reversed(self._requests.values()), count))

    def sessions(self, count: int) -> list[SessionTurns]:
        """Return the `count` sessions with the latest requests, latest first."""
        return list(islice(reversed(self._sessions.values()), count))

    def refused(self) -> list[RefusedRequest]:
        """Return the latest requests that were rejected before their placement was planned, newest first."""
        return list(reversed(self._refused))

    def refuse(self, request: RefusedRequest) -> None:
        """Record the rejection of a first attempt for which no placement could be planned."""
        self.num_decided += 1
        self._refused.append(request)

    def judged(self, request: JudgedRequest, *, shared_blocks: int) -> None:
        """Record the admission or rejection of a first attempt; `shared_blocks` is the length of its pool prefix."""
        self.num_decided += 1
        self._add_turn(request)
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
        """Record the placement of an attempt."""
        if (known := self._requests.get(request_id)) is not None:
            known.prefill, known.decode, known.reused_tokens = prefill, decode, reused_tokens
            known.attempts = max(known.attempts, attempt + 1)

    def reached(self, now_ns: int, request_id: str, phase: str, node_id: str) -> None:
        """Record a phase that a worker reported."""
        known = self._requests.get(request_id)
        if known is not None and len(known.marks) < _MAX_MARKS:
            known.marks.append(PhaseMark(phase, node_id, now_ns))

    def judged_late(self, request_id: str, forecast: Forecast) -> None:
        """Record the inputs of the judgement after the prefill."""
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
        """Record a completion; one that only ends an attempt before a retry is ignored."""
        known = self._requests.get(event.request_id)
        if known is None or known.rejection or event.outcome == "retry":
            return
        known.outcome = event.outcome if event.outcome in ("finished", "cancelled") else "failed"  # type: ignore[assignment]
        known.ended_ns, known.generated, known.cached_tokens = now_ns, event.generated, event.cached_tokens
        known.ttft_s, known.tbt_s = event.ttft_s, event.mean_tbt_s

    def hottest(self, count: int) -> list[HotPrefix]:
        """Return the `count` prefixes that most of the remembered requests share."""
        return [HotPrefix(key, uses, self._prefixes[key]) for key, uses in self._uses.most_common(count)]

    def _add_turn(self, request: JudgedRequest) -> None:
        if not request.session:
            return
        turns = self._sessions.pop(request.session, None) or SessionTurns(request.session, request.at_ns)
        self._sessions[request.session] = turns
        # A frontend repeats a rejected request under the same id: that is not another turn.
        turns.num_turns += turns.requests.pop(request.request_id, None) is None
        turns.requests[request.request_id] = request

    def _forget(self, gone: JudgedRequest | None) -> None:
        if gone is None:
            return
        turns = self._sessions.get(gone.session)
        if turns is not None and turns.requests.get(gone.request_id) is gone:
            del turns.requests[gone.request_id]
            if not turns.requests:
                del self._sessions[gone.session]
        if not gone.match_key:
            return
        self._uses[gone.match_key] -= 1
        if not self._uses[gone.match_key]:
            del self._uses[gone.match_key], self._prefixes[gone.match_key]


Result = Literal["met", "missed", "rejected", "failed"]
_MAX_TENANTS = 32  # tenants with labels of their own, besides those named in the record of objectives
_OTHERS = "other"


class Attainment:
    """Counts of requests with objectives by result, per model and class and per tenant.

    The objective "all" is met by a request that meets every objective that it has.
    """

    def __init__(
        self, is_named: Callable[[str], bool], on_result: Callable[[str, str, Mapping[str, Result]], None] | None = None
    ) -> None:
        """Start with empty counts.

        Tenants for which `is_named` returns True always have a label of their own. `on_result(model, class, results)`
        is called for each request.
        """
        self._is_named = is_named
        self._on_result = on_result
        self._tenants: set[str] = set()
        self._by_class: Counter[tuple[str, str, str, Result]] = Counter()
        self._by_tenant: Counter[tuple[str, str, Result]] = Counter()

    def finished(
        self, model: str, tenant: str, objectives: EffectiveObjectives, ttft_s: float, mean_tbt_s: float
    ) -> None:
        """Count a finished request; `mean_tbt_s` is 0 for an answer of one token."""
        results: dict[str, Result] = {}
        if objectives.ttft_s and ttft_s > 0:
            results["ttft"] = "met" if ttft_s <= objectives.ttft_s else "missed"
        if objectives.tbt_s and mean_tbt_s > 0:
            results["tbt"] = "met" if mean_tbt_s <= objectives.tbt_s else "missed"
        if results:
            self._count(model, tenant, objectives.slo_class, results, _all(results.values()))

    def lost(self, model: str, tenant: str, objectives: EffectiveObjectives, how: Result) -> None:
        """Count a request that was rejected or failed, for each of its objectives."""
        results = {kind: how for kind, bound_s in (("ttft", objectives.ttft_s), ("tbt", objectives.tbt_s)) if bound_s}
        if results:
            self._count(model, tenant, objectives.slo_class, results, how)

    def by_class(self) -> Iterator[tuple[dict[str, str], int]]:
        """Yield (metric labels, number of requests) by model and class."""
        for (model, slo_class, objective, result), count in sorted(self._by_class.items()):
            yield {"model_name": model, "slo_class": slo_class, "objective": objective, "result": result}, count

    def by_tenant(self) -> Iterator[tuple[dict[str, str], int]]:
        """Yield (metric labels, number of requests) by tenant; tenants beyond the bound share the label `other`."""
        for (tenant, objective, result), count in sorted(self._by_tenant.items()):
            yield {"tenant": tenant, "objective": objective, "result": result}, count

    def _count(self, model: str, tenant: str, slo_class: str, results: dict[str, Result], whole: Result) -> None:
        label = self._label(tenant)
        results["all"] = whole
        if self._on_result is not None:
            self._on_result(model, slo_class, results)
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

# Bucket bounds of (predicted - measured) / measured: -0.5 is a prediction of half the measured time, 1 of twice it.
ERROR_BOUNDS: Final = (-0.75, -0.5, -0.25, -0.1, -0.05, 0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 3.0)
_MAX_NODES: Final = 32  # nodes per model with histograms of their own; further ones share one


@dataclass(frozen=True, slots=True)
class ErrorHistogram:
    """Histogram of the errors of one kind of prediction on one node.

    `counts[i]` is the number of errors in (ERROR_BOUNDS[i - 1], ERROR_BOUNDS[i]]; the last one counts those above all
    bounds.
    """

    what: Predicted
    model: str
    node_id: str
    counts: tuple[int, ...]


class PredictionErrors:
    """Histograms of prediction errors of the joined nodes, for a bounded number of nodes per model."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, Predicted], list[int]] = {}
        self._nodes: dict[str, set[str]] = {}

    def add(self, what: Predicted, model: str, node_id: str, predicted_s: float, measured_s: float) -> None:
        """Add a prediction and its measurement; ignored unless both are above 0.

        `node_id` is "" for a node that has left.
        """
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
        """Remove the histograms of a node that has left."""
        self._nodes.get(model, set()).discard(node_id)
        for key in [key for key in self._counts if key[:2] == (model, node_id)]:
            del self._counts[key]

    def __iter__(self) -> Iterator[ErrorHistogram]:
        for (model, node_id, what), counts in sorted(self._counts.items()):
            yield ErrorHistogram(what, model, node_id, tuple(counts))
