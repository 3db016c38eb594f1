"""The servers that are measured, as processes: a cluster with paced engines, and the floor."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
_START_S = 900.0  # 19 processes on two cores that others use, too


@dataclass
class Served:
    """A server and its processes by name."""

    url: str
    model: str
    pids: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        """CPU time that each process has had."""
        times = {name: psutil.Process(pid).cpu_times() for name, pid in self.pids.items()}
        return {name: each.user + each.system for name, each in times.items()}

    def rss(self, name: str) -> int:
        """Resident bytes of a process."""
        return int(psutil.Process(self.pids[name]).memory_info().rss)

    def metric(self, name: str) -> dict[str, float]:
        """Values of moonpool:NAME by the label `process`."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as reply:
            text = reply.read().decode()
        return {p: float(v) for p, v in re.findall(rf'moonpool:{name}\{{process="(\w+)"\}} (\S+)', text)}


def long_folder(folder: Path, max_len: int) -> Path:
    """The bundled model's configuration and tokenizer with a longer context; paced engines need no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((BUNDLED / "config.json").read_text()) | {"max_position_embeddings": max_len}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    return folder


@contextlib.contextmanager
def cluster(folder: Path, work: Path, *flags: str) -> Iterator[Served]:
    """`moonpool serve` with paced engines, ended on exit."""
    work.mkdir(parents=True, exist_ok=True)
    ready = work / "ready.json"
    command = [sys.executable, "-m", "moonpool", "serve", str(folder), "--engine", "paced", "--port", "0"]
    command += ["--ready-file", str(ready), "--log-level", "warning", *flags]
    command += ["--startup-timeout", str(_START_S)]
    with (work / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        told = _wait(ready, process, work / "serve.log")
        pids = {name: int(node["pid"]) for name, node in told["nodes"].items()}
        yield Served(told["url"], told["model"], pids)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextlib.contextmanager
def floor(step_s: float) -> Iterator[Served]:
    """The bare HTTP server."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.front_door.floor", str(port), str(step_s)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2])
    try:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield Served(f"http://127.0.0.1:{port}", "floor", {"frontend": process.pid})
    finally:
        process.terminate()
        process.wait(20)


def _wait(ready: Path, process: subprocess.Popen[bytes], log: Path) -> dict[str, Any]:
    deadline = time.monotonic() + _START_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the cluster did not start:\n{log.read_text()}")
        time.sleep(0.1)
    told: dict[str, Any] = json.loads(ready.read_text())
    return told
