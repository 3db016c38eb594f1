"""Client of the transfer benchmark: a session with the server, and the measurement of each cell.

Connection errors are distinguished: unknown host, nothing listens, no answer (a firewall), another program, another
version, no memory; and the same for the port of the bytes. Latency is measured with single batches, throughput with a
window of them. Every cell starts with a batch of fresh random bytes, all of which are compared with the other side's.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc.aio
import numpy as np

from messenger import Endpoint, Messenger, MessengerConfig, RemoteKey, SharedMemory, TransferResult
from messenger.frames import VERSION
from messenger.priority import Priority
from moonpool.errors import TransferBenchFailed
from moonpool.transfer_bench.plan import BatchShape, BenchPlan, Cell, CellResult, Timed, VerifiedBatches
from moonpool.transfer_bench.server import METHOD, PLAIN, SERVICE, WITH_DIGESTS, SliceDigests, fill, hash_of
from moonpool_proto.v1 import common_pb2
from rpc.control import call, open_channel
from rpc.errors import ControlError

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 60.0
LISTEN_COMMAND = "moonpool bench messenger --listen"


@dataclass(frozen=True)
class ServerFacts:
    """The server's endpoint, the key to its memory, and its host."""

    endpoint: Endpoint
    key: RemoteKey
    host: str
    cores: int


class BenchSession:
    """Session with the server at `host`:`port`; the client's messenger must use `node_id`."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._target = f"{f'[{host}]' if ':' in host else host}:{port}"
        self._channel: grpc.aio.Channel | None = None
        self._stream: grpc.aio.StreamStreamCall[bytes, bytes] | None = None
        self.node_id = f"bench-caller-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"

    async def open(self, region_nbytes: int) -> ServerFacts:
        """Request memory. Raises TransferBenchFailed."""
        await asyncio.to_thread(probe, self._host, self._port, f"start `{LISTEN_COMMAND}` there")
        self._channel = open_channel(self._target)
        self._stream = self._channel.stream_stream(f"/{SERVICE}/{METHOD}")()
        reply = await self._ask({"version": VERSION, "node_id": self.node_id, "region_nbytes": region_nbytes})
        endpoint = Endpoint.from_proto(common_pb2.Endpoint.FromString(bytes.fromhex(reply["endpoint"])))
        if reply["wildcard"]:
            endpoint = replace(endpoint, tcp_host=self._host)
        return ServerFacts(endpoint, RemoteKey.unpack(bytes.fromhex(reply["key"])), reply["host"], reply["cores"])

    async def hash_of(self, shape: BatchShape, base: int) -> str:
        """Return `hash_of` of the server's memory."""
        request = {"ask": "hash", "slice_nbytes": shape.slice_nbytes, "slices": shape.slices, "base": base}
        return str((await self._ask(request))["hash"])

    async def settle(self) -> VerifiedBatches:
        """Wait until all received batches are compared; return the report since the last call."""
        return VerifiedBatches(**await self._ask({"ask": "settle"}))

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._stream is not None
        try:
            await call(self._stream.write(json.dumps(message).encode()), **self._named)
            answer = await call(self._stream.read(), **self._named)
        except ControlError as error:
            raise TransferBenchFailed(
                f"the program at {self._target} is not `{LISTEN_COMMAND}`, or it has ended: {error}"
            ) from error
        if not isinstance(answer, bytes):
            raise TransferBenchFailed(f"the other side at {self._target} ended the session")
        reply: dict[str, Any] = json.loads(answer)
        if "refused" in reply:
            raise TransferBenchFailed(f"the other side at {self._target} rejects the session: {reply['refused']}")
        return reply

    @property
    def _named(self) -> dict[str, Any]:
        return {"what": SERVICE, "target": self._target, "deadline_s": ANSWER_TIMEOUT_S}


def probe(host: str, port: int, advice: str) -> None:
    """Connect over TCP and close. Raises TransferBenchFailed with the reason and the advice."""
    where = f"{host}:{port}"
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
    except socket.gaierror as error:
        raise TransferBenchFailed(f"unknown host {host!r}: {error.strerror}") from error
    except ConnectionRefusedError as error:
        raise TransferBenchFailed(f"nothing listens at {where}: {advice}") from error
    except TimeoutError as error:
        raise TransferBenchFailed(
            f"no answer from {where} within {CONNECT_TIMEOUT_S:g} s: the host is down, or a firewall drops "
            f"packets to port {port}; open it on both hosts and everything between"
        ) from error
    except OSError as error:
        raise TransferBenchFailed(f"{where} cannot be reached: {error.strerror or error}") from error


LATENCY_SHARE = 1 / 3
LEAST_BATCHES = 3
MAX_PLACES = 4096
PROGRESS_EVERY_S = 0.1

OnProgress = Callable[[str, Cell, float], None]
"""Called with (transport, cell, share done) periodically, on the measuring thread."""


