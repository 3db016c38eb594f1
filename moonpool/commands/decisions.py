"""Commands `moonpool decisions …`: explain the decisions on a request, verify receipts, replay logged events."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from conductor.decision_log import RecordedRun, ReplayStep, find_records, recorded_runs, replay
from conductor.decision_log.codec import LOGGED_NAMES, config_from_json, config_to_json, to_json
from conductor.errors import LogFormatError
from conductor.policy import PolicyConfig
from conductor.policy.decisions import Decision, Place, Reject
from conductor.policy.events import RequestArrived
from moonpool.cluster_view.collector import ANSWER_DEADLINE_S, call_conductor, conductors_of
from moonpool.cluster_view.formatting import time_text
from moonpool.cluster_view.locate import Located
from moonpool.commands import decision_view as view
from moonpool.commands.arguments import ClusterArguments, Json, command_group, on_cluster
from moonpool.errors import ClusterNotFound, ConfigError, DecisionLogError, ReceiptError
from moonpool.options import reported_errors
from moonpool.receipt_verification import MOST_DIFFERENCES, ReceiptVerdict, printable, read_receipts, verify
from moonpool_proto.v1 import conductor_pb2
from rpc.control import ControlError

app = command_group("decisions", "Decisions of a running cluster's conductors, and of their logs.")
_SEARCH_DEADLINE_S = 6 * ANSWER_DEADLINE_S  # many files may have to be read


@app.command()
@on_cluster
def explain(
    request_id: Annotated[
        str, typer.Argument(help="The answer's `id`, or `request_id` under `moonpool`.", show_default=False)
    ],
    cluster: ClusterArguments,
    log: Annotated[
        list[Path] | None,
        typer.Option("--log", help="Folder of a decision log to read instead of querying the cluster. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain why a request was placed or rejected: predictions, objectives, the other nodes, the outcome.

    The conductor must keep a decision log: moonpool serve --decision-log FOLDER.

    Exits with 1 if the request is unknown. Example: moonpool decisions explain cmpl-4a1c --log out/decisions
    """
    with reported_errors():
        answers = _read(log, request_id) if log else asyncio.run(_ask(_located(cluster), request_id))
        records = sorted((one for answer in answers.values() for one in answer["records"]), key=lambda one: one["at"])
        if as_json:
            print(json.dumps({"request_id": request_id, "records": records, "logs": _about(answers)}, indent=2))
        else:
            console = Console(highlight=False)
            for number, record in enumerate(records):
                if number:
                    console.print("")
                try:
                    console.print(view.record_picture(record))
                except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                    text = f"the record of {record['request_id']} is damaged, or of another version of Moonpool"
                    raise DecisionLogError(f"{text} ({error!r}); --json shows its content") from error
            for name, answer in answers.items():
                for text in answer["damaged"]:
                    console.print(f"Not read in {name}: {text}", style="red")
            if not records:
                console.print(_unknown(request_id, answers))
        raise typer.Exit(0 if records else 1)


def _located(cluster: ClusterArguments) -> Located:
    try:
        return cluster.locate()
    except ClusterNotFound as error:
        raise ClusterNotFound(f"{error}, or --log FOLDER for a conductor's decision log") from error


def _read(folders: list[Path], request_id: str) -> dict[str, Any]:
    answers = {}
    for folder in folders:
        if not (folder / "log.json").is_file():
            raise DecisionLogError(f"{folder} is not a decision log: it has no log.json")
        try:
            answers[str(folder)] = find_records(folder, request_id).to_json()
        except OSError as error:
            raise DecisionLogError(f"the decision log {folder} cannot be read: {error}") from error
    return answers


async def _ask(located: Located, request_id: str) -> dict[str, Any]:
    """Query every conductor, since each logs its own decisions."""
    targets = sorted(set((await conductors_of(located)).values()))
    replies = await asyncio.gather(*(_ask_one(target, request_id) for target in targets), return_exceptions=True)
    answers: dict[str, Any] = {}
    for target, reply in zip(targets, replies, strict=True):
        if isinstance(reply, ControlError):
            answers[target] = _unanswered(str(reply))
        elif isinstance(reply, BaseException):
            raise reply
        elif reply["log"] is not None:
            answers[reply["log"]] = reply
    if not answers:
        raise DecisionLogError("the conductor keeps no decision log: start it with --decision-log FOLDER")
    if all(answer.get("silent") for answer in answers.values()):
        raise ClusterNotFound("; ".join(answer["damaged"][0] for answer in answers.values()))
    return answers


