"""Command `moonpool droidspeak profile`: writes a reuse profile, a table of its points, and a plot."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from moonpool.commands.arguments import command_group
from moonpool.errors import ConfigError
from moonpool.model_files import local_model
from moonpool.options import reported_errors
from moonpool.profiling.measurement import check_out, progress_bar
from settings.hub_model import parse_model
from settings.worker import name_of_model
from worker.errors import ProfileError
from worker.policy.reuse_profile import ReuseAccuracy, ReusePoint, ReuseProfile, save_reuse_profile

if TYPE_CHECKING:
    from engine import Model
    from frontend.tokenizer import Tokenizer

app = command_group("droidspeak", "Reuse of KV between models that were tuned from the same base (DroidSpeak).")


@app.callback()
def droidspeak() -> None:
    """Keep `profile` a command of its own although it is the only one."""


@app.command()
def profile(
    sender: Annotated[Path, typer.Argument(metavar="SENDER", parser=parse_model, help="Model whose KV is reused.")],
    receiver: Annotated[Path, typer.Argument(metavar="RECEIVER", parser=parse_model, help="Model that reuses it.")],
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help='Chats of the receiver\'s task, one JSON object {"messages": […]} per line: the last message is the '
            "expected answer, the one before it the question, and those before the context.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File of the profile.")] = Path("reuse-profile.json"),
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Plot of all groups: .svg or .png.")] = None,
    max_quality_loss: Annotated[
        float,
        typer.Option(min=0, max=1, help="Largest part of the receiver's lead over the sender that may be lost."),
    ] = 0.05,
    max_cost: Annotated[
        float,
        typer.Option(min=0, max=1, help="Largest part of a prefill's work: a group that costs more saves too little."),
    ] = 0.67,
    device: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    dtype: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, max=1024, help="CPU threads of the engine.")] = 1,
) -> None:
    """Measure which layers a model must compute itself when it reuses the KV that a sibling computed.

    It answers all questions with every group of consecutive layers computed by the receiver, and the KV of all other
    layers taken from the sender. The profile contains the groups that no other one beats in both cost and accuracy.

    Example: moonpool droidspeak profile ./base ./tuned questions.jsonl --out reuse.json --plot reuse.svg
    """
    with reported_errors():
        check_out(out)
        if plot is not None:
            from moonpool.profiling.picture import check_picture_path

            check_picture_path(plot)
        pair = _Pair.load(local_model(sender), local_model(receiver), device=device, dtype=dtype, threads=threads)
        names, bounds = (name_of_model(sender), name_of_model(receiver)), (max_quality_loss, max_cost)
        made, points = pair.profile(data, names, bounds)
        try:
            save_reuse_profile(made, out)
        except ProfileError as error:
            raise ConfigError(str(error)) from error
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(_table(made))
        console.print(f"[bold]{out}[/bold]: {len(made.points)} of {len(points)} groups are worth choosing from")
        if plot is not None:
            from moonpool.droidspeak.picture import draw

            draw(made, points, plot)
        print(json.dumps({"profile": str(out), "groups": [asdict(point) for point in points]}))


class _Pair:
    """Two models that may share KV, as far as their configurations tell."""

    def __init__(self, sender: Model, receiver: Model, tokenizer: Tokenizer) -> None:
        self._sender, self._receiver, self._tokenizer = sender, receiver, tokenizer

    @classmethod
    def load(cls, sender: Path, receiver: Path, *, device: str, dtype: str, threads: int) -> _Pair:
        """Load both models. Raises ConfigError if they cannot be loaded, or cannot share KV."""
        from engine import EngineError, load_model
        from frontend.errors import FrontendError
        from frontend.tokenizer import Tokenizer
        from moonpool.role_configs import choose_device

        try:
            tokenizers = [Tokenizer(folder) for folder in (sender, receiver)]
            models = [
                load_model(folder, device=choose_device(device, 0), dtype=dtype, threads=threads)  # type: ignore[arg-type]
                for folder in (sender, receiver)
            ]
        except (EngineError, FrontendError) as error:
            raise ConfigError(f"a model cannot be loaded: {error}") from error
        if tokenizers[0].identity != tokenizers[1].identity:
            raise ConfigError(f"tokenizer.json of {sender} and {receiver} differ: models share KV only of equal tokens")
        first, second = (model.config for model in models)
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "layer_windows", "ropes"):
            if getattr(first, name) != getattr(second, name):
                raise ConfigError(
                    f"{name} of {sender} is {getattr(first, name)}, of {receiver} {getattr(second, name)}: "
                    "only models of one shape share KV"
                )
        if models[0].kv_groups != models[1].kv_groups:
            raise ConfigError(f"the KV of {sender} and {receiver} differs in dtype or layout: use one --dtype for both")
        if models[0].fingerprint == models[1].fingerprint:
            raise ConfigError(f"{sender} and {receiver} are the same model, which reuses its own KV without a profile")
        if len(second.kv_layers) < second.num_layers:
            raise ConfigError(f"layers of {receiver} share KV: groups can be computed only if each layer has its own")
        return cls(models[0], models[1], tokenizers[1])

    def profile(
        self, data: Path, names: tuple[str, str], bounds: tuple[float, float]
    ) -> tuple[ReuseProfile, list[ReusePoint]]:
        """Measure; return the profile and the points of all groups. Raises ConfigError if no group is good enough."""
        from moonpool.droidspeak.examples import read_examples
        from moonpool.droidspeak.frontier import LEAST_LEAD, frontier_of, points_of
        from moonpool.droidspeak.measuring import measure

        config, (max_quality_loss, max_cost) = self._receiver.config, bounds
        examples = read_examples(data, self._tokenizer, config.max_positions)
        with progress_bar(Console(stderr=True), "contexts", "contexts", len(examples.contexts)) as done:
            answers = measure(self._sender, self._receiver, examples, done)
        accuracy = ReuseAccuracy(
            *(float(right.mean()) for right in (answers.sender, answers.receiver, answers.all_reused))
        )
        if accuracy.receiver - accuracy.sender < LEAST_LEAD:
            raise ConfigError(
                f"{data}: {names[1]} answers {accuracy.receiver:.1%} exactly and {names[0]} {accuracy.sender:.1%}, too "
                "close to measure what reuse loses: use questions of the task that the receiver was tuned for"
            )
        points = points_of(answers, config, examples.mean_context_tokens)
        kept = frontier_of(points, max_quality_loss, max_cost)
        if not kept:
            best = min((p for p in points if p.cost <= max_cost), key=lambda p: p.quality_loss, default=None)
            found = (
                f"{best.first}..{best.last} loses least, {best.quality_loss:.1%}" if best else "all groups cost more"
            )
            raise ConfigError(
                f"no group of layers costs at most {max_cost:.0%} of a prefill and loses at most "
                f"{max_quality_loss:.1%} of {names[1]}'s lead: {found}. {names[0]} is no "
                "sibling whose KV can be reused, or --max-cost or --max-quality-loss is too strict"
            )
        made = ReuseProfile(
            sender=names[0],
            sender_fingerprint=self._sender.fingerprint,
            receiver=names[1],
            receiver_fingerprint=self._receiver.fingerprint,
            tokenizer=self._tokenizer.identity,
            dtype=self._receiver.dtype,
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            made=datetime.now(UTC).date().isoformat(),
            data_sha256=examples.sha256,
            contexts=len(examples.contexts),
            questions=examples.num_questions,
            context_tokens=examples.mean_context_tokens,
            accuracy=accuracy,
            max_quality_loss=max_quality_loss,
            points=tuple(kept),
        )
        return made, points


def _table(made: ReuseProfile) -> Table:
    accuracy = made.accuracy
    table = Table(
        title=f"{made.receiver} answers {accuracy.receiver:.1%} exactly, {made.sender} {accuracy.sender:.1%}, "
        f"{made.receiver} with all KV of {made.sender} {accuracy.all_reused:.1%}",
        title_justify="left",
    )
    for column in ("layers computed", "work", "exact answers", "quality loss", "95 % interval"):
        table.add_column(column, justify="right")
    for point in made.points:
        low, high = point.loss_interval
        table.add_row(
            f"{point.first} to {point.last}",
            f"{point.cost:.1%}",
            f"{point.accuracy:.1%}",
            f"{point.quality_loss:.1%}",
            f"{low:.1%} to {high:.1%}",
        )
    return table
