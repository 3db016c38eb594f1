"""Server of this host's shared-memory pool: hands out the arena and its index, and accepts puts, touches and reports.

It listens on a unix socket of mode 0600 in the node's socket folder, without gRPC, so that a put takes one short round
trip. The node copies puts out of the client's memory and verifies them on the way. Clients only read the arena, so no
slot needs fencing when a client dies. The digest is that of the copied bytes, even if the client changes its memory
meanwhile: either the client sent the expected digests, or it must still be waiting for the reply.

Threads and lifetimes:

    event loop       all state of server, connections and core: no locks. Requests of one client run one after the other
    copy threads     of low priority, only for copies larger than 1 MiB; until one ends, its put's slots stay fenced
                     (`PoolNode.own_read`) and its connection reads no further request
    client memory    mapped from RegisterMemory to UnregisterMemory or disconnect; a copy in flight keeps it mapped

A client that breaks the protocol gets an ErrorReply and is disconnected; the node and other clients are unaffected.
"""

import asyncio
import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from kvpool.address import KEY_NBYTES
from kvpool.background_threads import background_threads, lower_priority
from kvpool.errors import AddressError, KvPoolError, PoolRefused, SpecError
from kvpool.helper_threads import HelperThreads
from kvpool.local.block_copy import MappedBytes, SpecLayout, copy_blocks, copy_helpers, matches, warm_up
from kvpool.local.protocol import (
    Attach,
    Attached,
    ErrorReply,
    GetIndex,
    IndexReply,
    MemoryRegistered,
    Message,
    PutBlocks,
    PutReply,
    PutStatus,
    RegisterMemory,
    ReportCorrupt,
    TouchBlocks,
    UnregisterMemory,
    decode_body,
    decode_prefix,
    encode,
)
from kvpool.local.shared_index import SharedIndex
from kvpool.node import PoolNode
from kvpool.policy import PutRequest, SlotStatus
from kvpool.spec import KvSpec
from messenger.errors import ProtocolError
from messenger.frames import PREFIX
from messenger.memory import PeerMemory
from moonpool_proto.v1 import common_pb2
from rpc import unix_socket
from rpc.errors import BindFailed

_QUICK_NBYTES = 1 << 20  # largest copy in the event loop: handing it to a thread would take longer
_PUT_TTL_NS = 60 * 10**9  # longest time of a copy


@dataclass(frozen=True)
class LocalOwner:
    """Owner of a client's puts, for accounting and for cleaning up after it."""

    owner: str
    owner_incarnation: int


class _CheckedPut(NamedTuple):
    """Decoded PutBlocks message. Its offsets are not checked yet."""

    layout: SpecLayout
    chain: list[bytes]
    parents: list[bytes]
    offsets: NDArray[np.int64]  # [groups, n]
    digests: NDArray[np.uint64] | None  # [n, layers of all groups]; None: computed from the copied bytes
    num_tokens: NDArray[np.uint32]  # [n], 0 for a full block


class _PutCopy(NamedTuple):
    """Remaining work of a put after allocation: indices of its NEW blocks and their slots."""

    new: list[int]
    targets: NDArray[np.int64]  # [groups, new]


