"""A real cluster on the bundled model, started and looked after by `moonpool serve`."""

import contextlib
import http.client
import json
import os
import pty
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from moonpool.supervision.ready_file import ReadyFile

DEADLINE_S = 150.0


@dataclass
class Served:
    """A `moonpool serve` process and where it says what it runs."""

    process: subprocess.Popen[str]
    ready_path: Path

    @property
    def ready(self) -> ReadyFile:
        return ReadyFile.read(self.ready_path)

    def wait_until(self, condition: Callable[[ReadyFile], bool]) -> ReadyFile:
        give_up = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up:
            assert self.process.poll() is None, "serve ended"
            if self.ready_path.is_file() and condition(ready := self.ready):
                return ready
            time.sleep(0.05)
        raise AssertionError("not so within the deadline")

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.ready.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            return dict(json.load(reply))

    def complete(self) -> int:
        """Four tokens from the served model; how many came."""
        prompt = {"model": self.ready.model, "prompt": "In the beginning", "max_tokens": 4, "ignore_eos": True}
        return int(self.post("/v1/completions", prompt)["usage"]["completion_tokens"])

    def assert_ends_at(self, number: signal.Signals) -> str:
        """One signal ends everything: exit code 0, no process, no ready file, nobody at the port. Returns stdout."""
        ready = self.ready
        pids = [node.pid for node in ready.nodes.values() if node.pid is not None]
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not self.ready_path.exists()
        assert list(Path(ready.run_dir).glob("*.sock")) == []
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(ready.url.rpartition(":")[2]))) != 0
        return out

    def moonpool(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moonpool", *arguments, "--ready-file", str(self.ready_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[Served]:
    # A short path: unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MOONPOOL_")}
    command = [sys.executable, "-m", "moonpool", "serve", "--port=0", f"--run-dir={folder / 'run'}"]
    process = subprocess.Popen(
        [*command, f"--ready-file={folder / 'ready.json'}", "--block-tokens=8", "--capacity-tokens=8192", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environ, "MOONPOOL_SUPERVISOR_PID": str(os.getpid())},
    )
    try:
        yield Served(process, folder / "ready.json")
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """1 prefill, 1 decode, 1 pool node. What engines compute is no matter here, and their start is soon over."""
    with serving("--engine=paced") as cluster:
        cluster.wait_until(
            lambda ready: "frontend-1" in ready.nodes and all(each.ready for each in ready.nodes.values())
        )
        yield cluster
        cluster.assert_ends_at(signal.SIGTERM)


def test_the_ready_file_names_every_process(served: Served) -> None:
    ready = served.ready
    assert list(ready.nodes) == ["conductor", "pool-0", "prefill-0", "decode-0", "frontend", "frontend-1"]
    assert ready.supervisor_pid == served.process.pid
    assert (ready.nodes["frontend"].target, ready.nodes["frontend-1"].target) == (ready.url, "")
    for node in ready.nodes.values():
        assert node.pid is not None
        assert psutil.Process(node.pid).ppid() == served.process.pid
        assert os.getpgid(node.pid) == node.pid


def test_the_default_model_answers_under_its_name(served: Served) -> None:
    assert served.complete() == 4


@pytest.mark.parametrize("node_id", ["decode-0", "prefill-0", "pool-0", "conductor"])
def test_a_process_killed_comes_back_with_its_name_and_address_and_the_cluster_serves(
    served: Served, node_id: str
) -> None:
    before = served.wait_until(lambda ready: ready.nodes[node_id].ready).nodes[node_id]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    after = served.wait_until(lambda r: r.nodes[node_id].ready and r.nodes[node_id].pid != before.pid).nodes[node_id]
    assert after.target == before.target
    assert after.restarts == before.restarts + 1
    give_up = time.monotonic() + DEADLINE_S
    while True:
        try:
            assert served.complete() == 4
            break
        except OSError:  # the frontend itself may be coming back, or its workers
            assert time.monotonic() < give_up
            time.sleep(0.1)


def serving_frontend(ready: ReadyFile) -> str:
    """Return the node id of the frontend that serves; "" while none does."""
    nodes = ready.nodes.items()
    return next((name for name, each in nodes if each.role == "frontend" and each.ready and each.target), "")


def has_standby(ready: ReadyFile) -> bool:
    return sum(each.role == "frontend" and each.ready for each in ready.nodes.values()) == 2


def is_served_by_another(node_id: str, ready: ReadyFile) -> bool:
    return serving_frontend(ready) not in ("", node_id)


class Retrying(threading.Thread):
    """A client that completes one prompt after the other, each on a connection of its own, and retries at once."""

    def __init__(self, served: Served) -> None:
        super().__init__()
        self._served, self._url = served, urlsplit(served.ready.url)
        self.num_completed = self.num_broken = 0
        self.refused: list[OSError] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        body = json.dumps({"prompt": "In the beginning", "max_tokens": 4, "ignore_eos": True})
        assert self._url.hostname is not None
        while not self.is_over.is_set():
            connection = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=60)
            try:
                connection.connect()
            except OSError as error:
                self.refused.append(error)
                continue
            try:
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                self.num_completed += connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                self.num_broken += 1  # the frontend that had accepted it was killed
            finally:
                connection.close()


