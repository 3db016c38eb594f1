"""Strangers at the sockets of the messenger: garbage, forged notifications of KV, and connections held for good.

A stranger has no certificate, token or key. To show that secrecy of a node's incarnation is not what protects it, these
strangers are given it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgpack
import numpy as np
import psutil

from messenger.frames import MAGIC, MAX_BODY_NBYTES, PREFIX, VERSION, Hello, Notify, Read, Welcome, encode
from messenger.link import LinkClosed
from messenger.sockets import SocketLink
from moonpool_proto.v1 import common_pb2
from tools.attacks.target import NO_ANSWER, Attack, AttackedCluster
from worker.kv_notification import PushedBlocks, pack_notification

GREETING = Hello("stranger", 9, "elsewhere", 1, b"s" * 16, "tcp")
KIND_OF_HELLO = encode(GREETING)[5]
NOISES = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "random bytes": np.random.default_rng(5).bytes(5000),
    "another version": PREFIX.pack(MAGIC, VERSION + 1, KIND_OF_HELLO, 0, 10) + bytes(10),
    "a body over the limit": PREFIX.pack(MAGIC, VERSION, KIND_OF_HELLO, 0, MAX_BODY_NBYTES + 1),
    "a body that is no msgpack": PREFIX.pack(MAGIC, VERSION, KIND_OF_HELLO, 0, 20) + b"\xc1" * 20,
    "half a greeting": encode(GREETING)[:-3],
}
KV_NODES = ("prefill-", "decode-", "pool-", "worker-")
WAIT_S = 20.0


def kv_nodes(target: AttackedCluster) -> list[str]:
    """Return the nodes that have a messenger."""
    return [name for name in target.pids() if name.startswith(KV_NODES)]


def addresses(target: AttackedCluster, node_id: str) -> list[int | str]:
    """Return all addresses of the node's messenger."""
    return [*tcp_ports(target, node_id), *unix_paths(target, node_id)]


def tcp_ports(target: AttackedCluster, node_id: str) -> list[int]:
    """Return the TCP ports of the node's messenger; its gRPC server listens on a unix socket."""
    process = psutil.Process(target.pids()[node_id])
    return [int(c.laddr.port) for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]


def unix_paths(target: AttackedCluster, node_id: str) -> list[str]:
    """Return the unix sockets of the node's messenger, which only the cluster's own user can reach."""
    process = psutil.Process(target.pids()[node_id])
    paths = {str(c.laddr) for c in process.net_connections("unix") if c.laddr}
    return sorted(path for path in paths if Path(path).name.startswith("m-"))