class PutHandler:
    """Executor of puts at one pool node, in its event loop, and in `threads` with the help of `helpers`."""

    def __init__(self, node: PoolNode, arena: MappedBytes, threads: Executor, helpers: HelperThreads) -> None:
        self._node = node
        self._arena = arena
        self._threads = threads
        self._helpers = helpers

    def put(
        self,
        owner: LocalOwner,
        message: PutBlocks,
        source: MappedBytes,
        is_connected: Callable[[], bool],
        reply: Callable[[bytes], None],
    ) -> Awaitable[bytes] | None:
        """Execute a put, and `reply` with a PutStatus per block, or return an awaitable of them for more than 1 MiB.

        `is_connected()` returns False once the client has left; blocks without expected digests are then not stored.
        Raises KvPoolError.
        """
        request = _checked(message)
        put = PutRequest(
            message.kv_namespace,
            request.layout.spec,
            request.chain,
            request.parents,
            request.num_tokens.tolist() if message.num_tokens.strip(b"\0") else (),
            message.compute_s,
        )
        blocks = self._node.add(put)
        status = bytearray(blocks.status)  # PutStatus starts with the values of SlotStatus
        if not blocks.blocks:
            reply(bytes(status))
            return None
        new = [i for i, each in enumerate(blocks.status) if each is SlotStatus.NEW]
        copy = _PutCopy(new, np.array(list(zip(*blocks.offsets, strict=True)), np.int64))
        if len(new) * request.layout.block_nbytes > _QUICK_NBYTES:
            put_id = self._node.track(
                blocks, owner=owner.owner, owner_incarnation=owner.owner_incarnation, ttl_ns=_PUT_TTL_NS
            )
            return self._put_later(request, put_id, copy, source, status, is_connected)
        try:
            right, digests = self._copy(request, copy, source)
            _check_certain(request, is_connected)
        except BaseException:
            self._node.core.drop_new(blocks)
            raise
        settle = self._node.seal_new(blocks, digests, right)
        try:
            reply(self._statuses(status, new, right))
        finally:
            settle()
        return None

    async def _put_later(
        self,
        request: _CheckedPut,
        put_id: str,
        copy: _PutCopy,
        source: MappedBytes,
        status: bytearray,
        is_connected: Callable[[], bool],
    ) -> bytes:
        submit = functools.partial(self._threads.submit, self._copy, request, copy, source, self._helpers)
        copying = asyncio.wrap_future(self._node.own_read(put_id, submit))
        try:
            await asyncio.wait([copying])
            right, digests = copying.result()
            _check_certain(request, is_connected)
            self._node.seal_now(put_id, digests, right)
        except BaseException:
            await self._node.abort(put_id)
            raise
        return self._statuses(status, copy.new, right)

    def _copy(
        self, request: _CheckedPut, copy: _PutCopy, source: MappedBytes, helpers: HelperThreads | None = None
    ) -> tuple[list[bool], list[tuple[bytes, ...]]]:
        """Copy the NEW blocks. Returns (True per valid block, digests per block and group, as `PoolNode.seal`)."""
        starts, expected, num_tokens = request.offsets, request.digests, request.num_tokens
        if len(copy.new) < len(request.chain):
            starts, num_tokens = np.ascontiguousarray(starts[:, copy.new]), num_tokens[copy.new]
            expected = None if expected is None else expected[copy.new]
        digests = copy_blocks(source, starts, self._arena, copy.targets, request.layout, num_tokens, helpers)
        right = [True] * len(digests) if expected is None else matches(digests, expected).tolist()
        return right, _by_group(request.layout, digests)

    def _statuses(self, status: bytearray, new: list[int], right: list[bool]) -> bytes:
        for i, good in zip(new, right, strict=True):
            status[i] = PutStatus.STORED if good else PutStatus.WRONG
        wrong = len(right) - sum(right)
        if wrong:
            self._node.core.counters["digest_mismatches"] += wrong
        return bytes(status)


def _check_certain(request: _CheckedPut, is_connected: Callable[[], bool]) -> None:
    """Raise PoolRefused if the copied bytes are uncertain: a client that disconnected may have overwritten them."""
    if request.digests is None and not is_connected():
        raise PoolRefused("the client disconnected while its memory was being copied, and had sent no digests")


def _checked(message: PutBlocks) -> _CheckedPut:
    layout = _layout(message.spec)
    if len(message.kv_namespace) != KEY_NBYTES or len(message.chain) % KEY_NBYTES:
        raise AddressError(f"a namespace of {len(message.kv_namespace)} bytes, keys of {len(message.chain)}")
    n, groups = len(message.chain) // KEY_NBYTES, layout.spec.num_groups
    sizes = [len(message.parents), len(message.offsets), len(message.digests), len(message.num_tokens)]
    digests_nbytes = 8 * layout.num_layers * n if message.digests else 0
    want = [KEY_NBYTES * n, 8 * groups * n, digests_nbytes, 4 * n]
    if sizes != want:
        raise SpecError(f"a put of {n} blocks has parents, offsets, digests, lengths of {sizes} bytes: expected {want}")
    offsets = np.frombuffer(message.offsets, np.int64).reshape(groups, n)
    digests = np.frombuffer(message.digests, np.uint64).reshape(n, layout.num_layers) if message.digests else None
    num_tokens = np.frombuffer(message.num_tokens, np.uint32)
    return _CheckedPut(layout, _keys(message.chain), _keys(message.parents), offsets, digests, num_tokens)


