"""What a chat shows: answers on stdout; figures, notices and errors dimmed in a terminal, else on stderr."""

import sys
from typing import Final

from rich.console import Console
from rich.table import Table

from moonpool.chat.commands import COMMANDS

# All control characters but newline and tab: what a server says must not move the cursor or recolour the terminal.
_CONTROLS: Final = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def printable(text: str) -> str:
    """The text without control characters other than newline and tab."""
    return text.translate(_CONTROLS)


class View:
    """`interactive`: a terminal on both sides. `figures`: a line of figures after each answer."""

    def __init__(self, *, interactive: bool, figures: bool) -> None:
        self.interactive = interactive
        self._figures = figures
        self._console = Console(stderr=not interactive, highlight=False)

    def piece(self, text: str) -> None:
        """The next piece of an answer."""
        sys.stdout.write(printable(text) if self.interactive else text)
        sys.stdout.flush()

    def end(self, text: str, figures: str) -> None:
        """The answer `text` has ended."""
        if not text.endswith("\n"):
            self.piece("\n")
        if self._figures and figures:
            self.notice(figures)

    def notice(self, text: str) -> None:
        """Something beside the answers."""
        self._console.print(printable(text), style="dim", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Something went wrong."""
        style = "red" if self.interactive else None
        self._console.print(f"Error: {printable(text)}", style=style, markup=False, soft_wrap=True)

    def help(self) -> None:
        """All commands."""
        table = Table(box=None, show_header=False)
        for name, (argument, what) in COMMANDS.items():
            table.add_row(f"{name} {argument}".strip(), what)
        self._console.print(table, markup=False)
