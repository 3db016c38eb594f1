"""Messengers in this process and in child processes, with a check after each test that nothing was left behind."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from messenger import Endpoint, Messenger, MessengerConfig, Region, RemoteKey, SharedMemory
from messenger.copying import copy_rows

CHILD = Path(__file__).with_name("child.py")


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """So that no test measures the compiler."""
    copy_rows()


@pytest.fixture(params=["tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Every behaviour holds over every transport."""
    name: str = request.param
    return name


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
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

    def grant(self, *, read: bool = True, write: bool = True) -> RemoteKey:
        return self.messenger.grant(self.region, 0, self.region.nbytes, read=read, write=write)

    def cut_inbound(self) -> None:
        """Break every connection others have made to this node, as a network fault would."""
        for connection in list(self.messenger._server._connections):
            connection.cut()


MakeNode = Callable[..., Node]


@pytest.fixture
def make_node(nothing_left_behind: None, transport: str, tmp_path: Path) -> Iterator[MakeNode]:
    """`make_node(node_id, nbytes=..., incarnation=..., **config)`; all are idle at the end, and then closed."""
    nodes: list[Node] = []

    def make(node_id: str, nbytes: int = 1 << 20, incarnation: int = 1, **config: Any) -> Node:
        settings = MessengerConfig(**{"transport": transport, "run_dir": tmp_path, "default_deadline_s": 20.0} | config)
        messenger = Messenger(settings, node_id=node_id, incarnation=incarnation)
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

    process: subprocess.Popen[str]
    endpoint: Endpoint
    key: RemoteKey

    def ask(self, command: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


MakeChild = Callable[..., Child]


@pytest.fixture
def make_child(transport: str, tmp_path: Path) -> Iterator[MakeChild]:
    """`make_child(node_id, nbytes=..., incarnation=..., tcp_port=0)`; killed at the end if still alive."""
    children: list[Child] = []

    def make(node_id: str, nbytes: int = 1 << 20, incarnation: int = 1, tcp_port: int = 0) -> Child:
        arguments = [transport, str(tmp_path), node_id, str(nbytes), str(incarnation), str(tcp_port)]
        process = subprocess.Popen(
            [sys.executable, str(CHILD), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        child = Child(process, Endpoint(**ready["endpoint"]), RemoteKey.unpack(bytes.fromhex(ready["key"])))
        children.append(child)
        return child

    yield make
    for child in children:
        child.process.kill()
        child.process.communicate()


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Wait for something that another thread or process brings about."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)


@pytest.fixture(name="wait_until")
def wait_until_fixture() -> Callable[..., None]:
    return wait_until


def _descriptors() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