def _by_group(layout: SpecLayout, digests: NDArray[np.uint64]) -> list[tuple[bytes, ...]]:
    """Return per block the digests of each group."""
    data, nbytes = digests.tobytes(), 8 * layout.num_layers
    if len(layout.ends) == 1:
        return [(data[at : at + nbytes],) for at in range(0, len(data), nbytes)]
    spans = list(itertools.pairwise((0, *layout.ends)))
    return [tuple(data[at + a : at + b] for a, b in spans) for at in range(0, len(data), nbytes)]


@functools.lru_cache(maxsize=64)
def _layout(spec: bytes) -> SpecLayout:
    message = common_pb2.KvSpec()
    try:
        message.ParseFromString(spec)
    except DecodeError as error:
        raise SpecError(f"not a KvSpec: {error}") from error
    return SpecLayout(KvSpec.from_proto(message))


def _keys(data: bytes) -> list[bytes]:
    return [data[i : i + KEY_NBYTES] for i in range(0, len(data), KEY_NBYTES)]


_log = logging.getLogger(__name__)

_MAX_REGIONS = 64  # mapped per client
_MAX_UNSENT_NBYTES = 1 << 20  # of replies that a client does not receive
LANDING_NBYTES = 1 << 18
_MAX_FDS = 4
_FD = struct.Struct("@i")
_ANCILLARY_NBYTES = socket.CMSG_LEN(_MAX_FDS * _FD.size)
_ATTACH_S = 10.0  # time in which a client must send Attach


