"""The command `moonpool top`: samples a cluster periodically and draws its activity until the user quits.

A daemon thread runs the sampler in its own event loop and publishes `_Sampler.seen`, a tuple that is replaced whole. It
then writes a byte to a pipe, which wakes the main thread from its wait for keys.
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
from moonpool.cluster_view.collector import look_at_cluster
from moonpool.cluster_view.locate import Located
from moonpool.cluster_view.top_rendering import KEYS, SORTS, TopView, screen
from moonpool.commands.arguments import ClusterArguments, on_cluster, wide_console
from moonpool.options import reported_errors

_ARROWS: Final = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down"}
_MOST_NBYTES: Final = 64  # of a paste; the rest is read next time


@contextmanager
def single_keys() -> Iterator[int]:
    """Yield the terminal's descriptor in cbreak mode: keys arrive unbuffered and are not echoed; Ctrl-C still works."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def key_or_event(keys: int, event: int) -> str | None:
    """Return the next key's name ("q", "up"), or None when `event` becomes readable; "q" if the terminal is closed."""
    readable, _, _ = select.select([keys, event], [], [])
    if keys not in readable:
        return None
    pressed = os.read(keys, _MOST_NBYTES)
    return name_of(pressed) if pressed else "q"


def name_of(pressed: bytes) -> str:
    """Return the name of the first pressed key."""
    for sequence, name in _ARROWS.items():
        if pressed.startswith(sequence):
            return name
    return pressed[:1].decode("ascii", errors="ignore")


_PAGE: Final = 10
_TEXT_LINES: Final = 10_000  # without a terminal nothing is hidden

app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command()
@on_cluster
def top(
    cluster: ClusterArguments,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two samples.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Sample twice, print the result, and exit; the default without a terminal.")
    ] = False,
) -> None:
    """Watch a running cluster: throughput, load, objectives, rejections, KV tiers, and the activity of its nodes.

    Keys: q quits, p pauses, s sorts the nodes by the next column, r reverses the order, arrows and page keys scroll.

    Examples: moonpool top · moonpool top --url https://api.example.com:8000 · moonpool top --conductor 10.0.0.1:7000
    """
    with reported_errors():
        sampler = _Sampler(cluster.locate(), every)
        if once or not (sys.stdin.isatty() and sys.stdout.isatty()):
            seen = asyncio.run(sampler.twice())
            console, shown = wide_console(), TopView(clock=_clock())
            console.print(screen(seen, shown, columns=console.width, lines=_TEXT_LINES))
            return
        try:
            _watch(sampler)
        except KeyboardInterrupt:
            return


class _Sampler:
    """Samples the cluster, in one event loop."""

    def __init__(self, located: Located, every_s: float) -> None:
        self._located = located
        self._every_s = every_s
        self._history = ActivityHistory()
        self.first: Future[None] = Future()  # set after the first sample of `follow`, or its error
        self.seen: tuple[ClusterActivity, str]  # the last activity, and the error since then or ""

    async def twice(self) -> ClusterActivity:
        """Sample twice, and return the activity in between. Raises ClusterNotFound."""
        await self._sample()
        await asyncio.sleep(self._every_s)
        return await self._sample()

    async def follow(self, notify: Callable[[], object]) -> None:
        """Sample forever and call `notify` after each try. If the first one fails, `first` raises its error."""
        try:
            self.seen = await self._sample(), ""
        except Exception as error:
            self.first.set_exception(error)
            return
        self.first.set_result(None)
        while True:
            await asyncio.sleep(self._every_s)
            try:
                self.seen = await self._sample(), ""
            except Exception as error:  # any error is shown; the next sample may succeed
                self.seen = self.seen[0], str(error) or type(error).__name__
            notify()

    async def _sample(self) -> ClusterActivity:
        reply, processes = await look_at_cluster(self._located)
        return self._history.add(ClusterSample(time.monotonic(), reply), processes)


def _watch(sampler: _Sampler) -> None:
    event, notify = os.pipe()

    def follow() -> None:
        asyncio.run(sampler.follow(lambda: os.write(notify, b".")))

    # A daemon, since it may be in the middle of a call when the user quits.
    threading.Thread(target=follow, name="top", daemon=True).start()
    sampler.first.result()
    drawn = sampler.seen
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
                drawn, view = sampler.seen, replace(view, clock=_clock())


def after_key(view: TopView, key: str, *, num_nodes: int) -> TopView:
    """Return the view after a key; unknown keys change nothing."""
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


def _clock() -> str:
    return datetime.now().strftime("%H:%M:%S")
