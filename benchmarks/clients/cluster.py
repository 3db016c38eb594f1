"""Context manager that runs `moonpool serve` on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.clients.errors import ClusterFailed
from moonpool.supervision.parent_death import SUPERVISOR_VARIABLE
from moonpool.supervision.ready_file import ReadyFile

START_S = 300.0
STOP_S = 60.0
_POLL_S = 0.1


@contextmanager
def running_cluster(log: Path, *flags: str) -> Iterator[ReadyFile]:
    """Run `moonpool serve` with `flags`, with its output in `log`. Raises ClusterFailed.

    The kernel kills the cluster if this process is killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="moonpool-clients-") as folder:
        ready = Path(folder) / "ready.json"
        own = ["--port=0", f"--ready-file={ready}", f"--run-dir={folder}/run", f"--startup-timeout={START_S:g}"]
        with log.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "moonpool", "serve", *own, *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, SUPERVISOR_VARIABLE: str(os.getpid())},
                process_group=0,
            )
        try:
            yield _wait_ready(server, ready, log)
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_ready(server: subprocess.Popen[bytes], ready: Path, log: Path) -> ReadyFile:
    deadline_s = time.monotonic() + START_S + STOP_S
    while not ready.is_file():
        if server.poll() is not None or time.monotonic() > deadline_s:
            end = log.read_text(errors="replace")[-2000:]
            raise ClusterFailed(f"the cluster did not start (exit code {server.poll()}); the end of {log}:\n{end}")
        time.sleep(_POLL_S)
    return ReadyFile.read(ready)
