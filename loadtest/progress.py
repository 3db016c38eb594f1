"""Progress of a run on the terminal, background tasks, and Ctrl-C as an event that ends the run early."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest.record import SendOutcome
from loadtest.sender import SendTally


@asynccontextmanager
async def background(*coroutines: Any) -> AsyncIterator[None]:
    """Run coroutines as tasks during the block and cancel them at its end; the first exception is raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end, or until `stop` is set, which cancels it. Raises its exception."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.gather(working, stopped, return_exceptions=True)


@contextmanager
def interrupts(stop: asyncio.Event) -> Iterator[None]:
    """Make the first Ctrl-C set `stop`; a second one ends the program. Has an effect only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C during the block, such as while a report is written. Has an effect only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


_PLAIN_EVERY_S = 10.0
_REFRESH_S = 0.25


class ProgressDisplay:
    """Progress display of consecutive stages. `console` None disables output."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._stage = ""
        self._said_at = -_PLAIN_EVERY_S

    def __enter__(self) -> Self:
        if self._console is not None and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description:<9}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}", style="dim"),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, stage: str, done: int, of: int, detail: str = "") -> None:
        """Show the progress of a stage; a new stage name starts a new bar."""
        if self._bar is not None:
            if stage != self._stage:
                self._bar.add_task(stage, total=of, detail=detail)
            self._bar.update(self._bar.task_ids[-1], completed=done, total=of, detail=detail)
        elif self._console is not None and self._is_worth_a_line(stage, done == of):
            self._console.print(
                f"{stage}: {done} of {of}{'; ' + detail if detail else ''}", highlight=False, soft_wrap=True
            )
        self._stage = stage

    def _is_worth_a_line(self, stage: str, complete: bool) -> bool:
        now = time.monotonic()
        if stage == self._stage and not complete and now - self._said_at < _PLAIN_EVERY_S:
            return False
        self._said_at = now
        return True


def detail_of(tally: SendTally) -> str:
    """Return the running totals as one line."""
    hit = f", hit rate {tally.cached_tokens / tally.prompt_tokens:.1%}" if tally.prompt_tokens else ""
    return (
        f"{tally.ended[SendOutcome.COMPLETED]} completed, {tally.ended[SendOutcome.REJECTED]} rejected, "
        f"{tally.ended[SendOutcome.FAILED]} failed, {tally.in_flight} in flight{hit}"
    )


async def show_tally(stage: str, tally: SendTally, display: ProgressDisplay) -> None:
    """Update the display several times a second until cancelled."""
    while True:
        display.show(stage, sum(tally.ended.values()), tally.total, detail_of(tally))
        await asyncio.sleep(_REFRESH_S)