async def _ask_one(target: str, request_id: str) -> Any:
    request = conductor_pb2.ExplainRequest(request_id=request_id)
    return json.loads((await call_conductor(target, "Explain", request, deadline_s=_SEARCH_DEADLINE_S)).json)


def _unanswered(why: str) -> dict[str, Any]:
    return {"records": [], "oldest_at": None, "removed_files": 0, "damaged": [why], "silent": True}


def _about(answers: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {key: answer[key] for key in ("oldest_at", "removed_files", "damaged")}
        for name, answer in answers.items()
    }


def _unknown(request_id: str, answers: dict[str, Any]) -> str:
    lines = [f"No record of request {request_id!r} was found."]
    for name, answer in answers.items():
        if answer.get("silent"):
            continue
        if answer["oldest_at"] is None:
            lines.append(f"The log {name} contains no finished request yet.")
        else:
            lines.append(f"The log {name} starts with requests of {time_text(answer['oldest_at'])}.")
        if answer["removed_files"]:
            count = answer["removed_files"]
            lines.append(f"{count} older file{'s were' if count > 1 else ' was'} removed to keep its size.")
    lines.append("Requests that an API server rejected itself are not recorded: they never reach the conductor.")
    return "\n".join(lines)


@app.command("verify")
@on_cluster
def verify_receipt(
    receipt: Annotated[
        str,
        typer.Argument(
            metavar="RECEIPT",
            help="File with a receipt, or with an answer that has one. `-` reads it from standard input.",
            show_default=False,
        ),
    ],
    cluster: ClusterArguments,
    log: Annotated[
        list[Path] | None,
        typer.Option("--log", help="Folder of a decision log to read instead of asking the cluster. Repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify a receipt: replay its decisions from the log, and compare placements, predictions and measurements.

    Answers carry a receipt if the request has "return_receipt": true. Exits with 1 and names every difference if the
    receipt is not true, and if the log no longer has its decisions.

    Example: moonpool decisions verify answer.json --log out/decisions
    """
    with reported_errors():
        receipts = read_receipts(_read_input(receipt))
        folders = log or asyncio.run(_log_folders(_located(cluster), receipts[0].request_id))
        try:
            runs = [run for folder in folders for run in recorded_runs(folder)]
            verdicts = verify(receipts, runs)
        except OSError as error:
            raise DecisionLogError(f"the decision log cannot be read: {error}") from error
        except LogFormatError as error:
            raise DecisionLogError(str(error)) from error
        if as_json:
            print(json.dumps({"receipts": [_verdict_json(one) for one in verdicts]}, indent=2))
        else:
            for verdict in verdicts:
                _print_verdict(Console(highlight=False, soft_wrap=True), verdict)
        raise typer.Exit(0 if all(one.is_true for one in verdicts) else 1)


def _read_input(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise ReceiptError(f"the receipt {name} cannot be read: {error.strerror or error}") from error


async def _log_folders(located: Located, request_id: str) -> list[Path]:
    """Return the folders of all conductors' logs, which must be on this machine."""
    folders = [Path(name) for name, answer in (await _ask(located, request_id)).items() if not answer.get("silent")]
    for folder in folders:
        if not (folder / "log.json").is_file():
            raise DecisionLogError(
                f"the conductor's decision log is in {folder}, which is not on this machine: run the command there, or "
                "copy the folder and name it with --log"
            )
    return folders


def _verdict_json(verdict: ReceiptVerdict) -> dict[str, Any]:
    return {
        "request_id": verdict.request_id,
        "true": verdict.is_true,
        "differences": [one._asdict() for one in verdict.differences],
        "problems": verdict.problems,
        "decisions": [{**one._asdict(), "path": str(one.path)} for one in verdict.decisions],
    }


def _print_verdict(console: Console, verdict: ReceiptVerdict) -> None:
    result = (
        "[green]true[/]" if verdict.is_true else "[red]not true[/]" if verdict.differences else "[red]not verified[/]"
    )
    console.print(f"[bold]Receipt of {escape(printable(verdict.request_id))}[/bold]: {result}")
    for one in verdict.differences:
        console.print(
            f"  {one.field}: {one.receipt!r} in the receipt, {one.log!r} in the log", style="red", markup=False
        )
    for problem in verdict.problems:
        console.print(f"  {problem}", style="yellow", markup=False)
    for found in verdict.decisions:
        where = f"{found.path.name}, line {found.line}"
        nodes = f"prefill on {found.prefill}, decode on {found.decode}"
        text = f"  Attempt {found.attempt + 1}: decision {found.decision} ({where}) replayed: {nodes}"
        console.print(text, style="dim", markup=False)


_OBJECTIVES = frozenset({"ttft_objective_s", "tbt_objective_s", "model_objectives"})


@dataclass
class ReplayComparison:
    """Result of replaying one life of a conductor."""

    life: RecordedRun
    num_events: int = 0
    num_decisions: int = 0  # of requests
    kinds: Counter[str] = field(default_factory=Counter)  # kinds of different decisions
    first: ReplayStep | None = None  # first event with different decisions

    @property
    def num_different(self) -> int:
        """Number of events with different decisions."""
        return self.kinds.total()

    def take(self, step: ReplayStep, *, ignore_why: bool) -> None:
        """Add one event. `ignore_why`: compare only the decisions, not their reasons and predictions."""
        self.num_events += 1
        self.num_decisions += isinstance(step.event, RequestArrived)
        logged, made = (_bare(step.logged), _bare(step.made)) if ignore_why else (step.logged, step.made)
        if logged != made:
            self.kinds[_kind(step.logged, step.made)] += 1
            self.first = self.first or step


@app.command("replay")
def replay_decisions(
    log: Annotated[Path, typer.Argument(help="Folder of a decision log, or one of its events files.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Changed setting of the policy, such as ttft_objective_s=1. Repeatable."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a conductor's events through the policy, and compare its decisions with the logged ones.

    Without --set they must be equal: otherwise it exits with 1 and shows the first difference. With --set it counts
    the decisions that would differ. That is open-loop: the events are the recorded ones, so consequences of a changed
    decision are missing; to see them, use the simulator.

    Example: moonpool decisions replay out/decisions --set admission_mode=early --set balancing_threshold=2
    """
    with reported_errors():
        changed = _changes(settings or [])
        try:
            found = recorded_runs(log)
            if not found:
                raise DecisionLogError(f"{log} contains no events: was --decision-log-events off?")
            whole = [life for life in found if life.first_part == 1]
            if not whole:
                next(replay(found[-1]))
            compared = [_compare(life, changed) for life in whole]
        except OSError as error:
            raise DecisionLogError(f"{log} cannot be read: {error}") from error
        except LogFormatError as error:
            raise DecisionLogError(str(error)) from error
        if as_json:
            print(json.dumps(_comparison_json(compared, changed), indent=2))
        else:
            _print(Console(highlight=False), compared, len(found) - len(whole), changed)
        raise typer.Exit(0 if changed or not any(one.num_different for one in compared) else 1)


def _compare(life: RecordedRun, changed: dict[str, Any]) -> ReplayComparison:
    compared = ReplayComparison(life)
    config = _with(life.config, changed) if changed else None
    for step in replay(life, config, own_objectives=bool(_OBJECTIVES & changed.keys())):
        compared.take(step, ignore_why=bool(changed))
    return compared


def _changes(settings: Sequence[str]) -> dict[str, Any]:
    """Parse KEY=VALUE texts to fields of the policy's configuration. Raises ConfigError."""
    usual, changed = config_to_json(PolicyConfig()), {}
    for text in settings:
        name, found, value = text.partition("=")
        name = name.strip().replace("-", "_")
        name = LOGGED_NAMES.get(name, name)
        if not found or name not in usual:
            raise ConfigError(f"--set must be KEY=VALUE with one of the keys {', '.join(sorted(usual))}, got {text!r}")
        changed[name] = _value(value.strip(), usual[name], text)
    _with(PolicyConfig(), changed)
    return changed


def _value(text: str, usual: Any, source: str) -> Any:
    if isinstance(usual, str):
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--set {source} must have a value such as {json.dumps(usual)}, got {text!r}") from error
    return float(value) if isinstance(usual, float) and type(value) is int else value


def _with(config: PolicyConfig, changed: dict[str, Any]) -> PolicyConfig:
    try:
        return config_from_json({**config_to_json(config), **changed})
    except LogFormatError as error:
        raise ConfigError(f"--set: {error}") from error


def _bare(decisions: Sequence[Decision]) -> list[tuple[str, ...]]:
    """Reduce decisions to placements, rejections and copies, without predictions and wording."""
    found: list[tuple[str, ...]] = []
    for decision in decisions:
        match decision:
            case Place():
                found.append(("place", decision.prefill, decision.decode, str(decision.reuse_blocks)))
            case Reject():
                found.append(("reject", decision.reason))
            case _:
                found.append((json.dumps(to_json(decision), sort_keys=True),))
    return found


def _kind(logged: Sequence[Decision], made: Sequence[Decision]) -> str:
    then, now = (decisions[0] if decisions else None for decisions in (logged, made))
    match then, now:
        case Place(), Reject():
            return "rejected instead of placed"
        case Reject(), Place():
            return "placed instead of rejected"
        case Reject(), Reject():
            return "rejected for another reason"
        case Place(), Place() if (then.prefill, then.decode) != (now.prefill, now.decode):
            return "placed elsewhere"
        case Place(), Place():
            return "placed there with other reuse, copies or predictions"
    return "not about a request"


def _comparison_json(compared: Sequence[ReplayComparison], changed: dict[str, Any]) -> dict[str, Any]:
    return {
        "open_loop": bool(changed),
        "set": changed,
        "lives": [
            {
                "files": [str(path) for path in one.life.paths],
                "events": one.num_events,
                "requests": one.num_decisions,
                "different": one.num_different,
                "kinds": dict(one.kinds),
                "first": None if one.first is None else _step_json(one.first),
            }
            for one in compared
        ],
    }


def _step_json(step: ReplayStep) -> dict[str, Any]:
    return {
        "file": str(step.path),
        "line": step.line,
        "event": to_json(step.event),
        "logged": [to_json(decision) for decision in step.logged],
        "made": [to_json(decision) for decision in step.made],
    }


def _print(console: Console, compared: Sequence[ReplayComparison], num_cut: int, changed: dict[str, Any]) -> None:
    if num_cut:
        console.print(f"{num_cut} earlier lives are skipped: their first files were rotated away.", style="yellow")
    for one in compared:
        files = f"{one.life.paths[0]}" + (f" and {len(one.life.paths) - 1} more" if len(one.life.paths) > 1 else "")
        console.print(f"[bold]{files}[/bold]: {one.num_events:,} events, {one.num_decisions:,} of them requests")
        if not one.num_different:
            console.print("  the same decisions" if not changed else "  no decision would differ", style="green")
            continue
        would = "decisions would differ (open-loop)" if changed else "decisions differ"
        console.print(f"  {one.num_different:,} {would}:", style="yellow" if changed else "bold red")
        for kind, count in one.kinds.most_common():
            console.print(f"    {count:>8,}  {kind}")
        assert one.first is not None
        _print_first(console, one.first)


def _print_first(console: Console, step: ReplayStep) -> None:
    what = f" of request {step.event.request_id}" if isinstance(step.event, RequestArrived) else ""
    console.print(f"  The first: {step.path.name}, line {step.line}, {type(step.event).__name__}{what}")
    different = step.differences("none")
    for name, then, now in different[:MOST_DIFFERENCES]:
        console.print(f"    {name}: {then} in the log, {now} now", style="dim")
    if len(different) > MOST_DIFFERENCES:
        console.print(f"    and {len(different) - MOST_DIFFERENCES} more fields", style="dim")
