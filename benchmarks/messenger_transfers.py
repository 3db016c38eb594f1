"""The messenger over tcp and shm against a plain Python socket stream with write and ack, and NIXL where installed.

Every sender talks to a process of its own, and all take turns in every round, so that whatever else the machine does
falls on all alike. Per size: `p50_us` of one write with notification, awaited (one batch at a time), and `gbps`
(1e9 bytes per second) with a window of batches under way. Ratios are medians over rounds, to the plain stream of the
same round. Run: python benchmarks/messenger_transfers.py [--rounds N] [--sizes 65536,...]; the last line is JSON.
"""

import argparse
import base64
import importlib
import importlib.util
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

# A script's own folder comes first on the path, where this file would hide the package that it measures.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from messenger import Endpoint, Messenger, MessengerConfig, RemoteKey, SharedMemory  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = (64 * KIB, MIB, 16 * MIB)
REGION_NBYTES = 128 * MIB
WINDOW = 8
BYTES_PER_ROUND = 96 * MIB
MAX_BATCHES_PER_ROUND = 200
READY = "READY "


class Sender(ABC):
    """Writes `nbytes` to a place in another process and learns that they are there."""

    name: str

    @abstractmethod
    def begin(self, place: int, nbytes: int) -> Callable[[], None]:
        """Start one batch; the result waits for its end."""

    @abstractmethod
    def close(self) -> None: ...


