"""A whole measurement: every transport of the plan in turn, against a remote server or a child process."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from messenger import MessengerConfig
from moonpool.errors import TransferBenchFailed
from moonpool.python_path import module_command
from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE
from moonpool.transfer_bench.client import BenchClient, BenchSession
from moonpool.transfer_bench.plan import BenchPlan, Cell, CellResult, size_text
from rpc.control import run, secure
from rpc.tls import TlsFiles
from settings.keys import assemble
from settings.messenger import TlsSettings

_TROUBLE = ("retries", "failed_connects", "rdma_failovers", "deadlines_exceeded", "refused", "malformed_frames")

START_TIMEOUT_S = 120.0


@dataclass
class BenchOutcome:
    """Results of a measurement; `trouble` counts the messenger's retries and errors."""

    results: list[CellResult] = field(default_factory=list)
    trouble: dict[str, int] = field(default_factory=dict)
    there: dict[str, Any] = field(default_factory=dict)
    interrupted: bool = False

    def to_json(self, plan: BenchPlan) -> dict[str, Any]:
        return {
            "bench": "messenger",
            "plan": asdict(plan),
            "here": {"host": os.uname().nodename, "cores": os.cpu_count()},
            "there": self.there,
            "results": [result.to_json() for result in self.results],
            "trouble": self.trouble,
            "interrupted": self.interrupted,
        }


def measure_all(plan: BenchPlan, host: str, port: int, tls: TlsSettings, console: Console) -> BenchOutcome:
    """Measure against the server at host:port. Ctrl-C ends it early, with the results so far.

    Raises TransferBenchFailed, MessengerError.
    """
    outcome = BenchOutcome()
    stop = asyncio.Event()
    with _progress(plan, console) as bar:
        run(_measure(plan, host, port, tls, outcome, bar, stop), stop=stop)
    outcome.interrupted = stop.is_set()
    return outcome


def measure_here(plan: BenchPlan, tls: TlsSettings, console: Console) -> BenchOutcome:
    """Measure against a child process."""
    with _child(tls) as port:
        return measure_all(plan, "127.0.0.1", port, tls, console)


async def _measure(
    plan: BenchPlan,
    host: str,
    port: int,
    tls: TlsSettings,
    outcome: BenchOutcome,
    bar: BenchProgress,
    stop: asyncio.Event,
) -> None:
    secure(TlsFiles.of(tls))
    stopping = threading.Event()
    waiting = asyncio.ensure_future(stop.wait())
    waiting.add_done_callback(lambda _: stopping.set())
    try:
        for transport in plan.transports:
            if not stopping.is_set():
                config = assemble(MessengerConfig, transport=transport, tls=tls)
                await _measure_transport(plan, config, BenchSession(host, port), outcome, bar, stopping)
    finally:
        waiting.cancel()


async def _measure_transport(
    plan: BenchPlan,
    config: MessengerConfig,
    session: BenchSession,
    outcome: BenchOutcome,
    bar: BenchProgress,
    stopping: threading.Event,
) -> None:
    try:
        owner = await session.open(plan.region_nbytes)
        outcome.there = {"host": owner.host, "cores": owner.cores}
        caller = await asyncio.to_thread(BenchClient, plan, config, session.node_id, owner)
        try:
            for cell in plan.cells():
                if stopping.is_set():
                    break
                outcome.results.append(await caller.measure(cell, session, stopping, bar.show))
            for name, count in caller.counters().items():
                if name in _TROUBLE:
                    outcome.trouble[name] = outcome.trouble.get(name, 0) + count
        finally:
            await asyncio.to_thread(caller.close)
    finally:
        await session.close()


class BenchProgress:
    """Progress display: a bar over all cells on a terminal, otherwise one line per cell."""

    def __init__(self, plan: BenchPlan, console: Console) -> None:
        self._num_cells = len(plan.transports) * sum(1 for _ in plan.cells())
        self._console = console
        self._seen: list[tuple[str, Cell]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self.progress.add_task("connecting", total=self._num_cells)

    def show(self, transport: str, cell: Cell, share: float) -> None:
        """Show the completed share of a cell."""
        size = size_text(cell.shape.slice_nbytes)
        batch = size if cell.shape.slices == 1 else f"{cell.shape.slices} x {size}"
        text = f"{transport} {cell.direction} {batch}"
        if (transport, cell) not in self._seen:
            self._seen.append((transport, cell))
            if not self._console.is_terminal:
                self._console.print(f"{len(self._seen)} of {self._num_cells}: {text}", highlight=False)
        self.progress.update(self._task, description=text, completed=len(self._seen) - 1 + share)


@contextmanager
def _progress(plan: BenchPlan, console: Console) -> Iterator[BenchProgress]:
    bar = BenchProgress(plan, console)
    with bar.progress:
        yield bar


@contextmanager
def _child(tls: TlsSettings) -> Iterator[int]:
    """Yield the port of a server in a child process, which ends with this context or this process."""
    flags = [text for name, value in vars(tls).items() if value for text in (f"--{name.replace('_', '-')}", str(value))]
    command = module_command("moonpool", "bench", "messenger", "--listen", "127.0.0.1:0", "--json", *flags)
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        # Only this process handles Ctrl-C; it ends the child when it is done.
        start_new_session=True,
        env=os.environ | {SUPERVISOR_VARIABLE: str(os.getpid())},
    )
    try:
        assert child.stdout is not None
        # The line arrives whole, or the child has ended.
        ready, _, _ = select.select([child.stdout], [], [], START_TIMEOUT_S)
        line = child.stdout.readline() if ready else ""
        if not line.startswith("{"):
            raise TransferBenchFailed(f"the other side did not start; see above, or run: {' '.join(command)}")
        yield int(json.loads(line)["target"].rpartition(":")[2])
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()
