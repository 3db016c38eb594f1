"""`serve --join`: workers that one supervisor keeps for a cluster whose conductor and frontend others run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from moonpool.supervision.child import READY_PREFIX

LIMIT_S = 200


@contextmanager
def running(log: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[str], str]]]:
    """The command, and what waits for a line that begins so and gives the rest of it; ended like a cluster's."""
    command = [sys.executable, "-m", "moonpool", *arguments]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def wait_for(beginning: str) -> str:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(beginning):
                    return line.removeprefix(beginning)
            raise AssertionError(f"{arguments[0]} ended: {log.read_text()}")

        try:
            yield process, wait_for
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(LIMIT_S) == 0, log.read_text()


def ask(url: str, what: str = "", body: dict[str, Any] | None = None) -> Any:
    content = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + what, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        return json.load(answer)


def wait_ready(url: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            ask(url, "/ready")
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_workers_join_a_running_cluster_and_leave_it_running(paced_model: Path, short_path: Path) -> None:
    conductor, common = f"unix:{short_path}/c.sock", ["--block-tokens", "8", "--model", str(paced_model)]
    ready_file = short_path / "ready.json"
    with ExitStack() as stack:
        head, head_says = stack.enter_context(
            running(short_path / "c.log", "conductor", "--listen", conductor, "--socket-dir", str(short_path / "s"))
        )
        head_says(READY_PREFIX)
        _, door_says = stack.enter_context(
            running(short_path / "f.log", "frontend", "--conductor", conductor, "--port", "0", *common)
        )
        url = json.loads(door_says(READY_PREFIX))["target"]
        serve = ["serve", str(paced_model), "--engine", "paced", "--block-tokens", "8", "--join", conductor]
        serve += ["--run-dir", str(short_path / "r"), "--ready-file", str(ready_file), "--threads", "1"]
        serve += ["--capacity-tokens", "4096"]
        with running(short_path / "w.log", *serve) as (_, workers_say):
            assert workers_say("Moonpool is ready: in the cluster of ").startswith(conductor)
            told = json.loads(ready_file.read_text())
            assert set(told["nodes"]) == {"pool-0", "prefill-0", "decode-0"}
            wait_ready(url)
            body = {"prompt": list(range(5, 60)), "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
            answer = ask(url, "/v1/completions", body)
            assert answer["usage"]["completion_tokens"] == 8
            held = [sys.executable, "-m", "moonpool", "validate", "--ready-file", str(ready_file), "--wait", "30"]
            subprocess.run(held, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        assert head.poll() is None
        assert ask(url, "/live")["status"]
        assert not ready_file.exists()
    assert os.path.exists(short_path / "c.log")
