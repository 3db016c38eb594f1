"""Verification of receipts: replay their decisions from decision logs, and compare every field. Makes no calls."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import ValidationError

from conductor.decision_log import FoundDecision, RecordedRun, find_decisions, find_ends
from conductor.decision_log.codec import leaves
from conductor.errors import LogFormatError
from conductor.policy.decisions import Place
from conductor.policy.events import RequestArrived, RequestCompleted
from frontend.api.response_models import Receipt
from frontend.receipts import decision_id, kv_of, parse_decision_id
from moonpool.errors import ReceiptError

_NOTHING: Final = "nothing"
MOST_DIFFERENCES: Final = 40
"""Fields of two decisions that differ and are shown."""


def read_receipts(raw: bytes) -> list[Receipt]:
    """Parse a receipt, or an answer of the API server that contains one per choice. Raises ReceiptError."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ReceiptError(f"the receipt is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ReceiptError(f"the receipt must be a JSON object, got {str(value)[:80]}")
    if "moonpool" not in value:
        return [_receipt(value)]
    own = value["moonpool"]
    answers = own if isinstance(own, list) else [own]
    if not answers or not all(isinstance(one, dict) and one.get("receipt") is not None for one in answers):
        raise ReceiptError('the answer has no receipt: request one with "return_receipt": true')
    return [_receipt(one["receipt"]) for one in answers]


