"""Counterfactual evaluation of admission: whether rejections and admissions were right. No decision uses it.

An admitted request is measured when it completes. A rejected one is evaluated from what happened on the nodes that it
would have been placed on: when the prefills ahead of it ended, when the pages that it needed were free, and how long
decode steps took. docs/admission.md describes the limits of this method.

`preview` applies the admission rule with other objectives to the predictions of recent requests, and compares the
measured times of served requests with the other objectives. It cannot determine how long a rejected request would have
taken, nor how other admissions would have changed the queues.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Final, Literal, Protocol

from conductor.policy.admission_rule import unmet, usable_s
from conductor.policy.decisions import Reason
from conductor.policy.events import NS, NodeReported, RequestCompleted
from conductor.policy.history import JudgedRequest, RequestHistory
from conductor.policy.objectives import EffectiveObjectives, ObjectiveBook, SloRecord
from conductor.policy.requests import Claim
from settings.conductor import PolicyConfig

__all__ = [
    "MAX_OPEN_CASES",
    "AdmissionEvaluation",
    "ClusterView",
    "Preview",
    "PreviewRow",
    "RejectedCase",
    "interval",
    "preview",
]

Verdict = Literal["right", "false", "undecided", "unwatched"]
AdmittedOutcome = Literal["met", "missed_ttft", "missed_tbt"]
MAX_OPEN_CASES: Final = 256  # rejected requests watched at a time; further ones are counted as unwatched
_LONGEST_NS: Final = 120 * NS  # time after which a case is closed as undecided
_WINDOW_NS: Final = 5 * NS  # period over which decode steps are averaged
_Z: Final = 1.96


class ClusterView(Protocol):
    """Queries of the current state of the cluster that the evaluation needs."""

    def prefills_before(self, node_id: str, at_ns: int) -> bool:
        """Return True if a prefill that was placed on the node by `at_ns` has not ended yet."""

    def free_tokens(self, node_id: str) -> int:
        """Return the tokens of unclaimed pages on the node."""

    def step_s(self, model: str, node_id: str, batch: float, context_tokens: float) -> float:
        """Return the predicted seconds of a decode step on the node."""


@dataclass(slots=True)
class RejectedCase:
    """A rejected request, where it would have been placed, and what was observed there since. Times of -1: not yet."""

    model: str
    reason: Reason
    at_ns: int
    work_ns: int  # predicted duration of its own transfer and prefill
    prefill: str  # node id
    decode: str  # node id; "": it would not have decoded
    need_tokens: int
    prompt_tokens: int
    objectives: EffectiveObjectives
    turn_ns: int = -1  # when the prefills ahead of it had ended
    room_ns: int = -1  # when the pages that it needed were free
    steps: int = 0  # decode steps observed since it would have been ready
    steps_s: float = 0.0
    sequences: int = 0  # summed over the steps, as is `context_tokens`
    context_tokens: int = 0

    @property
    def ready_ns(self) -> int:
        """Time at which its first token would have been generated; -1: not known yet."""
        return -1 if min(self.turn_ns, self.room_ns) < 0 else max(self.turn_ns, self.room_ns) + self.work_ns


class AdmissionEvaluation:
    """Evaluates requests and counts rejections by (model, reason, verdict) and admissions by (model, outcome)."""

    def __init__(self) -> None:
        self.rejections: Counter[tuple[str, Reason, Verdict]] = Counter()
        self.admissions: Counter[tuple[str, AdmittedOutcome]] = Counter()
        self._cases: dict[str, list[RejectedCase]] = {}  # by node that is watched for them
        self._num_cases = 0

    def __len__(self) -> int:
        """Return the number of open cases."""
        return self._num_cases

    def watch(self, case: RejectedCase) -> None:
        """Open a case for a rejected request; one without objectives is ignored."""
        if not (case.objectives.ttft_s or case.objectives.tbt_s):
            return
        if self._num_cases >= MAX_OPEN_CASES:
            self.rejections[case.model, case.reason, "unwatched"] += 1
            return
        self._num_cases += 1
        for node_id in {case.prefill, case.decode} - {""}:
            self._cases.setdefault(node_id, []).append(case)

    def reported(self, now_ns: int, event: NodeReported, seen: ClusterView) -> None:
        """Update the node's open cases, after its report has been applied to the state."""
        cases = self._cases.get(event.node_id)
        if not cases:
            return
        num, seconds = len(event.decodes), sum(step.seconds for step in event.decodes)
        batch, context = sum(s.batch for s in event.decodes), sum(s.context_tokens for s in event.decodes)
        for case in list(cases):
            self._look(now_ns, case, seen)
            if num and event.node_id == case.decode and 0 <= case.ready_ns <= now_ns:
                case.steps, case.steps_s = case.steps + num, case.steps_s + seconds
                case.sequences, case.context_tokens = case.sequences + batch, case.context_tokens + context
            self._judge(now_ns, case, seen)

    def pass_time(self, now_ns: int, seen: ClusterView) -> None:
        """Advance to `now_ns` and update all open cases, so that they also end without reports."""
        for case in self._open():
            self._look(now_ns, case, seen)
            self._judge(now_ns, case, seen)

    def drop_node(self, node_id: str) -> None:
        """Close the cases of a node that has left as undecided."""
        for case in list(self._cases.get(node_id, ())):
            self._close(case, "undecided")

    def completed(self, claim: Claim, event: RequestCompleted) -> None:
        """Count the outcome of an admitted request that finished.

        If shadow admission would have rejected it, this decides whether that rejection would have been right.
        """
        wanted = claim.objectives
        if event.attempt or not (wanted.ttft_s or wanted.tbt_s):
            return
        outcome: AdmittedOutcome = "met"
        if wanted.ttft_s and event.ttft_s > wanted.ttft_s:
            outcome = "missed_ttft"
        elif wanted.tbt_s and event.mean_tbt_s > wanted.tbt_s:
            outcome = "missed_tbt"
        if claim.unwanted:
            self.rejections[claim.model, claim.unwanted, "false" if outcome == "met" else "right"] += 1
        else:
            self.admissions[claim.model, outcome] += 1

    def false_share(self, model: str) -> tuple[float, float, float, int]:
        """Return (share of judged rejections that were false, bounds of its 95 % interval, number judged)."""
        counts = Counter[str]()
        for (name, _, verdict), count in self.rejections.items():
            counts[verdict] += count if name == model else 0
        judged = counts["right"] + counts["false"]
        low, high = interval(counts["false"], judged)
        return (counts["false"] / judged if judged else 0.0), low, high, judged

    def _open(self) -> Iterator[RejectedCase]:
        for node_id in sorted(self._cases):
            # Yield each case once: at its prefill node, or at its decode node if it has no other.
            yield from [c for c in self._cases.get(node_id, ()) if node_id == (c.prefill or c.decode)]

    def _look(self, now_ns: int, case: RejectedCase, seen: ClusterView) -> None:
        if case.turn_ns < 0 and not seen.prefills_before(case.prefill, case.at_ns):
            case.turn_ns = now_ns
        if case.room_ns < 0 and seen.free_tokens(case.decode) >= case.need_tokens:
            case.room_ns = now_ns

    def _judge(self, now_ns: int, case: RejectedCase, seen: ClusterView) -> None:
        ttft_ns = round(min(case.objectives.ttft_s, 1e9) * NS)
        soonest_ns = case.ready_ns if case.ready_ns >= 0 else now_ns + case.work_ns
        if ttft_ns and soonest_ns - case.at_ns > ttft_ns:
            self._close(case, "right")
        elif case.ready_ns < 0:
            if now_ns - case.at_ns > _LONGEST_NS:
                self._close(case, "undecided")
        elif not case.decode or not case.objectives.tbt_s:
            self._close(case, "false")
        elif now_ns >= case.ready_ns + _WINDOW_NS:
            tbt_s = self._tbt_s(case, seen)
            self._close(case, "false" if tbt_s <= case.objectives.tbt_s else "right")
        elif now_ns - case.at_ns > _LONGEST_NS + _WINDOW_NS:
            self._close(case, "undecided")  # its decode would only have begun later

    def _tbt_s(self, case: RejectedCase, seen: ClusterView) -> float:
        """Return the mean duration of the observed steps, scaled to a batch with this sequence added.

        If no steps were observed, return the predicted step of the sequence alone.
        """
        if not case.steps:
            return seen.step_s(case.model, case.decode, 1, case.prompt_tokens)
        batch, context = case.sequences / case.steps, case.context_tokens / case.steps
        alone_s = seen.step_s(case.model, case.decode, batch, context)
        with_it_s = seen.step_s(case.model, case.decode, batch + 1, context + case.prompt_tokens)
        return case.steps_s / case.steps * (with_it_s / alone_s if alone_s > 0 else 1.0)

    def _close(self, case: RejectedCase, verdict: Verdict) -> None:
        self.rejections[case.model, case.reason, verdict] += 1
        self._num_cases -= 1
        for node_id in {case.prefill, case.decode} - {""}:
            left = [other for other in self._cases[node_id] if other is not case]
            if left:
                self._cases[node_id] = left
            else:
                del self._cases[node_id]


