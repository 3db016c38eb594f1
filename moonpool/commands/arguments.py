"""Arguments that several commands share, and the console they print tables to."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

WIDE = 200

Url = Annotated[
    str,
    typer.Option("--url", help="URL of a cluster that `moonpool serve` runs on this machine, identified by its port."),
]
Conductor = Annotated[str, typer.Option("--conductor", help="gRPC address of a conductor, for a cluster elsewhere.")]
ReadyPath = Annotated[Path | None, typer.Option("--ready-file", help="File written by `serve --ready-file`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def command_group(name: str, help: str) -> typer.Typer:
    """Return an empty group of commands; without a command it prints its help."""
    return typer.Typer(
        name=name,
        help=help,
        no_args_is_help=True,
        rich_markup_mode="rich",
        add_completion=False,
        pretty_exceptions_enable=False,
    )


def wide_console() -> Console:
    """Return a console of at least 200 columns: addresses must not be folded or truncated."""
    return Console(width=max(Console().width, WIDE))
