"""The recent past: the last requests that were judged, what was predicted of each, and what became of it. Bounded.

People look at it, and `preview` asks the rule of admission again; no decision goes by it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Literal

from conductor.policy.decisions import Reason
from conductor.policy.events import RequestArrived, RequestCompleted
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.past_flow import PastFlow
from conductor.policy.rule import Forecast

__all__ = ["MAX_REMEMBERED", "HotPrefix", "Mark", "Past", "PastRequest"]

MAX_REMEMBERED: Final = 4096
_MAX_MARKS: Final = 24  # of one request: a few attempts' phases
_MAX_NAME: Final = 200  # of what clients call things; more of it is not kept

Outcome = Literal["open", "finished", "failed", "cancelled", "rejected"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A request reached a phase on a node, as this conductor heard."""

    phase: str
    node_id: str
    at_ns: int


@dataclass(slots=True)
class PastRequest:
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
    outcome: Outcome = "open"
    ended_ns: int = 0
    attempts: int = 1
    ttft_s: float = 0.0
    tbt_s: float = 0.0  # mean
    generated: int = 0
    cached_tokens: int = 0
    marks: list[Mark] = field(default_factory=list)
    match_key: int = 0  # of the prefix that it shared with the pool; 0: none


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """A prefix that several of the remembered requests began with."""

    key: int
    uses: int
    blocks: int  # its length


class Past:
    """Requests by id, oldest first; one whose id comes again is forgotten."""

    def __init__(self) -> None:
        self.flow = PastFlow()
        self.num_forgotten = 0
        self._requests: dict[str, PastRequest] = {}
        self._uses: Counter[int] = Counter()  # by match_key, of the remembered requests
        self._prefixes: dict[int, int] = {}  # of the same keys: blocks

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[PastRequest]:
        return iter(self._requests.values())

    def find(self, request_id: str) -> PastRequest | None:
        """The request, if it is still remembered."""
        return self._requests.get(request_id)

    def newest(self, count: int) -> list[PastRequest]:
        """The last ones to come, newest first."""
        return list(islice(reversed(self._requests.values()), count))

    def judged(
        self,
        now_ns: int,
        request: RequestArrived,
        forecast: Forecast,
        *,
        predicted_tbt_s: float,
        objectives: EffectiveObjectives,
        idle_s: tuple[float, float],
        shared_blocks: int,
        rejection: Reason | Literal[""],
        unwanted: Reason | Literal[""],
    ) -> None:
        """A first attempt was planned, and admitted or not. `idle_s`: TTFT and TBT predicted for an idle cluster;
        `shared_blocks`: of the prefix that `match_key` names."""
        self._forget(self._requests.pop(request.request_id, None))
        key = request.match_key
        if key:
            self._uses[key] += 1
            self._prefixes[key] = shared_blocks
        self._requests[request.request_id] = PastRequest(
            request.request_id,
            now_ns,
            request.model,
            request.tenant,
            request.slo_class[:_MAX_NAME],
            request.ttft_objective_s,
            request.tbt_objective_s,
            request.prompt_tokens,
            objectives,
            forecast,
            predicted_tbt_s,
            *idle_s,
            rejection=rejection,
            unwanted=unwanted,
            outcome="rejected" if rejection else "open",
            ended_ns=now_ns if rejection else 0,
            match_key=key,
        )
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
            known.marks.append(Mark(phase, node_id, now_ns))

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

    def _forget(self, gone: PastRequest | None) -> None:
        if gone is None or not gone.match_key:
            return
        self._uses[gone.match_key] -= 1
        if not self._uses[gone.match_key]:
            del self._uses[gone.match_key], self._prefixes[gone.match_key]