def completed_more(clients: list[Retrying], count: int, _: ReadyFile) -> bool:
    return sum(client.num_completed for client in clients) > count


def test_a_retry_always_finds_a_listener_while_frontends_are_killed(served: Served) -> None:
    clients = [Retrying(served) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        for _ in range(3):
            before = served.wait_until(has_standby)
            victim = serving_frontend(before)
            pid = before.nodes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            after = served.wait_until(partial(is_served_by_another, victim))
            assert after.url == before.url
            count = sum(client.num_completed for client in clients)
            served.wait_until(partial(completed_more, clients, count))
    finally:
        for client in clients:
            client.is_over.set()
            client.join()
    assert [client.refused for client in clients] == [[], [], []]
    assert sum(client.num_broken for client in clients) <= 3 * 3  # at most what was in flight
    assert served.wait_until(has_standby).nodes["frontend"].restarts >= 1


def test_connections_wait_while_no_frontend_lives(served: Served) -> None:
    before = served.wait_until(has_standby)
    for name in ("frontend", "frontend-1"):
        pid = before.nodes[name].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert served.complete() == 4
    served.wait_until(has_standby)


def test_a_standby_that_is_killed_comes_back_as_a_standby(served: Served) -> None:
    before = served.wait_until(has_standby)
    active = serving_frontend(before)
    standby = ({"frontend", "frontend-1"} - {active}).pop()
    pid = before.nodes[standby].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    after = served.wait_until(lambda r: r.nodes[standby].ready and r.nodes[standby].pid != pid)
    assert (after.nodes[standby].target, serving_frontend(after)) == ("", active)
    assert after.nodes[active].pid == before.nodes[active].pid


def test_status_shows_every_node(served: Served) -> None:
    shown = served.moonpool("status", "--json")
    assert shown.returncode == 0, shown.stderr
    told = json.loads(shown.stdout)
    assert (told["ready"], told["models"]) == (True, {"moonpool": True})
    rows = {row["node"]: row for row in told["nodes"]}
    assert set(rows) == {"conductor", "pool-0", "prefill-0", "decode-0", "frontend", "frontend-1"}
    assert (rows["decode-0"]["model"], rows["pool-0"]["model"]) == ("moonpool", "")
    assert rows["decode-0"]["free_tokens"] == 8192
    assert rows["prefill-0"]["pid"] == served.ready.nodes["prefill-0"].pid
    assert sorted(row["state"] for row in rows.values()) == [*["ready"] * 5, "standby"]
    assert "ready" in served.moonpool("status").stdout.splitlines()[-1]


def test_the_doctor_finds_the_cluster_well(served: Served) -> None:
    shown = served.moonpool("doctor", "--cluster", "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    checks = {check["check"]: check for check in json.loads(shown.stdout)["checks"]}
    assert {name for name, check in checks.items() if check["level"] == "fail"} == set()
    assert checks["control ports"]["found"] == "3 nodes answer from here"
    assert checks["API servers"]["found"] == "1 accept requests"


def test_watching_shows_what_changes_until_ctrl_c(served: Served) -> None:
    command = [sys.executable, "-m", "moonpool", "status", "--ready-file", str(served.ready_path), "--every", "0.1"]
    with subprocess.Popen([*command, "--watch", "--json"], stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert first["ready"]
        served.complete()
        give_up = time.monotonic() + DEADLINE_S
        for line in watching.stdout:
            assert time.monotonic() < give_up
            if (json.loads(line)["cached_share"] is not None) or first["cached_share"] is not None:
                break
        watching.send_signal(signal.SIGINT)
        watching.communicate(timeout=60)
    assert watching.returncode == 0
    with subprocess.Popen([*command, "--watch"], stdout=subprocess.PIPE, text=True) as drawing:
        assert drawing.stdout is not None
        assert "decode-0" in "".join(drawing.stdout.readline() for _ in range(12))
        drawing.send_signal(signal.SIGINT)
        drawing.communicate(timeout=60)
    assert drawing.returncode == 0


def test_top_draws_the_cluster_until_q(served: Served) -> None:
    person, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [sys.executable, "-m", "moonpool", "top", "--ready-file", str(served.ready_path), "--every", "0.1"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, env=environ) as drawing:
        os.close(terminal)
        seen = read_until(person, "decode-0")
        assert "q quit" in seen
        os.write(person, b"s")
        assert "running▼" in read_until(person, "running▼")
        os.write(person, b"q")
        read_until(person, None)
        assert drawing.wait(DEADLINE_S) == 0
    os.close(person)
    shown = served.moonpool("top", "--once", "--every", "0.1")
    assert (shown.returncode, "decode-0" in shown.stdout, "q quit" in shown.stdout) == (0, True, False)


def read_until(terminal: int, wanted: str | None) -> str:
    """Return the output up to then; with None, up to the end of the process."""
    seen = b""
    give_up = time.monotonic() + DEADLINE_S
    while wanted is None or wanted not in seen.decode(errors="ignore"):
        assert time.monotonic() < give_up, seen
        if select.select([terminal], [], [], 1.0)[0]:
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # the other end is closed
                assert wanted is None, seen
                break
    return seen.decode(errors="ignore")


def test_validate_finds_nothing_held_at_rest(served: Served) -> None:
    shown = served.moonpool("validate", "--json", "--wait", "20")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    answered = {node["node_id"] for node in json.loads(shown.stdout)["nodes"]}
    assert answered == {"conductor", "pool-0", "prefill-0", "decode-0", serving_frontend(served.ready)}


def test_ctrl_c_ends_every_process_and_takes_the_ready_file_away() -> None:
    with serving("--engine=paced", "--aggregated=1") as cluster:
        cluster.wait_until(lambda ready: True)
        out = cluster.assert_ends_at(signal.SIGINT)
    assert "Moonpool is ready: http://127.0.0.1:" in out
    assert "(1 aggregated, 1 pool node; paced engines" in out


def test_ctrl_c_while_the_cluster_starts_ends_it_cleanly() -> None:
    with serving() as cluster:
        assert cluster.process.stderr is not None
        assert "Starting 1 prefill, 1 decode, 1 pool node" in cluster.process.stderr.readline()
        cluster.process.send_signal(signal.SIGINT)
        out, _ = cluster.process.communicate(timeout=60)
        assert cluster.process.returncode == 0
        assert out == ""
        assert not cluster.ready_path.exists()


def test_a_worker_that_refuses_its_configuration_ends_the_start_with_exit_code_2_and_its_words() -> None:
    with serving("--aggregated=1", "--device=cuda:99") as cluster:
        _, err = cluster.process.communicate(timeout=DEADLINE_S)
        assert cluster.process.returncode == 2, err
        assert "device 'cuda:99' does not exist" in err
        assert "rejected its configuration" in err
        assert "its last lines" in err
        assert "Traceback" not in err
