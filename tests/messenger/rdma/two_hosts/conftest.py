"""The first of the bed's two machines, with a hold on the second, `other_host.py`; elsewhere nothing is collected."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from messenger import Endpoint, RemoteKey

if os.environ.get("RDMA_VM_ROLE") != "first":
    collect_ignore_glob = ["test_*.py"]

PORT = 7700
"""As in other_host.py."""
ROCE_PORT = 4791


def _first_address(variable: str) -> str:
    return os.environ[variable].split(",")[0].split("=")[1]


@dataclass
class FarChild:
    """A messenger in a process of the other host; answers as a `Child` does."""

    connection: socket.socket
    endpoint: Endpoint
    key: RemoteKey

    def ask(self, command: str) -> Any:
        return _asked(self.connection, command + "\n")

    def kill(self) -> None:
        """Returns once the process is gone."""
        self.connection.sendall(b"kill\n")
        assert self.connection.recv(1) == b""


def _asked(connection: socket.socket, line: str) -> Any:
    connection.sendall(line.encode())
    answer = b""
    while not answer.endswith(b"\n"):
        chunk = connection.recv(1 << 16)
        assert chunk, f"the other host ended the connection instead of an answer to {line!r}"
        answer += chunk
    return json.loads(answer)


@pytest.fixture(scope="session")
def _other_host() -> Iterator[Callable[[], socket.socket]]:
    """A new control connection at each call; the other host is let go at the end."""

    def connect() -> socket.socket:
        end_s = time.monotonic() + 120
        while True:
            try:
                return socket.create_connection((_first_address("RDMA_VM_PEER_RAILS"), PORT), timeout=120)
            except OSError:
                assert time.monotonic() < end_s, "the other host does not answer"
                time.sleep(0.2)

    yield connect
    with connect() as connection:
        connection.sendall(b'"bye"\n')
        connection.recv(1)


@pytest.fixture
def make_far_child(_other_host: Callable[[], socket.socket], patience: float) -> Iterator[Callable[..., FarChild]]:
    """`make_far_child(node_id, nbytes=..., incarnation=1)`: killed at the end if still alive."""
    children: list[FarChild] = []

    def make(node_id: str, nbytes: int = 1 << 20, incarnation: int = 1) -> FarChild:
        host = _first_address("RDMA_VM_PEER_RAILS")
        connection = _other_host()
        words = ("rdma", "/tmp", node_id, nbytes, incarnation, 0, host, 5.0 * patience)
        ready = _asked(connection, json.dumps([str(word) for word in words]) + "\n")
        child = FarChild(connection, Endpoint(**ready["endpoint"]), RemoteKey.unpack(bytes.fromhex(ready["key"])))
        children.append(child)
        return child

    yield make
    for child in children:
        child.connection.close()


@pytest.fixture
def make_near_node(make_node: Any) -> Callable[..., Any]:
    """`make_node`, listening where the other host can reach it."""
    return lambda node_id, nbytes=1 << 20, **config: make_node(
        node_id, nbytes, data_host=_first_address("RDMA_VM_RAILS"), **config
    )


@pytest.fixture
def drop_rail() -> Iterator[Callable[[int], Callable[[], None]]]:
    """`heal = drop_rail(number)`: from now on RoCE packets to this host on a rail vanish, until `heal()`.

    Where they leave, soft-RoCE would be told, and try the same packet again for ever.
    """
    rules: list[list[str]] = []

    def drop(number: int) -> Callable[[], None]:
        rule = ["INPUT", "-i", f"eth{number}", "-p", "udp", "--dport", str(ROCE_PORT), "-j", "DROP"]
        subprocess.run(["iptables", "-I", *rule], check=True)
        rules.append(rule)

        def heal() -> None:
            subprocess.run(["iptables", "-D", *rule], check=True)
            rules.remove(rule)

        return heal

    yield drop
    for rule in rules:
        subprocess.run(["iptables", "-D", *rule], check=True)


@pytest.fixture
def slow_rail() -> Iterator[Callable[[int, float], Callable[[], None]]]:
    """`heal = slow_rail(number, bytes_per_s)`: limit what this host sends on a rail, until `heal()`."""
    slow: set[str] = set()

    def slowed(number: int, bytes_per_s: float) -> Callable[[], None]:
        device = f"eth{number}"
        limit = ["rate", f"{8 * bytes_per_s:.0f}bit", "burst", "32kb", "limit", "16mb"]  # it queues and drops nothing
        subprocess.run(["tc", "qdisc", "add", "dev", device, "root", "tbf", *limit], check=True)
        slow.add(device)

        def heal() -> None:
            subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)
            slow.remove(device)

        return heal

    yield slowed
    for device in slow:
        subprocess.run(["tc", "qdisc", "del", "dev", device, "root"], check=True)
