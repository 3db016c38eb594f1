"""Messengers in this process and in child processes, with a check after each test that nothing was left behind.

Every test that takes the fixture `transport`, itself or by `make_node` and `make_child`, runs over each transport that
the machine has, or over those alone that `@pytest.mark.transports(...)` names. `--transport NAME` runs only what can be
run over that one, and fails where the machine lacks it.
"""

import dataclasses
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest

from messenger import Endpoint, Messenger, MessengerConfig, Region, RemoteKey, SharedMemory
from settings.keys import assemble

CHILD = Path(__file__).with_name("child.py")
TRANSPORTS = ("tcp", "shm", "rdma")
VERBS_DEVICES = Path("/sys/class/infiniband")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("messenger")
    group.addoption("--transport", choices=("tcp", "shm", "rdma"), help="run what can be run over this transport")
    group.addoption("--patience", type=float, default=1.0, help="factor for every time limit of the messenger's tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "transports(*names): the transports that the test is about; all without it")
    if config.getoption("transport", None) == "rdma" and not _has_verbs_device():
        raise pytest.UsageError("--transport rdma: this machine has no verbs device (rdma link add ... type rxe)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("transports")
        only = metafunc.config.getoption("transport", None)
        names = [name for name in (marker.args if marker else TRANSPORTS) if only in (None, name)]
        there = [name for name in names if name != "rdma" or _has_verbs_device()]
        metafunc.parametrize("transport", there, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = config.getoption("transport", None)
    if only is not None:
        config.hook.pytest_deselected(items=[item for item in items if _transport_of(item) != only])
        items[:] = [item for item in items if _transport_of(item) == only]


def _transport_of(item: pytest.Item) -> Any:
    return getattr(getattr(item, "callspec", None), "params", {}).get("transport")


def _has_verbs_device() -> bool:
    return VERBS_DEVICES.is_dir() and any(VERBS_DEVICES.iterdir())


@pytest.fixture(scope="session")
def patience(pytestconfig: pytest.Config) -> float:
    """Factor for time limits: 1 on a machine that runs at its own speed."""
    factor: float = pytestconfig.getoption("patience", 1.0)
    return factor


@pytest.fixture(scope="session")
def fewer(patience: float) -> Callable[[int], int]:
    """`fewer(100)`: how often to repeat what takes a processor's time; 100 on a machine that runs at its own speed."""
    return lambda count: max(1, round(count / patience))


@pytest.fixture(scope="session")
def _compiled() -> None:
    """So that no test measures the compiler."""
    from messenger.shm.kernels import copy_rows

    copy_rows()


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    """Every behaviour holds over every transport."""
    name: str = request.param
    if name in ("shm", "auto"):
        request.getfixturevalue("_compiled")
    return name


WaitUntil = Callable[..., None]


@pytest.fixture
def wait_until(patience: float) -> WaitUntil:
    """`wait_until(condition, what, timeout_s=10.0)`: for something that another thread or process brings about."""

    def wait(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
        end_s = time.monotonic() + timeout_s * patience
        while not condition():
            assert time.monotonic() < end_s, f"not within {timeout_s * patience} s: {what}"
            time.sleep(0.002)

    return wait


@pytest.fixture
def nothing_left_behind(wait_until: WaitUntil) -> Iterator[None]:
    """Threads and descriptors after each test are those before it."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    wait_until(lambda: set(threading.enumerate()) <= threads, "threads have ended")
    if _descriptors() - descriptors:
        gc.collect()
    left = _descriptors() - descriptors
    assert not left, f"descriptors left open: {[os.readlink(f'/proc/self/fd/{fd}') for fd in left]}"


@dataclass
class Node:
    """A messenger with one region, and what it was told."""

    messenger: Messenger
    endpoint: Endpoint
    region: Region
    notes: list[tuple[str, bytes, bytes]] = field(default_factory=list)
    lost: list[tuple[str, int]] = field(default_factory=list)

    @property
    def array(self) -> np.ndarray[Any, Any]:
        return self.region.array

    @property
    def endpoint_json(self) -> str:
        return json.dumps(dataclasses.asdict(self.endpoint))

    def fill(self, seed: int) -> None:
        """Bytes that look like no others."""
        self.array[:] = np.random.default_rng(seed).integers(0, 256, self.region.nbytes, dtype=np.uint8)

    def grant(self, *, read: bool = True, write: bool = True) -> RemoteKey:
        return self.messenger.grant(self.region, 0, self.region.nbytes, read=read, write=write)

    def cut_inbound(self) -> None:
        """Break every connection others have made to this node, as a network fault would."""
        for connection in list(self.messenger._server._connections):
            connection.cut()


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(
    nothing_left_behind: None, transport: str, tmp_path: Path, patience: float, wait_until: WaitUntil
) -> Iterator[MakeNode]:
    """`make_node(node_id, nbytes=..., incarnation=..., **config)`; all are idle at the end, and then closed."""
    nodes: list[Node] = []

    def make(node_id: str, nbytes: int = 1 << 20, incarnation: int = 1, **config: Any) -> Node:
        settings: dict[str, Any] = {
            "transport": transport,
            "shm_dir": tmp_path,
            "default_deadline_s": 20.0 * patience,
            "handshake_timeout_s": 5.0 * patience,
        }
        messenger = Messenger(assemble(MessengerConfig, **settings | config), node_id=node_id, incarnation=incarnation)
        memory = SharedMemory.create(nbytes, node_id)
        node = Node(messenger, messenger.start(), messenger.register(memory))
        messenger.on_notify(lambda *note: node.notes.append(note))
        messenger.on_peer_lost(lambda *peer: node.lost.append(peer))
        nodes.append(node)
        return node

    yield make
    # An owner leaves a transfer a moment after its caller has the last byte.
    wait_until(lambda: not any(node.messenger.validate() for node in nodes), "nothing is pending")
    for node in nodes:
        node.messenger.close()
        node.region.memory.close()
        # The mapping ends with its last array, and the test's arguments are kept longer than this.
        node.__dict__.clear()


@dataclass
class Child:
    """A messenger in a process of its own, which answers one JSON line per command."""

    process: subprocess.Popen[bytes] | BaseProcess
    lines: TextIO
    endpoint: Endpoint
    key: RemoteKey

    def stop(self) -> None:
        """Returns once every thread of the process stands still."""
        self._signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        end_s = time.monotonic() + 60
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in tasks.glob("*/stat")):
            assert time.monotonic() < end_s, "the process does not stop"

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Returns once the process is gone."""
        self.process.kill()
        if isinstance(self.process, BaseProcess):
            self.process.join()
        else:
            self.process.wait()

    def ask(self, command: str) -> Any:
        print(command, file=self.lines, flush=True)
        return json.loads(self.lines.readline())

    def _signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


MakeChild = Callable[..., Child]


@pytest.fixture(scope="session")
def nursery(pytestconfig: pytest.Config) -> BaseContext:
    """Forks processes from one that has imported what a messenger needs: seconds, and many where a CPU is emulated."""
    over_rdma = pytestconfig.getoption("transport") == "rdma"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["messenger.rdma.transport", "pyverbs.qp", "pyverbs.srq"] if over_rdma else ["messenger.native.responder_loop"]
    )
    forkserver.ensure_running()
    return context


@pytest.fixture
def make_child(transport: str, tmp_path: Path, nursery: BaseContext, patience: float) -> Iterator[MakeChild]:
    """`make_child(node_id, nbytes=..., incarnation=..., data_port=0)`; killed at the end if still alive.

    `prefix` is a command that runs the command which follows it.
    """
    children: list[Child] = []

    def make(
        node_id: str,
        nbytes: int = 1 << 20,
        incarnation: int = 1,
        data_port: int = 0,
        data_host: str = "127.0.0.1",
        prefix: Sequence[str] = (),
    ) -> Child:
        words = (transport, tmp_path, node_id, nbytes, incarnation, data_port, data_host, 5.0 * patience)
        arguments = [str(word) for word in words]
        here, there = socket.socketpair()
        process: subprocess.Popen[bytes] | BaseProcess
        with here, there:
            lines = here.makefile("rw")
            if prefix:
                command = [*prefix, sys.executable, str(CHILD), *arguments]
                environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                process = subprocess.Popen(command, stdin=there, stdout=there, env=environment)
            else:
                given = {"FORKED_WITH": (there, *arguments)}
                process = nursery.Process(target=runpy.run_path, args=(str(CHILD), given, "forked"), daemon=True)
                process.start()
        ready = json.loads(lines.readline())
        child = Child(process, lines, Endpoint(**ready["endpoint"]), RemoteKey.unpack(bytes.fromhex(ready["key"])))
        children.append(child)
        return child

    yield make
    for child in children:
        child.kill()
        child.lines.close()
        if isinstance(child.process, BaseProcess):
            child.process.close()


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
