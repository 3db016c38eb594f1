"""Command `moonpool droidspeak profile`: writes a reuse profile, a table of its points, and a plot."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moonpool.commands.arguments import command_group
from moonpool.errors import ConfigError
from moonpool.model_files import local_model
from moonpool.options import reported_errors
from moonpool.profiling.measurement import check_out
from settings.hub_model import parse_model
from settings.worker import name_of_model
from worker.errors import ProfileError
from worker.policy.reuse_profile import ReuseProfile, save_reuse_profile

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
    engine_backend: Annotated[str, typer.Option(help="As for `serve`.")] = "auto",
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
        from moonpool.droidspeak.pair import ModelPair

        options: dict[str, Any] = {"dtype": dtype, "threads": threads, "backend": engine_backend}
        pair = ModelPair.load(local_model(sender), local_model(receiver), device, options)
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