def interval(hits: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % confidence interval of `hits` / `total`; (0, 1) if `total` is 0."""
    if not total:
        return 0.0, 1.0
    share, z2 = hits / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    # Rounding must not exclude the share itself.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


@dataclass(slots=True)
class PreviewRow:
    """Counts of requests of one model and class, the class being that of the new objectives ("": none).

    Every request is counted in one of `stay_admitted`, `now_rejected`, `now_admitted` and `stay_rejected`. `met_*` and
    `missed_*` count requests that finished with measured times and have an objective, under the old ("before") and
    the new objectives ("now"). `now_rejected_met` counts requests that the new objectives would have rejected wrongly.
    """

    model: str
    slo_class: str
    stay_admitted: int = 0
    now_rejected: int = 0
    now_admitted: int = 0  # were rejected; how long they would have taken is unknown
    stay_rejected: int = 0
    met_before: int = 0
    missed_before: int = 0
    met_now: int = 0  # of `stay_admitted`
    missed_now: int = 0
    now_rejected_met: int = 0
    now_rejected_missed: int = 0
    unmeasured: int = 0  # admitted, but cancelled, failed or still running


@dataclass(frozen=True, slots=True)
class Preview:
    """Effect that other objectives would have had on recent requests.

    If `admission` is "off" or `mode` "none", the rule rejects nothing, and only the numbers of met objectives differ.
    """

    rows: tuple[PreviewRow, ...]
    judged: int  # number of requests
    span_s: float  # since the first of them
    forgotten: int  # earlier requests that are no longer in the history
    admission: str  # "enforce", "shadow" or "off"
    mode: str


def preview(now_ns: int, past: RequestHistory, record: SloRecord, config: PolicyConfig) -> Preview:
    """Return the effect that `record` would have had on the requests of `past`, which were judged under `config`."""
    book, rows = ObjectiveBook(record), dict[tuple[str, str], PreviewRow]()
    judged, first_ns = 0, now_ns
    for request in past:
        resolved = book.resolve(request.model, request.tenant, request.slo_class)
        wanted = resolved.effective(
            request.header_ttft_s, request.header_tbt_s, request.idle_ttft_s, request.idle_tbt_s
        )
        key = request.model, wanted.slo_class
        _add(rows.setdefault(key, PreviewRow(*key)), request, wanted, config)
        judged, first_ns = judged + 1, min(first_ns, request.at_ns)
    in_order = tuple(row for _, row in sorted(rows.items()))
    span_s = (now_ns - first_ns) / NS
    return Preview(in_order, judged, span_s, past.num_forgotten, config.admission, config.admission_mode)


def _add(row: PreviewRow, request: JudgedRequest, wanted: EffectiveObjectives, config: PolicyConfig) -> None:
    was_rejected = bool(request.rejection or request.unwanted)
    is_rejected = _is_rejected(request, wanted, config)
    if was_rejected:
        row.stay_rejected += is_rejected
        row.now_admitted += not is_rejected
    else:
        row.now_rejected += is_rejected
        row.stay_admitted += not is_rejected
    if request.rejection:
        return
    if request.outcome != "finished":
        row.unmeasured += 1
        return
    before, now = _met(request, request.objectives), _met(request, wanted)
    row.met_before += before is True
    row.missed_before += before is False
    if is_rejected:
        row.now_rejected_met += now is True
        row.now_rejected_missed += now is False
    else:
        row.met_now += now is True
        row.missed_now += now is False


def _is_rejected(request: JudgedRequest, wanted: EffectiveObjectives, config: PolicyConfig) -> bool:
    """Return True if the rule would reject the request, on arrival or after its prefill, or its queue is too long."""
    if config.admission_mode != "none" and config.admission != "off":
        ttft_s, tbt_s = usable_s(wanted.ttft_s), usable_s(wanted.tbt_s)
        if unmet(request.forecast, ttft_s, tbt_s):
            return True
        if request.late is not None and unmet(request.late, 0.0, tbt_s):
            return True
    return request.forecast.waited_s > config.max_queue_s


def _met(request: JudgedRequest, wanted: EffectiveObjectives) -> bool | None:
    """Return True if a finished request met all its objectives; None without objectives or measurements."""
    pairs = ((wanted.ttft_s, request.ttft_s), (wanted.tbt_s, request.tbt_s))
    kept = [measured_s <= bound_s for bound_s, measured_s in pairs if bound_s and measured_s > 0]
    return all(kept) if kept else None
