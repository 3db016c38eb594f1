"""Server of the transfer benchmark: grants memory to clients, one region per session, and verifies what arrives.

A session is one stream of JSON messages over gRPC; its memory is freed when the stream ends. The bytes go through a
real messenger with its own port. Slices carry the digests that the cluster computes of a block's layers.

Threads: gRPC handlers run on the event loop, notifications on the messenger's thread, and each session compares digests
on an executor thread of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from kvpool import KvGroup, KvSpec, layer_digests_at
from kvpool.digest import warm_up
from messenger import Messenger, MessengerConfig, SharedMemory
from messenger.frames import VERSION
from moonpool.errors import ConfigError
from moonpool.transfer_bench.plan import MAX_REGION_NBYTES, BatchShape
from rpc.control import secure, start_server
from rpc.errors import NetworkError

LAYER_NBYTES = 64 << 10

_HEAD = struct.Struct("<QQQ")  # base, bytes of a slice, slices


FindDigests = Callable[[NDArray[np.int64], int], tuple[NDArray[np.uint64], NDArray[np.bool_]]]
"""(offsets of layers, their bytes) -> (their digests, True for those that are known)."""


class SliceDigests:
    """Digests of slices: each counts as a block with layers of 64 KiB, or one layer if it is not a multiple of that."""

    def __init__(self, memory: NDArray[np.uint8], find: FindDigests | None = None) -> None:
        """`find` returns digests of layers that the messenger has computed; those that it lacks are computed here."""
        self._find = find
        warm_up()  # otherwise the first batch would wait for the kernels
        self._memory = memory
        self._specs: dict[int, KvSpec] = {}

    def of(self, shape: BatchShape, base: int) -> NDArray[np.uint64]:
        """Return digests, uint64 [slices, layers]; `shape.slice_nbytes` must be a multiple of 256."""
        spec = self._spec(shape.slice_nbytes)
        valid = np.full(shape.slices, spec.block_tokens, np.int32)
        return layer_digests_at(self._memory, shape.offsets(base), spec, 0, valid)

    def message(self, shape: BatchShape, base: int) -> bytes:
        """Return the notification that a writer sends with the batch."""
        return _HEAD.pack(base, shape.slice_nbytes, shape.slices) + self.of(shape, base).tobytes()

    def agrees(self, message: bytes) -> bool:
        """Return True if the message is valid and its batch has these digests here."""
        try:
            base, slice_nbytes, slices = _HEAD.unpack_from(message)
            shape = BatchShape(slice_nbytes, slices)
            if not slices or not slice_nbytes or base + shape.span > len(self._memory):
                return False
            expected = np.frombuffer(message, "<u8", offset=_HEAD.size)
            return bool(np.array_equal(self._arrived(shape, base), expected))
        except (struct.error, ValueError):
            return False

    def _arrived(self, shape: BatchShape, base: int) -> NDArray[np.uint64]:
        if self._find is None:
            return self.of(shape, base).reshape(-1)
        nbytes, count = self._spec(shape.slice_nbytes).layer_nbytes(0), self._spec(shape.slice_nbytes).num_layers(0)
        starts = shape.offsets(base)[:, None] + np.arange(count) * nbytes
        digests, are_known = self._find(starts.reshape(-1), nbytes)
        return digests if are_known.all() else np.where(are_known, digests, self.of(shape, base).reshape(-1))

    def _spec(self, nbytes: int) -> KvSpec:
        spec = self._specs.get(nbytes)
        if spec is None:
            layer_nbytes = LAYER_NBYTES if nbytes % LAYER_NBYTES == 0 else nbytes
            layers = tuple(range(nbytes // layer_nbytes))
            group = KvGroup("full", 0, layers, kv_heads=1, head_dim=32, dtype="float32")
            spec = self._specs[nbytes] = KvSpec((group,), layer_nbytes // 256)
        return spec


SERVICE, METHOD = "moonpool.TransferBench", "Session"
PLAIN, WITH_DIGESTS = b"plain", b"digests"
MAX_SESSIONS = 16
Context = grpc.aio.ServicerContext[bytes, bytes]
WILDCARDS = ("0.0.0.0", "[::]", "::")


class SessionRefused(Exception):
    """The session is rejected; the message goes to the client."""


@dataclass(frozen=True)
class Listening:
    """Addresses of the server once it listens; `data_port` 0: the messenger does not listen on TCP."""

    target: str
    data_port: int


async def serve_bench(
    host: str, port: int, config: MessengerConfig, stop: asyncio.Event, on_listening: Callable[[Listening], None]
) -> None:
    """Serve until `stop` is set; `on_listening` receives the addresses. Raises NetworkError if it cannot listen."""
    secure(config.tls_files)
    owner = BenchServer(host, config)
    server = None
    try:
        endpoint = owner.messenger.start()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(owner.session)
        handlers = grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler})
        server = await start_server(
            f"{host}:{port}", lambda grpc_server: grpc_server.add_generic_rpc_handlers((handlers,))
        )
        on_listening(Listening(server.target, endpoint.tcp_port))
        await stop.wait()
    finally:
        if server is not None:
            await server.stop(0.5)
        await asyncio.to_thread(owner.close)


class BenchServer:
    """The messenger, and its sessions by the node ids of their clients."""

    def __init__(self, host: str, config: MessengerConfig) -> None:
        self._wildcard = host in WILDCARDS
        self._sessions: dict[str, LentRegion | None] = {}
        identity = f"bench-owner-{socket.gethostname()}-{os.getpid()}"
        self.messenger = Messenger(config, node_id=identity, incarnation=secrets.randbits(63))
        self.messenger.on_notify(self._on_notify)

    def close(self) -> None:
        self.messenger.close()
        for lent in self._sessions.values():
            if lent is not None:
                lent.close()

    async def session(self, _requests: object, context: Context) -> None:
        """Serve one client from its greeting to its end.

        Not a generator: a cancelled one would be closed only at garbage collection.
        """
        caller: str | None = None
        lending: asyncio.Task[LentRegion] | None = None
        try:
            while isinstance(request := await context.read(), bytes):
                message = json.loads(request)
                if lending is None:
                    caller, nbytes = self._admit(message)
                    lending = asyncio.create_task(asyncio.to_thread(LentRegion, self.messenger, nbytes))
                    # A client that leaves meanwhile does not stop the thread: its memory is freed below.
                    self._sessions[caller] = lent = await asyncio.shield(lending)
                    answer = self._greeting(lent)
                else:
                    answer = await asyncio.to_thread(lending.result().answer, message)
                await context.write(json.dumps(answer).encode())
        except (SessionRefused, ValueError, KeyError, TypeError) as error:
            refusal = str(error) if isinstance(error, SessionRefused) else f"malformed message: {error!r}"
            await context.write(json.dumps({"refused": refusal}).encode())
        except (OSError, MemoryError) as error:
            refusal = f"not enough memory on this side: {error}"
            await context.write(json.dumps({"refused": refusal}).encode())
        finally:
            if caller is not None:
                await asyncio.shield(self._take_back(caller, lending))

    def _admit(self, hello: dict[str, Any]) -> tuple[str, int]:
        """Reserve a session for the client; return its node id and the requested bytes."""
        if hello["version"] != VERSION:
            raise SessionRefused(
                f"this side has version {VERSION} of the messenger's protocol, the other {hello['version']}: "
                "run the same Moonpool on both hosts"
            )
        caller, nbytes = str(hello["node_id"]), int(hello["region_nbytes"])
        if caller in self._sessions or len(self._sessions) >= MAX_SESSIONS:
            raise SessionRefused(f"{len(self._sessions)} sessions are open, of at most {MAX_SESSIONS}: try again later")
        if not 0 < nbytes <= MAX_REGION_NBYTES:
            raise SessionRefused(f"a session must request at most {MAX_REGION_NBYTES} bytes of memory, got {nbytes}")
        self._sessions[caller] = None
        return caller, nbytes

    async def _take_back(self, caller: str, lending: asyncio.Task[LentRegion] | None) -> None:
        try:
            if lending is not None:
                await asyncio.to_thread((await lending).close)
        except (OSError, MemoryError):
            pass  # no memory was allocated
        finally:
            del self._sessions[caller]

    def _greeting(self, lent: LentRegion) -> dict[str, Any]:
        return {
            "version": VERSION,
            "endpoint": self.messenger.endpoint.to_proto().SerializeToString().hex(),
            "wildcard": self._wildcard,
            "key": lent.key.pack().hex(),
            "host": socket.gethostname(),
            "cores": os.cpu_count(),
        }

    def _on_notify(self, caller: str, tag: bytes, payload: bytes) -> None:
        lent = self._sessions.get(caller)
        if lent is not None and tag == WITH_DIGESTS:
            lent.compare(payload)


class LentRegion:
    """Memory of one session, and the results of its comparisons."""

    def __init__(self, messenger: Messenger, nbytes: int) -> None:
        self._messenger = messenger
        self._memory = SharedMemory.create(nbytes, "bench", "auto")
        self._memory.try_commit(0, self._memory.nbytes)
        fill(self._memory.array)
        self._region = messenger.register(self._memory)
        self.key = messenger.grant(self._region, 0, nbytes, read=True, write=True)
        self._digests = SliceDigests(self._memory.array)
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._verified: list[Future[bool]] = []

    def compare(self, message: bytes) -> None:
        """Compare a batch with its digests on the session's thread."""
        self._verified.append(self._verifier.submit(self._digests.agrees, message))

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Answer a request of the client between its batches."""
        if message["ask"] == "hash":
            shape = BatchShape(int(message["slice_nbytes"]), int(message["slices"]))
            return {"hash": hash_of(self._memory.array, shape, int(message["base"]))}
        if message["ask"] == "settle":
            done, self._verified = self._verified, []
            wrong = sum(not future.result() for future in done)
            return {"verified": len(done), "wrong": wrong, "cpu_s": time.process_time()}
        raise SessionRefused(f"unknown request type {message['ask']!r}")

    def close(self) -> None:
        self._verifier.shutdown(cancel_futures=True)
        try:
            self._messenger.deregister(self._region)
        except NetworkError:
            pass  # the messenger was closed first
        self._memory.close()


def hash_of(memory: NDArray[np.uint8], shape: BatchShape, base: int) -> str:
    """Return a hash of the batch's bytes in order, the same on both sides."""
    if base < 0 or base + shape.span > len(memory) or shape.slice_nbytes < 1:
        raise ConfigError(f"a batch of {shape} at {base} is not within {len(memory)} bytes")
    digest = hashlib.blake2b(digest_size=16)
    for offset in shape.offsets(base).tolist():
        digest.update(memory[offset : offset + shape.slice_nbytes])  # type: ignore[arg-type]
    return digest.hexdigest()


def fill(memory: NDArray[np.uint8]) -> None:
    """Fill the memory with fresh random bytes, piece by piece."""
    rng = np.random.default_rng()
    for start in range(0, len(memory), 16 << 20):
        piece = memory[start : start + (16 << 20)]
        piece[:] = np.frombuffer(rng.bytes(len(piece)), np.uint8)
