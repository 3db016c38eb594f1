"""Measured servers as processes: a cluster, conductor and frontend with scripted nodes, and the baseline."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moonpool.supervision.child import READY_PREFIX

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
START_S = 900.0  # enough for the 19 processes of a cluster on two busy cores


@dataclass
class Served:
    """Running server and its processes by name."""

    url: str
    model: str
    pids: dict[str, int]
    loops: dict[str, Path] = field(default_factory=dict)  # event loop log of each watched process

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds of each process."""
        times = {name: psutil.Process(pid).cpu_times() for name, pid in self.pids.items()}
        return {name: each.user + each.system for name, each in times.items()}

    def rss(self, name: str) -> int:
        """Return the resident memory of a process in bytes."""
        return int(psutil.Process(self.pids[name]).memory_info().rss)

    def held(self, since_s: float) -> dict[str, LoopDelays]:
        """Return the stalls of each watched event loop from `since_s` (monotonic clock) until now."""
        time.sleep(0.1)  # until the last sample is written
        return {name: LoopDelays.of(path, since_s) for name, path in self.loops.items()}


@dataclass(frozen=True)
class LoopDelays:
    """Event loop stalls in milliseconds.

    `lag`: wall time, which includes preemption by other processes; `held`: CPU time of the process during it; `own`:
    CPU time of the loop's thread during it.
    """

    lag_max: float
    held_max: float
    held_p999: float
    own_max: float

    @classmethod
    def of(cls, path: Path, since_s: float) -> LoopDelays:
        """Read the log written by `watched`."""
        rows = [[float(value) for value in line.split()] for line in path.read_text().splitlines()]
        late = [row[1:] for row in rows if len(row) == 4 and row[0] >= since_s]
        lags, held, own = ([1e3 * value for value in column] for column in zip(*late, strict=True))
        return cls(max(lags), max(held), sorted(held)[int(0.999 * (len(held) - 1))], max(own))


def long_folder(folder: Path, max_len: int) -> Path:
    """Copy the bundled model's configuration and tokenizer with a longer context; weights are not needed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((BUNDLED / "config.json").read_text()) | {"max_position_embeddings": max_len}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    return folder


@contextlib.contextmanager
def scripted_cluster(folder: Path, work: Path, step_s: float) -> Iterator[Served]:
    """Run a conductor with its decision log, a frontend, and scripted nodes with `step_s` per decode step."""
    work.mkdir(parents=True, exist_ok=True)
    model, conductor = folder.name, f"unix:{work}/conductor.sock"
    roles = {
        "conductor": [
            "conductor",
            "--listen",
            conductor,
            "--decision-log",
            str(work / "decisions"),
            "--max-queue",
            "600",
        ],
        "frontend": ["frontend", "--conductor", conductor, "--model", str(folder), "--port", "0"],
    }
    with contextlib.ExitStack() as stack:
        pids, told = {}, {}
        for name, flags in roles.items():
            command = [sys.executable, "-m", "benchmarks.frontend.watched", str(work / f"{name}.loop"), *flags]
            process = stack.enter_context(running([*command, "--log-level", "warning"], work / f"{name}.log"))
            told[name] = json.loads(ready_line(process, READY_PREFIX, work / f"{name}.log"))
            pids[name] = process.pid
            if name == "conductor":
                limits = [str(json.loads((folder / "config.json").read_text())["max_position_embeddings"]), "16"]
                command = [sys.executable, "-m", "benchmarks.frontend.nodes", conductor, str(work), model, *limits]
                nodes = stack.enter_context(running([*command, str(step_s)], work / "nodes.log"))
                ready_line(nodes, "joined", work / "nodes.log")
                pids["nodes"] = nodes.pid
        loops = {name: work / f"{name}.loop" for name in roles}
        yield Served(told["frontend"]["target"], model, pids, loops)


@contextlib.contextmanager
def cluster(folder: Path, work: Path, *flags: str) -> Iterator[Served]:
    """Run `moonpool serve`."""
    work.mkdir(parents=True, exist_ok=True)
    ready = work / "ready.json"
    command = [sys.executable, "-m", "moonpool", "serve", str(folder), "--port", "0"]
    command += ["--ready-file", str(ready), "--log-level", "warning", *flags]
    command += ["--startup-timeout", str(START_S)]
    with (work / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        told = _wait(ready, process, work / "serve.log")
        pids = {name: int(node["pid"]) for name, node in told["nodes"].items()}
        yield Served(told["url"], told["model"], pids)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def frontend_preferring(conductor: int, conductors: int) -> str:
    """Return the name of a frontend that prefers the conductor of this number (`frontend.conductor`).

    It is "frontend", that of a cluster's own, if that one does.
    """
    names = itertools.chain(["frontend"], (f"frontend-{i}" for i in itertools.count(100)))
    return next(name for name in names if zlib.crc32(name.encode()) % conductors == conductor)


@contextlib.contextmanager
def another_frontend(folder: Path, work: Path, name: str, *flags: str) -> Iterator[tuple[str, int]]:
    """Run a further frontend for the cluster that runs in `work`; yield its URL and its process id."""
    ready = json.loads((work / "ready.json").read_text())
    conductors = [node["target"] for node in ready["nodes"].values() if node["role"] == "conductor"]
    command = [sys.executable, "-m", "moonpool", "node", "frontend", "--node-id", name, "--model", str(folder)]
    command += ["--port", "0", "--log-level", "warning", "--conductor", *conductors, *flags]
    with running(command, work / f"{name}.log") as process:
        told = json.loads(ready_line(process, READY_PREFIX, work / f"{name}.log"))
        yield str(told["target"]), process.pid


@contextlib.contextmanager
def floor(step_s: float) -> Iterator[Served]:
    """Run the baseline HTTP server."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.frontend.floor", str(port), str(step_s)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield Served(f"http://127.0.0.1:{port}", "floor", {"frontend": process.pid})
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a process whose standard output is read here."""
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def ready_line(process: subprocess.Popen[str], prefix: str, log: Path) -> str:
    """Return the text after `prefix` in the first line that begins with it."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(prefix):
            return line.removeprefix(prefix)
    raise SystemExit(f"the process ended before it was ready:\n{log.read_text()}")


def _wait(ready: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the cluster did not start:\n{log.read_text()}")
        time.sleep(0.1)
    told: dict[str, Any] = json.loads(ready.read_text())
    return told
