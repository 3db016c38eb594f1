"""Contender processes of benchmarks/messenger.py: detection, start, and turns."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent.parent / "peers"
ROOT = PEERS.parent.parent
READY = "READY "
START_TIMEOUT_S = 120.0


class TurnFailed(RuntimeError):
    """A contender ended, or sent an invalid reply."""


@dataclass(frozen=True)
class Turn:
    """Turn of `batches` batches of `shape` (bytes per slice, slices), with `window` in flight; 1: sequential."""

    shape: tuple[int, int]
    write: bool
    batches: int
    window: int

    @property
    def nbytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.batches


class ContenderScript:
    """Process of a script of benchmarks/peers, in a Python that has its package."""

    def __init__(self, name: str, script: str, *arguments: str, python: str = sys.executable, **env: str) -> None:
        self.name = name
        self._command = [python, str(PEERS / script), *arguments]
        own = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "proto")])} if python == sys.executable else {}
        # A file instead of a pipe, which would block when full of other packages' warnings.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ | own | env,
        )

    def await_ready(self) -> None:
        self._line(READY)

    def take(self, turn: Turn) -> list[float]:
        """Perform a turn; return the seconds of each batch if sequential, else the total seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(vars(turn)) + "\n")
        self._process.stdin.flush()
        seconds: list[float] = json.loads(self._line("["))
        return seconds

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _line(self, start: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Some packages also log to standard output.
            if line.startswith(start):
                return line
        self._process.wait()
        self._log.seek(0)
        raise TurnFailed(f"{self.name} ended: {' '.join(self._command)}\n{self._log.read()[-2000:]}")


class Iperf3:
    """iperf3: an unacknowledged stream of as many bytes, always between the same two buffers.

    Its writes have the maximum size, which is fastest; a turn has enough bytes to make the start negligible.
    """

    name = "iperf3"
    WRITE_NBYTES = 1 << 20
    LEAST_NBYTES = 128 << 20

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = str(free.getsockname()[1])
        self._server = subprocess.Popen(
            ["iperf3", "-s", "-p", self._port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def await_ready(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.take(Turn((1 << 20, 1), True, 1, 8))
                return
            except TurnFailed:
                if time.monotonic() > until or self._server.poll() is not None:
                    raise
                time.sleep(0.1)

    def take(self, turn: Turn) -> list[float]:
        length, count = str(self.WRITE_NBYTES), str(max(turn.nbytes, self.LEAST_NBYTES))
        command = ["iperf3", "-c", "127.0.0.1", "-p", self._port, "-J", "-l", length, "-n", count]
        done = subprocess.run(
            command if turn.write else [*command, "-R"],
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
            check=False,
        )
        report = json.loads(done.stdout or "{}")
        if "error" in report or "end" not in report:
            raise TurnFailed(f"iperf3 failed: {report.get('error', done.stderr)}")
        received = report["end"]["sum_received"]
        return [received["seconds"] * turn.nbytes / received["bytes"]]

    def close(self) -> None:
        self._server.terminate()
        self._server.wait(30)


def has(python: str, module: str) -> bool:
    """Return True if the module is installed in that Python."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode == 0


def has_iperf3() -> bool:
    return shutil.which("iperf3") is not None
