"""Commands that measure for minutes check their output file first, and show how far they are."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moonpool.errors import ConfigError


def check_out(path: Path) -> None:
    """Raise ConfigError before measuring if the profile cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {path}: cannot create its folder: {error}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--out {path} cannot be written: choose a file in a writable folder")


@contextmanager
def progress_bar(console: Console, what: str, unit: str, total: int) -> Iterator[Any]:
    """Show a bar on a terminal, otherwise print one line."""
    if not console.is_terminal:
        console.print(f"measuring {what}: {total} {unit}", highlight=False)
    columns: tuple[Any, ...] = (TextColumn(what), BarColumn(), TextColumn("{task.completed} of {task.total}"))
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