def _receipt(value: Any) -> Receipt:
    try:
        return Receipt.model_validate(value, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        named = "; ".join(f"{_path(one['loc'])}: {one['msg']}" for one in problems)
        raise ReceiptError(f"not a receipt of this version of Moonpool: {named}") from error


def _path(location: Sequence[int | str]) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{printable(part)}" for part in location)
    return "".join(parts).removeprefix(".") or "the receipt"


def printable(text: str) -> str:
    """Return a text of a receipt as it may be printed: a terminal must not obey it."""
    return text if text.isprintable() else ascii(text)


class Difference(NamedTuple):
    """Field whose value in the receipt is not the one that the log gives."""

    field: str
    receipt: Any
    log: Any


class Reproduced(NamedTuple):
    """Decision of an attempt, and the line of the event log that has it."""

    attempt: int
    decision: str
    path: Path
    line: int
    prefill: str
    decode: str


@dataclass
class ReceiptVerdict:
    """Result of verifying one receipt. `problems`: reasons for which a part of it cannot be verified."""

    request_id: str
    differences: list[Difference] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    decisions: list[Reproduced] = field(default_factory=list)

    @property
    def is_true(self) -> bool:
        """True if every field was verified and none differs."""
        return not self.differences and not self.problems

    def compare(self, name: str, given: Any, expected: Any) -> None:
        """Add the leaves of two values in which they differ, bit for bit; `name` is the path of both."""
        ours, theirs = dict(leaves(given, name)), dict(leaves(expected, name))
        for path in {**ours, **theirs}:
            one, other = ours.get(path, _NOTHING), theirs.get(path, _NOTHING)
            if repr(one) != repr(other):
                self.differences.append(Difference(path, one, other))


_Place = tuple[int, int]  # (run, number of the event in it) of a decision


@dataclass
class _Evidence:
    """Decisions and ends of the receipts' requests, as the logs have them.

    `ends`: ends of attempts by (request, run, attempt), and under run None the last one of all runs. `problems`: what
    could not be read.
    """

    decisions: dict[_Place, FoundDecision] = field(default_factory=dict)
    ends: dict[tuple[str, int | None, int], RequestCompleted] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def verify(receipts: Sequence[Receipt], runs: Sequence[RecordedRun]) -> list[ReceiptVerdict]:
    """Replay the decisions of receipts from the runs of one or several logs, and compare all fields.

    Raises OSError if a log cannot be read.
    """
    evidence = _Evidence()
    _replay(receipts, runs, evidence)
    _find_ends(receipts, runs, evidence)
    return [_verify(receipt, evidence) for receipt in receipts]


def _verify(receipt: Receipt, evidence: _Evidence) -> ReceiptVerdict:
    verdict = ReceiptVerdict(receipt.request_id, problems=list(evidence.problems))
    given = receipt.model_dump()
    if not receipt.attempts:
        verdict.problems.append("attempts: the receipt has none")
    for position, attempt in enumerate(given["attempts"]):
        name, is_last = f"attempts[{position}]", position == len(receipt.attempts) - 1
        verdict.compare(f"{name}.attempt", attempt["attempt"], position)
        try:
            run, number = _place_of(attempt["decision"])
        except ValueError as error:
            verdict.problems.append(f"{name}.decision: {error}")
            continue
        found = evidence.decisions.get((run, number))
        if found is None:
            verdict.problems.append(f"{name}.decision: the logs do not have {attempt['decision']}")
            continue
        step = found.step
        event, place = step.event, step.made[0] if step.made else None
        if not isinstance(event, RequestArrived) or not isinstance(place, Place):
            what = type(event).__name__ if place is None else f"{type(place).__name__} of {type(event).__name__}"
            verdict.problems.append(f"{name}.decision: {attempt['decision']} is not the placement of a request: {what}")
            continue
        verdict.problems += _log_problems(name, found)
        ends, request_id = evidence.ends, event.request_id
        end = ends.get((request_id, run, event.attempt)) or ends.get((request_id, None, event.attempt))
        if end is None:
            verdict.problems.append(
                f"{name}: no log has the end of this attempt, so its outcome and measurements cannot be verified; "
                "if the request has just ended, try again in a second"
            )
        expected = {**_attempt(event, place, end, found.slo_version), "decision": decision_id(run, number)}
        verdict.compare(name, {key: value for key, value in attempt.items() if key in expected}, expected)
        _compare_request(verdict, given, event, end, is_last=is_last)
        verdict.decisions.append(
            Reproduced(
                event.attempt, expected["decision"], step.path, step.line, place.prefill, expected["decode_node"]
            )
        )
    verdict.differences = list(dict.fromkeys(verdict.differences))
    return verdict


def _attempt(event: RequestArrived, place: Place, end: RequestCompleted | None, slo_version: int) -> dict[str, Any]:
    """Return the fields of a receipt's attempt that the log has."""
    expected = {
        "attempt": event.attempt,
        "objectives_version": slo_version,
        "prefill_node": place.prefill,
        "decode_node": place.decode or place.prefill,
        "helpers": list(place.helpers),
        "reuse_blocks": place.reuse_blocks,
        "predicted_ttft_s": place.predicted_ttft_s,
        "predicted_tbt_s": place.predicted_tbt_s,
        "tokens_before": event.generated,
    }
    if end is not None:
        expected["outcome"] = end.outcome
        expected["kv"] = None if end.kv is None else kv_of(end.kv, event.prompt_tokens)
    return expected


def _compare_request(
    verdict: ReceiptVerdict,
    given: Mapping[str, Any],
    event: RequestArrived,
    end: RequestCompleted | None,
    *,
    is_last: bool,
) -> None:
    expected: dict[str, Any] = {
        "request_id": event.request_id,
        "model": event.model,
        "prompt_tokens": event.prompt_tokens - event.generated,
    }
    if is_last and end is not None:
        expected |= {"generated_tokens": end.generated, "ttft_s": end.ttft_s, "tbt_s": end.mean_tbt_s}
        if end.outcome == "retry":
            verdict.problems.append("attempts: the last one ended with retry, so later attempts are missing")
    verdict.compare("", {key: given[key] for key in expected}, expected)


def _log_problems(name: str, found: FoundDecision) -> Iterator[str]:
    """Yield what shows that the log is not the one that its events give."""
    if found.num_different:
        yield (
            f"{name}: {found.num_different} earlier decisions of the log differ from their replay, so it is no "
            "evidence: `moonpool decisions replay FOLDER` shows the first"
        )
    step = found.step
    if step.logged == step.made:
        return
    different = step.differences(_NOTHING)
    for path, logged, made in different[:MOST_DIFFERENCES]:
        yield (
            f"{name}: the log's own record differs from its replay: {path} is {logged} in the log, {made} in the replay"
        )
    if len(different) > MOST_DIFFERENCES:
        yield f"{name}: {len(different) - MOST_DIFFERENCES} more fields of the log's record differ from its replay"


def _place_of(decision: str | None) -> _Place:
    """Return the place of a receipt's decision. Raises ValueError."""
    if decision is None:
        raise ValueError("none: the conductor kept no event log, so the decision cannot be reproduced")
    return parse_decision_id(decision)


def _replay(receipts: Sequence[Receipt], runs: Sequence[RecordedRun], evidence: _Evidence) -> None:
    """Find the receipts' decisions by replaying each run that has some of them."""
    for number, events in _places(receipts).items():
        own = next((run for run in runs if run.number == number), None)
        if own is None:
            known = ", ".join(f"{run.number:x}" for run in runs) or "no events"
            evidence.problems.append(
                f"no log has the conductor's run {number:x}: it is another conductor's, or its files were removed by "
                f"rotation; the logs have {known}"
            )
            continue
        try:
            found = find_decisions(own, events)
        except LogFormatError as error:
            evidence.problems.append(str(error))
        else:
            evidence.decisions |= {(number, at): decision for at, decision in found.items()}


def _places(receipts: Sequence[Receipt]) -> dict[int, set[int]]:
    """Return the numbers of the receipts' decisions by run."""
    found: dict[int, set[int]] = {}
    for attempt in (each for receipt in receipts for each in receipt.attempts):
        with contextlib.suppress(ValueError):
            run, number = _place_of(attempt.decision)
            found.setdefault(run, set()).add(number)
    return found


def _find_ends(receipts: Sequence[Receipt], runs: Sequence[RecordedRun], evidence: _Evidence) -> None:
    """Find the ends of the requests' attempts.

    A conductor may end before it receives the end of an attempt that it placed: its successor logs it. So the runs that
    made no decision are read only if an end is missing.
    """
    own, ends = _places(receipts), evidence.ends
    wanted = [(receipt.request_id, None, each.attempt) for receipt in receipts for each in receipt.attempts]
    for run in sorted(runs, key=lambda run: run.number not in own):
        if run.number not in own and all(key in ends for key in wanted):
            break
        try:
            for end in find_ends(run, {receipt.request_id for receipt in receipts}):
                ends[end.request_id, run.number, end.attempt] = ends[end.request_id, None, end.attempt] = end
        except LogFormatError as error:
            evidence.problems.append(str(error))
