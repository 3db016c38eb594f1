"""The command `moonpool replay-decisions`: a log's events through the policy again, as it was or with other values."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from conductor.decision_log import Life, Step, lives, replay
from conductor.errors import LogFormatError
from conductor.policy import PolicyConfig
from conductor.policy.codec import config_from_json, config_to_json, to_json
from conductor.policy.decisions import Decision, Place, Reject
from conductor.policy.events import RequestArrived
from moonpool.errors import ConfigError, DecisionLogError
from moonpool.options import reported_errors
from moonpool.status_command import Json

__all__ = ["app"]

app = typer.Typer(rich_markup_mode="rich", add_completion=False, pretty_exceptions_enable=False)
_OBJECTIVES = frozenset({"ttft_objective_s", "tbt_objective_s", "model_objectives"})
_MOST_SHOWN = 40  # fields of two decisions that differ


@dataclass
class Comparison:
    """What came of one life's replay."""

    life: Life
    num_events: int = 0
    num_decisions: int = 0  # of requests
    kinds: Counter[str] = field(default_factory=Counter)  # of those that differ
    first: Step | None = None  # that differs

    @property
    def num_different(self) -> int:
        """Events with other decisions than then."""
        return self.kinds.total()

    def take(self, step: Step, *, ignore_why: bool) -> None:
        """One more event. `ignore_why`: only what was decided counts, not what it was decided on."""
        self.num_events += 1
        self.num_decisions += isinstance(step.event, RequestArrived)
        logged, made = (_bare(step.logged), _bare(step.made)) if ignore_why else (step.logged, step.made)
        if logged != made:
            self.kinds[_kind(step.logged, step.made)] += 1
            self.first = self.first or step


@app.command()
def replay_decisions(
    log: Annotated[Path, typer.Argument(help="Folder of a decision log, or one of its events files.")],
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting of the policy, such as ttft_objective_s=1."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay a conductor's events through the policy, and compare its decisions with those that were made.

    Without --set they must be the same: exits with 1 and shows the first that is not. With --set it counts how many
    decisions would be others. That is open-loop: the events are those of the cluster as it was, so what a changed
    decision would itself have changed is not in it; to see that, use the simulator.

    Example: moonpool replay-decisions out/decisions --set admission_mode=early --set balancing_threshold=2
    """
    with reported_errors():
        changed = _changes(settings or [])
        try:
            found = lives(log)
            if not found:
                raise DecisionLogError(f"{log} holds no events: was --decision-log-events off?")
            whole = [life for life in found if life.first_part == 1]
            if not whole:
                next(replay(found[-1]))
            compared = [_compare(life, changed) for life in whole]
        except OSError as error:
            raise DecisionLogError(f"{log} cannot be read: {error}") from error
        except LogFormatError as error:
            raise DecisionLogError(str(error)) from error
        if as_json:
            print(json.dumps(_told(compared, changed), indent=2))
        else:
            _print(Console(highlight=False), compared, len(found) - len(whole), changed)
        raise typer.Exit(0 if changed or not any(one.num_different for one in compared) else 1)


def _compare(life: Life, changed: dict[str, Any]) -> Comparison:
    compared = Comparison(life)
    config = _with(life.config, changed) if changed else None
    for step in replay(life, config, own_objectives=bool(_OBJECTIVES & changed.keys())):
        compared.take(step, ignore_why=bool(changed))
    return compared


def _changes(settings: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE as the configuration's own fields. Raises ConfigError."""
    usual, changed = config_to_json(PolicyConfig()), {}
    for text in settings:
        name, found, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not found or name not in usual:
            raise ConfigError(f"--set {text}: expected KEY=VALUE with one of the keys {', '.join(sorted(usual))}")
        changed[name] = _value(value.strip(), usual[name], text)
    _with(PolicyConfig(), changed)
    return changed


def _value(text: str, usual: Any, source: str) -> Any:
    if isinstance(usual, str):
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--set {source}: {text!r} is no value like {json.dumps(usual)}") from error
    return float(value) if isinstance(usual, float) and type(value) is int else value


def _with(config: PolicyConfig, changed: dict[str, Any]) -> PolicyConfig:
    try:
        return config_from_json({**config_to_json(config), **changed})
    except LogFormatError as error:
        raise ConfigError(f"--set: {error}") from error


def _bare(decisions: Sequence[Decision]) -> list[tuple[str, ...]]:
    """What is done about requests and copies, without predictions and reasons' wording."""
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
    return "other than of requests"


def _told(compared: Sequence[Comparison], changed: dict[str, Any]) -> dict[str, Any]:
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
                "first": None if one.first is None else _step_told(one.first),
            }
            for one in compared
        ],
    }


def _step_told(step: Step) -> dict[str, Any]:
    return {
        "file": str(step.path),
        "line": step.line,
        "event": to_json(step.event),
        "logged": [to_json(decision) for decision in step.logged],
        "made": [to_json(decision) for decision in step.made],
    }


def _print(console: Console, compared: Sequence[Comparison], num_cut: int, changed: dict[str, Any]) -> None:
    if num_cut:
        console.print(f"{num_cut} earlier lives are left out: their beginning was rotated away.", style="yellow")
    for one in compared:
        files = f"{one.life.paths[0]}" + (f" and {len(one.life.paths) - 1} more" if len(one.life.paths) > 1 else "")
        console.print(f"[bold]{files}[/bold]: {one.num_events:,} events, {one.num_decisions:,} of them requests")
        if not one.num_different:
            console.print("  the same decisions" if not changed else "  no decision would be another", style="green")
            continue
        would = "decisions would be others (open-loop)" if changed else "decisions differ"
        console.print(f"  {one.num_different:,} {would}:", style="yellow" if changed else "bold red")
        for kind, count in one.kinds.most_common():
            console.print(f"    {count:>8,}  {kind}")
        assert one.first is not None
        _print_first(console, one.first)


def _print_first(console: Console, step: Step) -> None:
    what = f" of request {step.event.request_id}" if isinstance(step.event, RequestArrived) else ""
    console.print(f"  The first: {step.path.name}, line {step.line}, {type(step.event).__name__}{what}")
    then, now = (dict(_flat([to_json(one) for one in decisions])) for decisions in (step.logged, step.made))
    different = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    for name in different[:_MOST_SHOWN]:
        console.print(f"    {name}: {then.get(name, 'nothing')} then, {now.get(name, 'nothing')} now", style="dim")
    if len(different) > _MOST_SHOWN:
        console.print(f"    and {len(different) - _MOST_SHOWN} fields more", style="dim")


def _flat(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Leaves of nested objects and lists, by where they are."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in _flat(item, f"{name}.{key}" if name else key)]
    if isinstance(value, list):
        return [leaf for number, item in enumerate(value) for leaf in _flat(item, f"{name}[{number}]")]
    return [(name, value)]