class BenchClient:
    """Transfers batches between this process's memory and the server's."""

    def __init__(self, plan: BenchPlan, config: MessengerConfig, node_id: str, owner: ServerFacts) -> None:
        self._plan = plan
        self._owner = owner
        self._priority = Priority[plan.priority.upper()]
        self._memory = SharedMemory.create(plan.region_nbytes, "bench", "auto")
        self._memory.try_commit(0, self._memory.nbytes)
        fill(self._memory.array)
        self._digests = SliceDigests(self._memory.array)
        self._rng = np.random.default_rng()
        self._messenger = Messenger(config, node_id=node_id, incarnation=secrets.randbits(63))
        try:
            self._messenger.start()
            self._region = self._messenger.register(self._memory)
            self._peer = self._messenger.connect(owner.endpoint)
            if self._peer.transport == "tcp":
                advice = f"this is the port for the bytes; give `{LISTEN_COMMAND}` another with --data-port"
                probe(owner.endpoint.tcp_host, owner.endpoint.tcp_port, advice)
        except BaseException:
            self.close()
            raise

    @property
    def transport(self) -> str:
        return self._peer.transport

    def counters(self) -> dict[str, int]:
        """Return the messenger's counters."""
        return self._messenger.counters()

    def close(self) -> None:
        """Close the messenger and free the memory."""
        self._messenger.close()
        self._memory.close()

    async def measure(
        self, cell: Cell, session: BenchSession, stop: threading.Event, on_progress: OnProgress
    ) -> CellResult:
        """Measure one cell, or a part of it if `stop` is set. Raises TransferBenchFailed, MessengerError."""
        on_progress(self.transport, cell, 0.0)
        await self._check(cell, session)
        before = await session.settle()
        timed = await asyncio.to_thread(self._time, cell, stop, on_progress)
        ended_s = time.perf_counter()
        after = await session.settle()
        if after.verified:  # a batch counts once it is compared
            timed = replace(timed, seconds=timed.seconds + time.perf_counter() - ended_s)
        wrong = timed.wrong + before.wrong + after.wrong
        if wrong:
            raise TransferBenchFailed(
                f"{wrong} batches arrived by {self.transport} with wrong digests: do not serve over this path before "
                "the cause is known (memory, network card, driver)"
            )
        compared = after.verified + (timed.batches + len(timed.latencies_s)) * (
            self._plan.digests and cell.direction == "read"
        )
        return CellResult.of(self.transport, cell, timed, after.cpu_s - before.cpu_s, compared)

    async def _check(self, cell: Cell, session: BenchSession) -> None:
        """Transfer one batch at a random offset in the cell's direction, and compare all its bytes."""
        shape = cell.shape
        base = int(self._rng.integers(0, self._plan.region_nbytes - shape.span + 1)) // 256 * 256
        for offset in shape.offsets(base).tolist():
            fill(self._memory.array[offset : offset + shape.slice_nbytes])
        expected = hash_of(self._memory.array, shape, base)
        if cell.direction == "read":
            expected = await session.hash_of(shape, base)
        await asyncio.to_thread(self._start(cell, base).result)
        found = (
            hash_of(self._memory.array, shape, base) if cell.direction == "read" else await session.hash_of(shape, base)
        )
        if found != expected:
            raise TransferBenchFailed(
                f"a {cell.direction} of {shape.slices} slices of {shape.slice_nbytes} bytes by {self.transport} left "
                "wrong bytes: do not serve over this path"
            )

    def _start(self, cell: Cell, base: int) -> Future[TransferResult]:
        how = self._owner.key, self._region, cell.shape.rows(base)
        deadline_s = self._plan.deadline_s
        if cell.direction == "read":
            return self._peer.read(*how, deadline_s=deadline_s, priority=self._priority)
        if not self._plan.digests:
            return self._peer.write_notify(*how, PLAIN, b"", deadline_s=deadline_s, priority=self._priority)
        message = partial(self._digests.message, cell.shape, base)
        return self._peer.write_notify(*how, WITH_DIGESTS, message, deadline_s=deadline_s, priority=self._priority)

    def _time(self, cell: Cell, stop: threading.Event, on_progress: OnProgress) -> Timed:
        expected = self._expected(cell)
        bases = itertools.cycle(expected)
        began_cpu_s, began_s = time.process_time(), time.monotonic()
        told_s = began_s
        wrong = 0

        def go_on(done: int, until_s: float) -> bool:
            nonlocal told_s
            now_s = time.monotonic()
            if now_s - told_s >= PROGRESS_EVERY_S:
                told_s = now_s
                on_progress(self.transport, cell, min(1.0, (now_s - began_s) / self._plan.seconds))
            return done < LEAST_BATCHES or (now_s < until_s and not stop.is_set())

        def finish(base: int, future: Future[TransferResult]) -> None:
            nonlocal wrong
            future.result()
            message = expected[base]
            wrong += message is not None and not self._digests.agrees(message)

        latencies_s: list[float] = []
        while go_on(len(latencies_s), began_s + LATENCY_SHARE * self._plan.seconds):
            base, started_s = next(bases), time.perf_counter()
            finish(base, self._start(cell, base))
            latencies_s.append(time.perf_counter() - started_s)

        under_way: deque[tuple[int, Future[TransferResult]]] = deque()
        batches, started_s = 0, time.perf_counter()
        while go_on(batches, began_s + self._plan.seconds):
            if len(under_way) == self._plan.window:
                finish(*under_way.popleft())
            base = next(bases)
            under_way.append((base, self._start(cell, base)))
            batches += 1
        while under_way:
            finish(*under_way.popleft())
        return Timed(latencies_s, batches, time.perf_counter() - started_s, time.process_time() - began_cpu_s, wrong)

    def _expected(self, cell: Cell) -> dict[int, bytes | None]:
        """Return the batches' offsets, with the expected digests of reads if they are compared.

        As in a pool, digests of reads are made before: here from a first read of each offset.
        """
        shape = cell.shape
        bases = range(0, self._plan.region_nbytes - shape.span + 1, shape.span)[:MAX_PLACES]
        if not (self._plan.digests and cell.direction == "read"):
            return dict.fromkeys(bases)
        for base in bases:
            self._start(cell, base).result()
        return {base: self._digests.message(shape, base) for base in bases}
