"""Loop of a chat: reads lines, prints answers to stdout, and runs the commands.

Figures, notices and errors are dimmed in a terminal, and otherwise go to stderr.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from moonpool.chat.client import ChatAnswer, ChatClient
from moonpool.chat.conversation import COMMANDS, ChatLine, Conversation, parse
from moonpool.errors import ChatCommandError, ChatFailed, ChatFileError

# All control characters but newline and tab: a server's text must not move the cursor or recolour the terminal.
_CONTROLS: Final = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def printable(text: str) -> str:
    """Replace control characters other than newline and tab."""
    return text.translate(_CONTROLS)


class ChatView:
    """Output of a chat. `interactive`: stdin and stdout are terminals. `figures`: show a line after each answer."""

    def __init__(self, *, interactive: bool, figures: bool) -> None:
        self.interactive = interactive
        self._figures = figures
        self._console = Console(stderr=not interactive, highlight=False)

    def piece(self, text: str) -> None:
        """Print the next piece of an answer."""
        sys.stdout.write(printable(text) if self.interactive else text)
        sys.stdout.flush()

    def end(self, text: str, figures: str) -> None:
        """Finish the answer `text`."""
        if not text.endswith("\n"):
            self.piece("\n")
        if self._figures and figures:
            self.notice(figures)

    def notice(self, text: str) -> None:
        """Print a notice."""
        self._console.print(printable(text), style="dim", markup=False, soft_wrap=True)

    def error(self, text: str) -> None:
        """Print an error."""
        style = "red" if self.interactive else None
        self._console.print(f"Error: {printable(text)}", style=style, markup=False, soft_wrap=True)

    def help(self) -> None:
        """Print all commands."""
        table = Table(box=None, show_header=False)
        for name, (argument, what) in COMMANDS.items():
            table.add_row(f"{name} {argument}".strip(), what)
        self._console.print(table, markup=False)


_PROMPT = "> "
_LOOK_EVERY_S = 0.1


class ChatLoop:
    """Runs one conversation. In a terminal errors are printed and the chat continues; otherwise they are raised."""

    def __init__(
        self, runner: asyncio.Runner, client: ChatClient, view: ChatView, conversation: Conversation | None = None
    ) -> None:
        self.conversation = conversation or Conversation()
        self._runner = runner
        self._client = client
        self._view = view

    def run(self) -> None:
        """Run until /quit or the end of the input. Raises ChatFailed if not interactive."""
        for text in _lines(interactive=self._view.interactive):
            try:
                line = parse(text)
                if line is not None and not self._take(line):
                    return
            except ChatFailed as error:
                if not self._view.interactive:
                    raise
                self._view.error(str(error))

    def _take(self, line: ChatLine) -> bool:
        """Handle one line; return False to exit."""
        match line.command:
            case "":
                self._ask(line.text)
            case "/quit":
                return False
            case "/help":
                self._view.help()
            case "/reset":
                self.conversation.turns.clear()
                self._view.notice("conversation cleared")
            case "/system":
                self._system(line.text)
            case "/undo":
                turn = self.conversation.undo()
                self._view.notice("the conversation is empty" if turn is None else f"removed: {turn.question}")
            case "/save":
                self._save(Path(line.text).expanduser())
            case "/load":
                self._load(Path(line.text).expanduser())
            case _:
                raise ChatCommandError(f"{line.command} is not implemented")
        return True

    def _ask(self, question: str) -> None:
        """Stream and keep an answer. Ctrl-C stops it; a partial answer is kept."""
        answer = ChatAnswer()
        figures = ""
        try:
            self._runner.run(self._client.ask(self.conversation.messages(question), answer, self._view.piece))
            figures = answer.figures()
        except KeyboardInterrupt:
            if not self._view.interactive:
                raise
            figures = "stopped" if answer.text else "stopped before it started; the question is not kept"
        except ChatFailed:
            if answer.text:
                self._view.end(answer.text, "incomplete; question and answer are not kept")
            raise
        if answer.finish_reason or answer.text:
            self.conversation.add(question, answer.text)
        self._view.end(answer.text, figures)

    def _system(self, text: str) -> None:
        if text:
            self.conversation.system = "" if text == "off" else text
        now = self.conversation.system
        self._view.notice(f"system prompt: {now}" if now else "no system prompt")

    def _save(self, path: Path) -> None:
        try:
            path.write_text(self.conversation.to_json(self._client.server.model), encoding="utf-8")
        except OSError as error:
            raise ChatFileError(f"cannot write {path}: {error.strerror}; give /save another file") from error
        self._view.notice(f"{len(self.conversation.turns)} turns written to {path}")

    def _load(self, path: Path) -> None:
        try:
            self.conversation = Conversation.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ChatFileError(f"cannot read {path}: {error}") from error
        except ChatFileError as error:
            raise ChatFileError(f"{path}: {error}") from error
        self._view.notice(f"{len(self.conversation.turns)} turns read from {path}")


def _lines(*, interactive: bool) -> Iterator[str]:
    """Yield lines of input; Ctrl-D, and Ctrl-C at the prompt, end them."""
    if not interactive:
        # Read as bytes: invalid UTF-8 must not end the conversation.
        yield from (raw.decode("utf-8", "replace") for raw in sys.stdin.buffer)
        return
    import readline  # noqa: F401  (gives `input` editing and history)

    while True:
        try:
            with _interruptible_input():
                text = input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


@contextlib.contextmanager
def _interruptible_input() -> Iterator[None]:
    """Interrupt readline's wait periodically, so that it notices a Ctrl-C.

    readline checks for signals before it waits for a key. A Ctrl-C between the check and the wait would be noticed only
    with the next key, unless another signal ends the wait.
    """
    former = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY_S, _LOOK_EVERY_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
