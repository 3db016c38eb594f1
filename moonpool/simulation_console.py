"""What the commands of `moonpool simulate` share at a terminal: a bar of progress, and errors of bad input."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvpool import KvPoolError
from simulator.errors import SimulatorError
from traces import TraceError
from worker.errors import ProfileError

__all__ = ["EXIT_BAD_INPUT", "bad_input", "progress_bar"]

EXIT_BAD_INPUT = 2


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's stderr, gone at the end; told (done, total)."""
    console = Console(stderr=True)
    columns: tuple[Any, ...] = (TextColumn(unit), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def bad_input() -> Iterator[None]:
    """What is wrong with the input ends the command, named on stderr, with status 2."""
    try:
        yield
    except (SimulatorError, TraceError, KvPoolError, ProfileError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_BAD_INPUT) from error