@contextlib.contextmanager
def connected(address: int | str) -> Iterator[socket.socket]:
    """Connect to a TCP port of this host or to a unix socket."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    with socket.socket(family) as raw:
        raw.settimeout(WAIT_S)
        raw.connect(address if isinstance(address, str) else ("127.0.0.1", address))
        yield raw


async def incarnation(target: AttackedCluster, node_id: str) -> int:
    """Return the node's incarnation, from its State, which only the cluster's own user can ask for."""
    kind = "Pool" if node_id.startswith("pool-") else "Worker"
    async with grpc.aio.insecure_channel(f"unix:{target.socket_path(node_id)}") as channel:
        state: Any = channel.unary_unary(f"/moonpool.v1.{kind}/State")
        reply: bytes = await state(b"", timeout=WAIT_S)
    return int(json.loads(common_pb2.JsonReply.FromString(reply).json)["incarnation"])


def _greeting(node_id: str, incarnation: int, address: int | str, serial: int = 0) -> Hello:
    return Hello(
        f"stranger-{os.getpid()}-{serial // 8}",
        serial // 8 + 1,
        node_id,
        incarnation,
        os.urandom(16),
        "shm" if isinstance(address, str) else "tcp",
    )


# Garbage


def _make_noise(address: int | str, noise: bytes) -> str:
    """Return what becomes of a connection that sends garbage and nothing more."""
    with connected(address) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(noise)
            raw.shutdown(socket.SHUT_WR)
        try:
            while raw.recv(65536):
                pass
        except ConnectionError:
            pass
        except TimeoutError:
            return NO_ANSWER
    return "closed"


async def _garbage(target: AttackedCluster) -> Counter[str]:
    sockets = [address for node in kv_nodes(target) for address in addresses(target, node)]
    sockets += [target.socket_path(node) for node in target.pids() if not node.startswith("frontend")]
    jobs = [asyncio.to_thread(_make_noise, address, noise) for address in sockets for noise in NOISES.values()]
    return Counter(await asyncio.gather(*jobs))


GARBAGE = Attack(
    "garbage frames",
    "6 kinds of garbage on every socket of messengers and gRPC servers",
    _garbage,
    frozenset({"closed"}),
)


# Forged notifications

_EPOCHS = 4096
_BATCH = 256  # notifications under way
_FORGE_S = 3.0


def forged_payloads(epoch: int) -> tuple[bytes, ...]:
    """Return notifications that claim the arrival of KV under an epoch, in today's layout with a guessed token and in
    the layout of protocol 4, well-formed and malformed."""
    old: dict[str, Any] = {"e": epoch, "l": 0, "b": [0, 1], "v": [16, 16], "d": bytes(16)}
    changes: tuple[dict[str, Any], ...] = ({"b": [[0], [1]], "v": [[16], [16]]}, {}, {"b": [[]], "v": [[]], "d": b""})
    today = PushedBlocks(range(1), np.arange(2), np.full(2, 16, np.int32), np.zeros((1, 2), np.uint64))
    packed = pack_notification(epoch, 0x1234, today)
    return (*(msgpack.packb(old | changed) for changed in changes), packed, packed[:-1])


def _forge(node_id: str, incarnation: int, address: int | str, stop_s: float) -> Counter[str]:
    """Send forged notifications for epochs to come, counted from the incarnation, until `stop_s`."""
    found: Counter[str] = Counter()
    first, sequence = (incarnation & 0x7FFFFFFF) << 32, 0
    with connected(address) as raw:
        link = SocketLink(raw, node_id)
        link.send(_greeting(node_id, incarnation, address))
        try:
            if not isinstance(link.receive(), Welcome):
                return Counter({"not greeted": 1})
            while time.monotonic() < stop_s:
                for kind in range(len(forged_payloads(0))):
                    for begin in range(1, _EPOCHS, _BATCH):
                        for epoch in range(begin, begin + _BATCH):
                            sequence += 1
                            link.send(Notify(sequence, b"kv", forged_payloads(first | epoch)[kind]))
                        found.update(type(link.receive()).__name__ for _ in range(_BATCH))
        except (LinkClosed, OSError):
            found["closed"] += 1
    return found


async def _forged(target: AttackedCluster) -> Counter[str]:
    stop_s = time.monotonic() + _FORGE_S
    jobs = []
    for node in kv_nodes(target):
        known = await incarnation(target, node)
        jobs += [asyncio.to_thread(_forge, node, known, port, stop_s) for port in tcp_ports(target, node)]
    found: Counter[str] = Counter()
    for counts in await asyncio.gather(*jobs):
        found.update(counts)
    return found or Counter({"no port": 1})


FORGED = Attack(
    "forged notifications",
    f"notifications of KV under the first {_EPOCHS:,} epochs of the incarnation, for {_FORGE_S:.0f} s",
    _forged,
    frozenset({"Ack", "Refused", "ConnectionReject", "not greeted", "closed", "no port"}),
)


# Guessed keys


def _guess(node_id: str, incarnation: int, address: int | str) -> str:
    with connected(address) as raw:
        link = SocketLink(raw, node_id)
        link.send(_greeting(node_id, incarnation, address))
        try:
            for sequence, message in enumerate(
                (
                    Read(1, 1, 0x1234, 4096, np.array([[0, 4096]], dtype=np.int64).tobytes()),
                    Read(2, 1, 0x1234, 64, np.array([[-(1 << 62), 64]], dtype=np.int64).tobytes()),
                )
            ):
                if sequence == 0 and not isinstance(link.receive(), Welcome):
                    return "not greeted"
                link.send(message)
                while (answer := link.receive()).__class__.__name__ == "Offer":
                    os.close(link.take_fd())
            return type(answer).__name__
        except (LinkClosed, OSError):
            return "closed"


async def _guessed(target: AttackedCluster) -> Counter[str]:
    found: Counter[str] = Counter()
    for node in kv_nodes(target):
        known = await incarnation(target, node)
        for address in addresses(target, node):
            found[await asyncio.to_thread(_guess, node, known, address)] += 1
    return found


GUESSED = Attack(
    "guessed keys",
    "reads under a guessed key and beyond a region's bounds, on every messenger socket",
    _guessed,
    frozenset({"Refused", "ConnectionReject", "not greeted", "closed"}),
)


# Connections held for good

HOGS_EACH = 300  # more than a messenger's 256
_HOLD_S = 3.0
_MAX_UNANSWERED = 20  # greetings, after which no more connections are opened


class Hogs:
    """Connections to every messenger's TCP port, of which every other one has sent a greeting."""

    def __init__(self) -> None:
        self._open: list[socket.socket] = []
        self.found: Counter[str] = Counter()

    def connect(self, node_id: str, incarnation: int, port: int, count: int = HOGS_EACH) -> None:
        """Open `count` connections and keep them."""
        for serial in range(count):
            raw = socket.socket()
            raw.settimeout(1.0)
            self._open.append(raw)
            try:
                raw.connect(("127.0.0.1", port))
                if serial % 2:
                    self.found["silent"] += 1
                    continue
                link = SocketLink(raw, node_id)
                link.send(_greeting(node_id, incarnation, port, serial))
                self.found[type(link.receive()).__name__] += 1
            except TimeoutError:
                self.found["not greeted"] += 1
                if self.found["not greeted"] >= _MAX_UNANSWERED:
                    return
            except (LinkClosed, OSError):
                self.found["closed"] += 1

    async def attach(self, target: AttackedCluster) -> None:
        """Open the connections to every node."""
        for node in kv_nodes(target):
            known = await incarnation(target, node)
            await asyncio.gather(
                *(asyncio.to_thread(self.connect, node, known, port) for port in tcp_ports(target, node))
            )

    def close(self) -> None:
        for raw in self._open:
            raw.close()


@contextlib.asynccontextmanager
async def hogs(target: AttackedCluster) -> Any:
    """Hold the connections while the context is open."""
    held = Hogs()
    try:
        await held.attach(target)
        yield held
    finally:
        held.close()


async def _hold(target: AttackedCluster) -> Counter[str]:
    async with hogs(target) as held:
        await asyncio.sleep(_HOLD_S)
    return Counter(held.found) or Counter({"no port": 1})


HOGS = Attack(
    "connection hogs",
    f"{HOGS_EACH} connections to each messenger, half of them greeted, held for {_HOLD_S:.0f} s",
    _hold,
    frozenset({"Welcome", "ConnectionReject", "silent", "not greeted", "closed", "no port"}),
)
ATTACKS = (GARBAGE, FORGED, GUESSED, HOGS)