class ClientConnection:
    """Connection of one client, from accept to `close`; it then calls `on_close` with itself, once."""

    def __init__(
        self,
        sock: socket.socket,
        node: PoolNode,
        index: SharedIndex,
        puts: PutHandler,
        landing: memoryview,
        on_close: "Callable[[ClientConnection], None]",
    ) -> None:
        """Serve `sock`. All connections share the receive buffer `landing`: bytes are copied out of it at once."""
        sock.setblocking(False)
        self._sock = sock
        self._node, self._index, self._puts = node, index, puts
        self._landing = landing
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._owner: LocalOwner | None = None
        self._regions: dict[int, MappedBytes] = {}
        self._received = bytearray()
        self._fds: list[int] = []
        self._unsent = bytearray()
        self._ended = select.poll()  # a peek would raise an exception as long as the client is connected
        self._ended.register(sock, select.POLLRDHUP)
        self.putting: asyncio.Task[None] | None = None  # a put whose copy runs in a thread
        self._loop.add_reader(sock.fileno(), self._readable)
        self._silent = self._loop.call_later(_ATTACH_S, self._refuse, "ProtocolError", "no Attach was received in time")

    def close(self) -> None:
        """Release the client and its memory. A put in flight completes without a reply."""
        if self._sock.fileno() < 0:
            return
        self._silent.cancel()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._regions.clear()
        self._received.clear()
        self._on_close(self)

    def _readable(self) -> None:
        try:
            nbytes, ancillary, flags, _ = self._sock.recvmsg_into([self._landing], _ANCILLARY_NBYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds += [fd for (fd,) in _FD.iter_unpack(data[: len(data) // _FD.size * _FD.size])]
        if not nbytes:
            self.close()
        elif flags & socket.MSG_CTRUNC or len(self._fds) > _MAX_FDS:
            self._refuse("ProtocolError", "too many descriptors at once")
        else:
            self._received += self._landing[:nbytes]
            self._work()

    def _work(self) -> None:
        """Execute the received messages in order, until one runs in a thread."""
        try:
            while self.putting is None and (message := self._next()) is not None:
                self._do(message)
        except ProtocolError as error:
            _log.warning("the local pool server disconnected a client: %s", error)
            self._refuse("ProtocolError", str(error))
        except Exception:
            _log.exception("a request of a client of the local pool server failed")
            self.close()

    def _next(self) -> Message | None:
        """Return the next complete message; None if it has not arrived yet."""
        if len(self._received) < PREFIX.size:
            return None
        kind, nbytes = decode_prefix(self._received)
        end = PREFIX.size + nbytes
        if len(self._received) < end:
            return None
        body = bytes(memoryview(self._received)[PREFIX.size : end])
        del self._received[:end]
        return decode_body(kind, body)

    def _do(self, message: Message) -> None:
        if (self._owner is None) != isinstance(message, Attach):
            if self._owner is None:
                raise ProtocolError(f"the first message was {type(message).__name__}, expected Attach")
            raise ProtocolError("Attach was sent already")
        try:
            self._answer(message)
        except KvPoolError as error:
            self._send(ErrorReply(type(error).__name__, str(error)))

    def _answer(self, message: Message) -> None:
        node, index = self._node, self._index
        match message:
            case PutBlocks():
                self._put(message)
            case Attach():
                self._silent.cancel()
                self._owner = LocalOwner(message.owner, message.owner_incarnation)
                welcome = Attached(node.config.node_id, node.incarnation, node.memory.nbytes, index.nbytes)
                self._send(welcome, [node.memory.fd, index.memory.fd])
            case GetIndex():
                self._send(IndexReply(index.nbytes), [index.memory.fd])
            case RegisterMemory():
                self._register(message)
            case UnregisterMemory():
                self._regions.pop(message.region_id, None)
            case TouchBlocks():
                node.core.use(time.monotonic_ns(), *_address(message))
            case ReportCorrupt():
                node.core.quarantine(*_address(message))
                node.publish_changes()
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a request")

    def _register(self, message: RegisterMemory) -> None:
        if not self._fds or len(self._regions) >= _MAX_REGIONS:
            raise ProtocolError(f"RegisterMemory without a descriptor, or for more than {_MAX_REGIONS} regions")
        self._regions[message.region_id] = MappedBytes.of(PeerMemory(self._fds.pop(0), message.nbytes).array)
        self._send(MemoryRegistered())

    def _put(self, message: PutBlocks) -> None:
        source = self._regions.get(message.region_id)
        if source is None or self._owner is None:
            raise ProtocolError(f"a put from memory {message.region_id}, which is not registered")
        stored = self._puts.put(self._owner, message, source, self._is_connected, self._reply_to_put)
        if stored is not None:
            self._loop.remove_reader(self._sock.fileno())
            self.putting = self._loop.create_task(self._finish(stored))

    def _reply_to_put(self, status: bytes) -> None:
        self._send(PutReply(status))

    def _is_connected(self) -> bool:
        """Return True if the client, which waits for a reply, has not disconnected."""
        return self._sock.fileno() >= 0 and not self._ended.poll(0)

    async def _finish(self, stored: Awaitable[bytes]) -> None:
        """Reply to a put when it is done, then continue with messages that arrived meanwhile."""
        try:
            answer: Message = PutReply(await stored)
        except KvPoolError as error:
            answer = ErrorReply(type(error).__name__, str(error))
        except Exception:
            _log.exception("a put of a client of the local pool server failed")
            self.close()
            return
        self.putting = None
        if self._sock.fileno() >= 0:
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._send(answer)
            self._work()

    def _send(self, message: Message, fds: list[int] | None = None) -> None:
        if self._sock.fileno() < 0:
            return
        data, sent = encode(message), 0
        try:
            if fds:
                sent = socket.send_fds(self._sock, [data], fds)
            elif not self._unsent:
                sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        if sent == len(data):
            return
        if (fds and not sent) or len(self._unsent) > _MAX_UNSENT_NBYTES:
            _log.warning("the local pool server disconnected a client: it does not receive replies")
            self.close()
            return
        self._unsent += data[sent:]
        self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        with contextlib.suppress(BlockingIOError, InterruptedError):
            try:
                del self._unsent[: self._sock.send(self._unsent)]
            except ConnectionError:
                self.close()
                return
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _refuse(self, kind: str, reason: str) -> None:
        self._send(ErrorReply(kind, reason))
        self.close()


def _address(message: TouchBlocks | ReportCorrupt) -> tuple[bytes, list[bytes]]:
    if len(message.kv_namespace) != KEY_NBYTES or len(message.chain) % KEY_NBYTES:
        raise ProtocolError(f"a namespace of {len(message.kv_namespace)} bytes, keys of {len(message.chain)}")
    chain = [message.chain[i : i + KEY_NBYTES] for i in range(0, len(message.chain), KEY_NBYTES)]
    return message.kv_namespace, chain


_MAX_CLIENTS = 256
_COPY_THREADS = 2
_AGAIN_S = 1.0  # pause of accepting after an error, such as a lack of descriptors


async def start_local_pool_server(node: PoolNode) -> "LocalPoolServer | None":
    """Start the server of a started node, with a socket in the folder of its messenger's unix socket.

    Returns None if the messenger has no unix socket (tcp only). Raises AddressInUse or BindFailed.
    """
    shm_socket = node.messenger.endpoint.shm_socket
    if not shm_socket:
        return None
    index = await asyncio.to_thread(_ready_index, node.incarnation)
    server = LocalPoolServer(node, index, Path(shm_socket).parent)
    server.open()
    return server


class LocalPoolServer:
    """Server of one PoolNode for processes of its host, from `open` to `close`."""

    def __init__(self, node: PoolNode, index: SharedIndex, folder: Path) -> None:
        self.node = node
        self.index = index
        name = hashlib.blake2b(node.config.node_id.encode(), digest_size=8).hexdigest()
        self.path = folder / f"d-{name}.sock"
        self.threads = background_threads(_COPY_THREADS, "moonpool-local-put")
        self.helpers = copy_helpers("moonpool-local-put-helper", lower_priority)
        self.puts = PutHandler(node, MappedBytes.of(node.memory.array), self.threads, self.helpers)
        self.clients: set[ClientConnection] = set()
        self._landing = memoryview(bytearray(LANDING_NBYTES))
        self._identity: tuple[int, int] | None = None

    def open(self) -> None:
        """Listen, and keep the index up to date from now on. Raises AddressInUse or BindFailed."""
        unix_socket.claim_socket(self.path)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.setblocking(False)
            os.fchmod(self._listener.fileno(), 0o600)  # the socket in the file system gets the same mode
            self._listener.bind(os.fspath(self.path))
            self._listener.listen(64)
        except OSError as error:
            self._listener.close()
            raise BindFailed(f"cannot listen at {self.path}: {error}") from error
        self._identity = unix_socket.identity(self.path)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        self.node.index, self.node.local_socket = self.index, os.fspath(self.path)
        self.node.publish_changes()

    async def close(self) -> None:
        """Disconnect all clients, wait for their puts, and mark the index as closed, which readers see at once."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        if unix_socket.identity(self.path) == self._identity:
            self.path.unlink(missing_ok=True)
        clients = list(self.clients)
        for client in clients:
            client.close()
        await asyncio.gather(*(client.putting for client in clients if client.putting is not None))
        self.node.index, self.node.local_socket = None, ""
        self.index.close()
        await asyncio.to_thread(self.threads.shutdown)
        await asyncio.to_thread(self.helpers.stop)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EINTR, errno.ECONNABORTED):
                _log.warning("the local pool server could not accept a client: %s", error)
                self._pause()
            return
        try:
            unix_socket.require_own_user(sock)
        except PermissionError as error:
            _log.warning("the local pool server rejected a client: %s", error)
            sock.close()
            return
        if len(self.clients) >= _MAX_CLIENTS:
            _log.warning("the local pool server rejected a client: %d are connected", len(self.clients))
            sock.close()
            return
        self.clients.add(ClientConnection(sock, self.node, self.index, self.puts, self._landing, self.clients.discard))

    def _pause(self) -> None:
        """Stop accepting for a while: without free descriptors, waiting clients would wake the loop again at once."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener.fileno())
        loop.call_later(_AGAIN_S, self._resume)

    def _resume(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)


def _ready_index(incarnation: int) -> SharedIndex:
    """Return an empty index, after compiling the server's kernels (once per installation)."""
    warm_up()
    return SharedIndex(incarnation)
