"""Single keys from the terminal, while they are waited for together with something else.

The command `moonpool top`: asks a cluster again and again, and draws what it says, until it is told to stop.
"""

import asyncio
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.live import Live

from moonpool.cluster_view.activity import ActivityHistory, ClusterActivity, ClusterSample
from moonpool.cluster_view.collector import ask_cluster
from moonpool.cluster_view.locate import DEFAULT_URL, Located, locate
from moonpool.cluster_view.top_rendering import KEYS, SORTS, TopView, screen
from moonpool.commands.arguments import Conductor, ReadyPath, Url, wide_console
from moonpool.options import reported_errors

_ARROWS: Final = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down"}
_MOST_NBYTES: Final = 64  # of a paste: the rest is read in the next turn


@contextmanager
def single_keys() -> Iterator[int]:
    """The terminal's descriptor; keys come as they are pressed, and are not shown. Ctrl-C stays what it is."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def key_or_event(keys: int, event: int) -> str | None:
    """Waits for either: the key's name ("q", "up"), or None once `event` can be read. A terminal that is gone: "q"."""
    readable, _, _ = select.select([keys, event], [], [])
    if keys not in readable:
        return None
    pressed = os.read(keys, _MOST_NBYTES)
    return name_of(pressed) if pressed else "q"


def name_of(pressed: bytes) -> str:
    """What was pressed; of several keys at once the first."""
    for sequence, name in _ARROWS.items():
        if pressed.startswith(sequence):
            return name
    return pressed[:1].decode("ascii", errors="ignore")


_PAGE: Final = 10
_TEXT_LINES: Final = 10_000  # without a terminal nothing is left out

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
def top(
    url: Url = DEFAULT_URL,
    conductor: Conductor = "",
    ready_file: ReadyPath = None,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="ClusterSample twice, print that, and end; so it is without a terminal.")
    ] = False,
) -> None:
    """Watch a running cluster: throughput, load, objectives, rejections, KV tiers, and its nodes by what they do.

    Keys: q ends it, p holds the screen, s sorts the nodes by the next column, r reverses, arrows and page keys scroll.

    Examples: moonpool top · moonpool top --url http://127.0.0.1:8080 · moonpool top --conductor 10.0.0.1:7000 --once
    """
    with reported_errors():
        located = locate(conductor=conductor, url=url, ready_file=ready_file)
        asker = _Asker(located, every)
        if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            seen = asyncio.run(asker.twice())
            console, shown = wide_console(), TopView(clock=_clock())
            console.print(screen(seen, shown, columns=console.width, lines=_TEXT_LINES))
            return
        try:
            _watch(asker)
        except KeyboardInterrupt:
            return


class _Asker:
    """Looks at the cluster, in one event loop."""

    def __init__(self, located: Located, every_s: float) -> None:
        self._located = located
        self._every_s = every_s
        self._history = ActivityHistory()
        self.first: Future[None] = Future()  # of the looks that follow each other
        self.seen: tuple[ClusterActivity, str]  # from then on: the last look, and what is wrong since

    async def twice(self) -> ClusterActivity:
        """What happened in between. Raises ClusterNotFound."""
        await self._look()
        await asyncio.sleep(self._every_s)
        return await self._look()

    async def follow(self, tell: Callable[[], None]) -> None:
        """For ever, calling `tell` after each try. Ends if there is nobody at first, which `first` then raises."""
        try:
            self.seen = await self._look(), ""
        except Exception as error:
            self.first.set_exception(error)
            return
        self.first.set_result(None)
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self.seen = await self._look(), ""
            except Exception as error:  # whatever it is, the person is told, and the next look may go well
                self.seen = self.seen[0], str(error) or type(error).__name__
            tell()

    async def _look(self) -> ClusterActivity:
        reply = await ask_cluster(self._located.conductor)
        return self._history.add(ClusterSample(time.monotonic(), reply), self._located.ready)


def _watch(asker: _Asker) -> None:
    event, told = os.pipe()

    def follow() -> None:
        asyncio.run(asker.follow(lambda: _tell(told)))

    # It may be in the midst of a call when the person goes.
    threading.Thread(target=follow, name="top", daemon=True).start()
    asker.first.result()
    drawn = asker.seen
    console, view = Console(), TopView(keys=KEYS, clock=_clock())
    with single_keys() as keys, Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            view = replace(view, trouble=drawn[1])
            live.update(screen(drawn[0], view, columns=console.width, lines=console.height), refresh=True)
            key = key_or_event(keys, event)
            if key == "q":
                return
            if key is None:
                os.read(event, 64)
            else:
                view = after_key(view, key, num_nodes=len(drawn[0].status.nodes))
            if not view.paused:
                drawn, view = asker.seen, replace(view, clock=_clock())


def after_key(view: TopView, key: str, *, num_nodes: int) -> TopView:
    """The view once a key was pressed; one that means nothing changes nothing."""
    names = list(SORTS)
    scrolled = {"up": -1, "down": 1, "page up": -_PAGE, "page down": _PAGE}
    if key == "p":
        return replace(view, paused=not view.paused)
    if key == "s":
        return replace(view, sort=names[(names.index(view.sort) + 1) % len(names)], first=0)
    if key == "r":
        return replace(view, reverse=not view.reverse, first=0)
    if key in scrolled:
        return replace(view, first=max(0, min(num_nodes - 1, view.first + scrolled[key])))
    return view


def _tell(told: int) -> None:
    os.write(told, b".")


def _clock() -> str:
    return datetime.now().strftime("%H:%M:%S")
