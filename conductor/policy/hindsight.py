"""Were requests rejected, and admitted, for good reason? Judged later, by what happened. No decision goes by it.

Of an admitted request the truth is told when it completes. Of a rejected one nothing can be measured, so what it would
have met is worked out from what the very nodes that were best for it did: when the prefills that stood before it had
ended there, when the pages that it needed were free, and how long decode steps took then. docs/admission.md says how
far that can be trusted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Final, Literal, Protocol

from conductor.policy.config import NS
from conductor.policy.decisions import Reason
from conductor.policy.events import NodeReported, RequestCompleted
from conductor.policy.objectives import EffectiveObjectives
from conductor.policy.requests import Claim

__all__ = ["MAX_WATCHED", "Case", "Hindsight", "Surroundings", "interval"]

Verdict = Literal["right", "false", "undecided", "unwatched"]
Outcome = Literal["met", "missed_ttft", "missed_tbt"]
MAX_WATCHED: Final = 256  # rejected requests at a time; those beyond are counted as not watched
_LONGEST_NS: Final = 120 * NS  # after which a case is given up
_WINDOW_NS: Final = 5 * NS  # of decode steps that a case is judged by
_Z: Final = 1.96


class Surroundings(Protocol):
    """What is there now."""

    def prefills_before(self, node_id: str, at_ns: int) -> bool:
        """Does a prefill that was placed there by then have yet to end?"""

    def free_tokens(self, node_id: str) -> int:
        """Pages that nobody claims, in tokens."""

    def step_s(self, model: str, node_id: str, batch: float, context_tokens: float) -> float:
        """What a decode step takes there, as predicted."""


@dataclass(slots=True)
class Case:
    """A rejected request: where it would have gone, and what has been seen there since. Times in ns, -1: not yet."""

    model: str
    reason: Reason
    at_ns: int
    work_ns: int  # its own transfer and prefill, as predicted
    prefill: str  # node ids; decode "" = it would not have decoded
    decode: str
    need_tokens: int
    prompt_tokens: int
    objectives: EffectiveObjectives
    turn_ns: int = -1  # those before it had ended
    room_ns: int = -1  # its pages were free
    steps: int = 0
    steps_s: float = 0.0
    sequences: int = 0  # summed over the steps, as is context
    context_tokens: int = 0

    @property
    def ready_ns(self) -> int:
        """When its first token would have come; -1: not known yet."""
        return -1 if min(self.turn_ns, self.room_ns) < 0 else max(self.turn_ns, self.room_ns) + self.work_ns


class Hindsight:
    """Counts by (model, reason, verdict) of rejections and (model, outcome) of admitted requests."""

    def __init__(self) -> None:
        self.rejections: Counter[tuple[str, Reason, Verdict]] = Counter()
        self.admissions: Counter[tuple[str, Outcome]] = Counter()
        self._cases: dict[str, list[Case]] = {}  # by node that is watched for them
        self._num_cases = 0

    def __len__(self) -> int:
        """Cases that are open."""
        return self._num_cases

    def watch(self, case: Case) -> None:
        """A request was rejected. What has no objective cannot be judged."""
        if not (case.objectives.ttft_s or case.objectives.tbt_s):
            return
        if self._num_cases >= MAX_WATCHED:
            self.rejections[case.model, case.reason, "unwatched"] += 1
            return
        self._num_cases += 1
        for node_id in {case.prefill, case.decode} - {""}:
            self._cases.setdefault(node_id, []).append(case)

    def reported(self, now_ns: int, event: NodeReported, seen: Surroundings) -> None:
        """A node reported, and what it said has been taken in."""
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

    def pass_time(self, now_ns: int, seen: Surroundings) -> None:
        """It is `now_ns`: what nodes do not say by reports is looked up."""
        for case in self._open():
            self._look(now_ns, case, seen)
            self._judge(now_ns, case, seen)

    def drop_node(self, node_id: str) -> None:
        """The node has left: what would have become of requests there is not known."""
        for case in list(self._cases.get(node_id, ())):
            self._close(case, "undecided")

    def completed(self, claim: Claim, event: RequestCompleted) -> None:
        """A request that was admitted finished. One that would have been rejected tells whether that had been right."""
        wanted = claim.objectives
        if event.attempt or not (wanted.ttft_s or wanted.tbt_s):
            return
        outcome: Outcome = "met"
        if wanted.ttft_s and event.ttft_s > wanted.ttft_s:
            outcome = "missed_ttft"
        elif wanted.tbt_s and event.mean_tbt_s > wanted.tbt_s:
            outcome = "missed_tbt"
        if claim.unwanted:
            self.rejections[claim.model, claim.unwanted, "false" if outcome == "met" else "right"] += 1
        else:
            self.admissions[claim.model, outcome] += 1

    def false_share(self, model: str) -> tuple[float, float, float, int]:
        """(share of judged rejections that were false, its 95 % interval, how many were judged)."""
        counts = Counter[str]()
        for (name, _, verdict), count in self.rejections.items():
            counts[verdict] += count if name == model else 0
        judged = counts["right"] + counts["false"]
        low, high = interval(counts["false"], judged)
        return (counts["false"] / judged if judged else 0.0), low, high, judged

    def _open(self) -> Iterator[Case]:
        for node_id in sorted(self._cases):
            # Each case once: where its prefill would have been, or its decode if only that is watched.
            yield from [c for c in self._cases.get(node_id, ()) if node_id == (c.prefill or c.decode)]

    def _look(self, now_ns: int, case: Case, seen: Surroundings) -> None:
        if case.turn_ns < 0 and not seen.prefills_before(case.prefill, case.at_ns):
            case.turn_ns = now_ns
        if case.room_ns < 0 and seen.free_tokens(case.decode) >= case.need_tokens:
            case.room_ns = now_ns

    def _judge(self, now_ns: int, case: Case, seen: Surroundings) -> None:
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
            self._close(case, "undecided")  # it would decode later still

    def _tbt_s(self, case: Case, seen: Surroundings) -> float:
        """What steps took, as much longer as one more sequence makes them; without steps, alone."""
        if not case.steps:
            return seen.step_s(case.model, case.decode, 1, case.prompt_tokens)
        batch, context = case.sequences / case.steps, case.context_tokens / case.steps
        alone_s = seen.step_s(case.model, case.decode, batch, context)
        with_it_s = seen.step_s(case.model, case.decode, batch + 1, context + case.prompt_tokens)
        return case.steps_s / case.steps * (with_it_s / alone_s if alone_s > 0 else 1.0)

    def _close(self, case: Case, verdict: Verdict) -> None:
        self.rejections[case.model, case.reason, verdict] += 1
        self._num_cases -= 1
        for node_id in {case.prefill, case.decode} - {""}:
            left = [other for other in self._cases[node_id] if other is not case]
            if left:
                self._cases[node_id] = left
            else:
                del self._cases[node_id]


def interval(hits: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; (0, 1) of nothing."""
    if not total:
        return 0.0, 1.0
    share, z2 = hits / total, _Z * _Z
    middle = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    # The share itself lies within, whatever the rounding.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))