class PlainStream(Sender):
    """What anyone would write first: sendall of a header and the bytes, recv_into on the other side, one byte back."""

    name = "plain_socket"

    def __init__(self) -> None:
        self._process, port = spawn("plain-owner")
        self._sock = socket.create_connection(("127.0.0.1", int(port)))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._memory = memoryview(np.ones(REGION_NBYTES, np.uint8))  # type: ignore[arg-type]

    def begin(self, place: int, nbytes: int) -> Callable[[], None]:
        self._sock.sendall(place.to_bytes(8, "little") + nbytes.to_bytes(8, "little"))
        self._sock.sendall(self._memory[place : place + nbytes])
        return self._wait

    def _wait(self) -> None:
        if not self._sock.recv(1):
            raise ConnectionError("the plain stream's owner ended")

    def close(self) -> None:
        self._sock.close()
        self._process.wait(10)

    @staticmethod
    def own() -> None:
        """The other process."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            print(f"{READY}{listener.getsockname()[1]}", flush=True)
            sock, _ = listener.accept()
        memory = memoryview(np.ones(REGION_NBYTES, np.uint8))  # type: ignore[arg-type]
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while len(header := sock.recv(16, socket.MSG_WAITALL)) == 16:
                place, nbytes = int.from_bytes(header[:8], "little"), int.from_bytes(header[8:], "little")
                while nbytes:
                    received = sock.recv_into(memory[place : place + nbytes])
                    place, nbytes = place + received, nbytes - received
                sock.sendall(b"a")


class Messaging(Sender):
    """The messenger, with a notification after each batch."""

    def __init__(self, transport: str, run_dir: str) -> None:
        self.name = transport
        self._process, answer = spawn("messenger-owner", transport, run_dir)
        owner = json.loads(answer)
        config = MessengerConfig(transport=transport, run_dir=Path(run_dir))  # type: ignore[arg-type]
        self._messenger = Messenger(config, node_id=f"{transport}-sender", incarnation=1)
        self._messenger.start()
        self._memory = SharedMemory.create(REGION_NBYTES, "sender")
        self._memory.array[:] = 1
        self._region = self._messenger.register(self._memory)
        self._peer = self._messenger.connect(Endpoint(**owner["endpoint"]))
        self._key = RemoteKey.unpack(bytes.fromhex(owner["key"]))

    def begin(self, place: int, nbytes: int) -> Callable[[], None]:
        rows = [[place, place, nbytes]]
        future: Future[Any] = self._peer.write_notify(self._key, self._region, rows, b"batch", b"digests")
        return lambda: future.result() and None

    def close(self) -> None:
        self._messenger.close()
        self._memory.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    @staticmethod
    def own(transport: str, run_dir: str) -> None:
        """The other process."""
        config = MessengerConfig(transport=transport, run_dir=Path(run_dir))  # type: ignore[arg-type]
        messenger = Messenger(config, node_id=f"{transport}-owner", incarnation=1)
        messenger.on_notify(lambda _node, _tag, _payload: None)
        memory = SharedMemory.create(REGION_NBYTES, "owner")
        memory.array[:] = 0
        endpoint = messenger.start()
        key = messenger.grant(messenger.register(memory), 0, REGION_NBYTES, read=True, write=True)
        print(READY + json.dumps({"endpoint": vars(endpoint), "key": key.pack().hex()}), flush=True)
        sys.stdin.read()
        messenger.close()
        memory.close()


class Nixl(Sender):
    """NIXL's agent with its defaults (UCX: shared memory or cma on one host), a notification with each transfer."""

    name = "nixl"

    def __init__(self) -> None:
        api = importlib.import_module("nixl_cu12._api")
        self._process, answer = spawn("nixl-owner")
        owner = json.loads(answer)
        self._agent = api.nixl_agent("sender", api.nixl_agent_config())
        self._memory = np.ones(REGION_NBYTES, np.uint8)
        self._address = self._memory.ctypes.data
        self._agent.register_memory([(self._address, REGION_NBYTES, 0, "")], "DRAM")
        self._remote = self._agent.add_remote_agent(base64.b64decode(owner["metadata"]))
        self._remote_address: int = owner["address"]

    def begin(self, place: int, nbytes: int) -> Callable[[], None]:
        agent = self._agent
        local = agent.get_xfer_descs([(self._address + place, nbytes, 0)], "DRAM")
        remote = agent.get_xfer_descs([(self._remote_address + place, nbytes, 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", local, remote, self._remote, b"batch")
        state = agent.transfer(handle)

        def wait() -> None:
            nonlocal state
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise ConnectionError(f"the NIXL transfer ended as {state}")
            agent.release_xfer_handle(handle)

        return wait

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    @staticmethod
    def own() -> None:
        """The other process."""
        api = importlib.import_module("nixl_cu12._api")
        agent = api.nixl_agent("owner", api.nixl_agent_config())
        memory = np.zeros(REGION_NBYTES, np.uint8)
        agent.register_memory([(memory.ctypes.data, REGION_NBYTES, 0, "")], "DRAM")
        metadata = base64.b64encode(agent.get_agent_metadata()).decode()
        print(READY + json.dumps({"metadata": metadata, "address": memory.ctypes.data}), flush=True)
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            agent.get_new_notifs()


def spawn(role: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A process with this file's other side, and what it says once it is ready."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--role", role, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    for line in process.stdout:
        # NIXL logs to the standard output, too.
        if line.startswith(READY):
            return process, line.removeprefix(READY)
    raise RuntimeError(f"the process of role {role} ended before it was ready")


def latencies_us(sender: Sender, nbytes: int, batches: int) -> list[float]:
    """One batch at a time."""
    result = []
    for batch in range(batches):
        started = time.perf_counter()
        sender.begin(place_of(batch, nbytes), nbytes)()
        result.append((time.perf_counter() - started) * 1e6)
    return result


def throughput_gbps(sender: Sender, nbytes: int, batches: int) -> float:
    """With up to WINDOW batches under way."""
    under_way: deque[Callable[[], None]] = deque()
    started = time.perf_counter()
    for batch in range(batches):
        if len(under_way) == WINDOW:
            under_way.popleft()()
        under_way.append(sender.begin(place_of(batch, nbytes), nbytes))
    while under_way:
        under_way.popleft()()
    return nbytes * batches / (time.perf_counter() - started) / 1e9


def place_of(batch: int, nbytes: int) -> int:
    """Batches walk through the region, as layers and blocks do."""
    return (batch % (REGION_NBYTES // nbytes)) * nbytes


def measure(senders: list[Sender], sizes: list[int], rounds: int) -> dict[str, Any]:
    """{size: {sender: {p50_us, gbps, p50_ratio, gbps_ratio}}}"""
    result: dict[str, Any] = {}
    for nbytes in sizes:
        batches = min(max(BYTES_PER_ROUND // nbytes, 4), MAX_BATCHES_PER_ROUND)
        p50s: dict[str, list[float]] = {sender.name: [] for sender in senders}
        rates: dict[str, list[float]] = {sender.name: [] for sender in senders}
        for round_number in range(rounds + 1):
            for sender in senders:
                p50 = statistics.median(latencies_us(sender, nbytes, batches))
                rate = throughput_gbps(sender, nbytes, batches)
                # The first round faults the pages in.
                if round_number:
                    p50s[sender.name].append(p50)
                    rates[sender.name].append(rate)
        base = senders[0].name
        result[str(nbytes)] = {
            name: {
                "p50_us": round(statistics.median(p50s[name]), 1),
                "gbps": round(statistics.median(rates[name]), 3),
                "p50_ratio": round(statistics.median(a / b for a, b in zip(p50s[name], p50s[base], strict=True)), 3),
                "gbps_ratio": round(statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True)), 3),
            }
            for name in p50s
        }
        for name, figures in result[str(nbytes)].items():
            print(f"{nbytes // KIB:>6} KiB  {name:<14}", "  ".join(f"{k} {v:>9}" for k, v in figures.items()))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes per batch")
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        role, *rest = arguments.role
        {"plain-owner": PlainStream.own, "messenger-owner": Messaging.own, "nixl-owner": Nixl.own}[role](*rest)
        return
    with tempfile.TemporaryDirectory() as run_dir:
        senders: list[Sender] = [PlainStream(), Messaging("tcp", run_dir), Messaging("shm", run_dir)]
        if importlib.util.find_spec("nixl_cu12") is not None:
            senders.append(Nixl())
        try:
            sizes = [int(size) for size in arguments.sizes.split(",")]
            result = measure(senders, sizes, arguments.rounds)
        finally:
            for sender in senders:
                sender.close()
    print(json.dumps({"benchmark": "messenger", "window": WINDOW, "load_1m": os.getloadavg()[0], "sizes": result}))


if __name__ == "__main__":
    main()
