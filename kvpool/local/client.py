"""Client of this host's shared-memory pool: gets, directly from the mapped arena without a message, and puts.

A get looks the blocks up in the shared index, copies them and computes their digests in one pass, and then checks that
the index entries have not changed. Entries that changed meanwhile, or that cannot be read consistently, count as
misses. Blocks whose digests differ are reported to the pool node and do not count as read. Uses are reported to the
pool node by touches, sent in batches.

Locks and lifetimes, for any number of threads:

    LocalPoolConnection._lock   one request and its reply on the socket at a time; `try_send` skips instead of waiting
    LocalPoolClient._moving     one thread maps a new index at a time; taken before `_lock`
    gets and matches            no lock: they read the index by its versions (`kvpool.local.index_layout`)
    large copies                shared with helper threads, which end by `close`; the caller waits for them
    touches, cached layouts     no lock: concurrent threads may lose a touch or compute a layout twice
    mapped arena and index      live as long as an array over them is referenced, even after `close`. Each call first
                                checks that the node is alive, so they are not read after its end was noticed
"""

import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpool import errors
from kvpool.address import KEY_NBYTES, check_chain
from kvpool.errors import AddressError, KvPoolError, LocalPoolUnavailable, SpecError
from kvpool.local import index_layout, index_reading
from kvpool.local.block_copy import MappedBytes, SpecLayout, copy_blocks, copy_helpers, digest_blocks, matches
from kvpool.local.index_reading import BlockReader, BlockTarget, MappedIndex, match_blocks
from kvpool.local.protocol import (
    MAX_BODY_NBYTES,
    Attach,
    Attached,
    ErrorReply,
    GetIndex,
    IndexReply,
    MemoryRegistered,
    Message,
    PutBlocks,
    PutReply,
    RegisterMemory,
    ReportCorrupt,
    TouchBlocks,
    UnregisterMemory,
    decode_body,
    decode_prefix,
    encode,
)
from kvpool.spec import KvGroup, KvSpec
from messenger import SharedMemory
from messenger.errors import ProtocolError
from messenger.frames import PREFIX
from messenger.memory import PeerMemory

_READ_NBYTES = 1 << 16
_WITH_DESCRIPTORS = (Attached, IndexReply)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)

Answer = TypeVar("Answer", bound=Message)


class LocalPoolConnection:
    """Connection to the pool node, which does not reconnect. Once it is lost, all calls but `alive` raise
    LocalPoolUnavailable.
    """

    def __init__(self, path: Path, *, owner: str, owner_incarnation: int, deadline_s: float) -> None:
        """Connect to the unix socket `path` and identify the owner. `deadline_s` bounds every reply.

        Raises LocalPoolUnavailable.
        """
        self.path = path
        self._lock = threading.Lock()
        self._fds: list[int] = []
        self._sock = socket.socket(socket.AF_UNIX)
        try:
            # The kernel's time limits: Python's cost one more system call per call.
            limit = struct.pack("@ll", int(deadline_s), int(deadline_s % 1 * 1e6))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._sock.connect(os.fspath(path))
        except OSError as error:
            self._sock.close()
            raise LocalPoolUnavailable(f"no pool node answers at {path}: {error}") from error
        try:
            welcome = self.request(Attach(owner, owner_incarnation), Attached)
            self.node_id, self.incarnation = welcome.node_id, welcome.incarnation
            self.arena = self._mapped(welcome.arena_nbytes)
            self.index = self._mapped(welcome.index_nbytes)
        except BaseException:
            self.close()
            raise

    def alive(self) -> bool:
        """Return True if the pool node has neither ended nor closed the connection, as far as the kernel knows."""
        try:
            return bool(self._sock.recv(1, _LOOK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def request(self, message: Message, answer_type: type[Answer], fd: int | None = None) -> Answer:
        """Send a request, with descriptor `fd` if given, and return its reply.

        Raises the KvPoolError that the node replied with, or LocalPoolUnavailable.
        """
        with self._lock:
            self._send(message, fd)
            answer = self._receive(answer_type in _WITH_DESCRIPTORS)
        if isinstance(answer, ErrorReply):
            raise _refusal(answer)
        if not isinstance(answer, answer_type):
            self.close()
            raise LocalPoolUnavailable(f"the pool node at {self.path} answered {type(answer).__name__}")
        return answer

    def send(self, message: Message) -> None:
        """Send a message that has no reply."""
        with self._lock:
            self._send(message, None)

    def try_send(self, message: Message) -> bool:
        """Send a message as `send`, unless another thread has a request in flight. Returns True if it was sent."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._send(message, None)
        finally:
            self._lock.release()
        return True

    def renew_index(self) -> PeerMemory:
        """Map and return the current index."""
        answer = self.request(GetIndex(), IndexReply)
        self.index = self._mapped(answer.nbytes)
        return self.index

    def close(self) -> None:
        """Disconnect. May be called twice."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _mapped(self, nbytes: int) -> PeerMemory:
        if not self._fds:
            self.close()
            raise LocalPoolUnavailable(f"the pool node at {self.path} sent no descriptor")
        try:
            return PeerMemory(self._fds.pop(0), nbytes)
        except ProtocolError as error:
            self.close()
            raise LocalPoolUnavailable(f"the pool node at {self.path} sent a bad descriptor: {error}") from error

    def _send(self, message: Message, fd: int | None) -> None:
        data = memoryview(encode(message))
        try:
            if fd is not None:
                data = data[socket.send_fds(self._sock, [data], [fd]) :]
            self._sock.sendall(data)
        except OSError as error:
            self._lost(error)

    def _receive(self, with_descriptors: bool) -> Message:
        """Receive the reply to the one request in flight."""
        try:
            data = self._at_least(PREFIX.size, b"", with_descriptors)
            kind, nbytes = decode_prefix(data[: PREFIX.size])
            data = self._at_least(PREFIX.size + nbytes, data, with_descriptors)
            return decode_body(kind, data[PREFIX.size :])
        except (OSError, ProtocolError) as error:
            self._lost(error)

    def _at_least(self, nbytes: int, data: bytes, with_descriptors: bool) -> bytes:
        while len(data) < nbytes:
            if with_descriptors:
                part, fds, _, _ = socket.recv_fds(self._sock, _READ_NBYTES, 4)
                self._fds += fds
            else:
                part = self._sock.recv(_READ_NBYTES)
            if not part:
                raise ConnectionResetError("it closed the connection")
            data += part
        return data

    def _lost(self, error: Exception) -> NoReturn:
        self.close()
        raise LocalPoolUnavailable(f"the pool node at {self.path} is gone: {error}") from error


def _refusal(answer: ErrorReply) -> KvPoolError:
    kind = getattr(errors, answer.kind, None)
    if isinstance(kind, type) and issubclass(kind, KvPoolError):
        return kind(answer.reason)
    return LocalPoolUnavailable(f"the pool node rejected the connection: {answer.reason}")


_TOUCHES, _TOUCHES_S = 256, 0.5  # most touches, and longest time, before they are sent to the pool node
_NO_PLAN = SpecLayout(KvSpec((KvGroup("full", 0, (0,), 1, 1, "float32"),), 1))
_PUT_ROOM_NBYTES = 4096  # of a PutBlocks frame, for all fields but those of the blocks
_MOVES = 16  # most replacements of the index during one call


@dataclass(frozen=True, eq=False)
class RegisteredBlocks:
    """Blocks in memory registered with the pool node, as the source of a put."""

    region_id: int  # from `LocalPoolClient.register_memory`
    offsets: NDArray[np.int64]  # [groups, n], in bytes from the start of the registered memory
    digests: NDArray[np.uint64] | None = None  # [n, layers of all groups]; None: computed by the pool node's copy


class LocalPoolClient:
    """Client of this host's pool node, for any number of threads. Raises LocalPoolUnavailable once the node is gone."""

    def __init__(self, local_socket: str, *, owner: str, owner_incarnation: int, deadline_s: float = 10) -> None:
        """Connect to a node's socket (`PoolDescription.local_socket`). `deadline_s` bounds every reply.

        Raises LocalPoolUnavailable.
        """
        index_reading.warm_up()
        self._connection = LocalPoolConnection(
            Path(local_socket), owner=owner, owner_incarnation=owner_incarnation, deadline_s=deadline_s
        )
        self.node_id, self.incarnation = self._connection.node_id, self._connection.incarnation
        self._arena = MappedBytes.of(self._connection.arena.array)
        self._index = self._attach()
        self._moving = threading.Lock()
        self._plans: dict[KvSpec, SpecLayout] = {}
        self._last_plan: tuple[KvSpec | None, SpecLayout] = None, _NO_PLAN
        self._helpers = copy_helpers("moonpool-local-get-helper")
        self._reader = BlockReader(self._arena, self._helpers)
        self._last = self._arena  # the caller's memory of the last call
        self._registered: dict[int, MappedBytes] = {}
        self._regions = 0
        self._touched: dict[bytes, list[bytes]] = {}
        self._num_touched, self._sent_s = 0, time.monotonic()
        self.corrupt_blocks = 0

    @property
    def alive(self) -> bool:
        return self._connection.alive()

    def close(self) -> None:
        """Send the last touches, if the node is alive, and disconnect."""
        try:
            self.send_touches()
        except LocalPoolUnavailable:
            pass
        self._connection.close()
        self._helpers.stop()

    def match(self, kv_namespace: bytes, chain: NDArray[np.uint8]) -> int:
        """Return the number of leading blocks of `chain` uint8 [n, 16] in the pool's DRAM."""
        name, keys = _words(kv_namespace, chain)
        for _ in range(_MOVES):
            self._check_alive()
            index = self._index
            count, why = match_blocks(index, name, keys)
            if why != index_layout.STALE:
                return count
            self._renew_index(index)
        raise LocalPoolUnavailable(f"the pool node's index was replaced {_MOVES} times during one call")

    def contains(self, kv_namespace: bytes, key: NDArray[np.uint8]) -> bool:
        """Return True if the block of chain key [16] is in the pool's DRAM."""
        return self.match(kv_namespace, key.reshape(1, KEY_NBYTES)) == 1

    def get(
        self,
        kv_namespace: bytes,
        spec: KvSpec,
        chain: NDArray[np.uint8],
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        *,
        verify: bool = True,
    ) -> int:
        """Copy leading blocks of `chain` [n, 16] to byte `offsets` [groups, n] of `memory` uint8 [nbytes].

        Returns the number of blocks copied and valid; the contents of later slots are undefined. Of a partial block,
        only its tokens are copied. Without `verify`, digests are not computed and whole slots are copied; then only the
        index proves that a block stayed in place meanwhile. Releases the GIL. Raises SpecError if a slot of `memory`
        is out of bounds.
        """
        layout, target = self._layout(spec), BlockTarget(self._mapped(memory), offsets)
        name, keys = _words(kv_namespace, chain)
        if offsets.shape != (spec.num_groups, len(keys)):
            raise SpecError(f"offsets of shape {offsets.shape}: expected [{spec.num_groups}, {len(keys)}]")
        done, why = 0, index_layout.FOUND
        for _ in range(_MOVES):
            self._check_alive()
            index = self._index
            done, why = self._reader.get(index, name, keys, layout, target, done, verify=verify)
            if why != index_layout.STALE:
                break
            self._renew_index(index)
        if why == index_layout.CORRUPT:
            self.report_corrupt(kv_namespace, chain[done : done + 1])
        self.touch(kv_namespace, chain[:done])
        return done

    def read_leased(
        self,
        spec: KvSpec,
        leased: NDArray[np.int64],
        digests: NDArray[np.uint64],
        memory: NDArray[np.uint8],
        offsets: NDArray[np.int64],
        num_tokens: NDArray[np.uint32] | None = None,
    ) -> NDArray[np.bool_]:
        """Copy leased blocks from byte offsets `leased` of the arena to `offsets` of `memory`, both int64 [groups, n].

        Returns bool [n], True if the copied bytes match the `digests` uint64 [n, layers of all groups]. Of each block,
        the first `num_tokens` [n] tokens are copied, all for 0 or None. Raises SpecError if a slot is out of bounds.
        """
        self._check_alive()
        lengths = np.zeros(len(digests), np.uint32) if num_tokens is None else num_tokens
        starts, targets = np.ascontiguousarray(leased), np.ascontiguousarray(offsets)
        layout, target = self._layout(spec), self._mapped(memory)
        copied = copy_blocks(self._arena, starts, target, targets, layout, lengths, self._helpers)
        return matches(copied, digests)

    def register_memory(self, memory: SharedMemory) -> int:
        """Register `memory` with the pool node, which maps it, as a source of puts. Returns its region id."""
        self._regions += 1
        region_id = self._regions
        self._connection.request(RegisterMemory(region_id, memory.nbytes), MemoryRegistered, memory.fd)
        self._registered[region_id] = MappedBytes.of(memory.array)
        return region_id

    def unregister_memory(self, region_id: int) -> None:
        """Unregister memory; the pool node unmaps it."""
        del self._registered[region_id]
        self._connection.send(UnregisterMemory(region_id))

    def digests(
        self, spec: KvSpec, region_id: int, offsets: NDArray[np.int64], num_tokens: NDArray[np.uint32] | None = None
    ) -> NDArray[np.uint64]:
        """Return the digests, uint64 [n, layers of all groups], of blocks at `offsets` int64 [groups, n] of registered
        memory, for `put`.
        """
        lengths = np.zeros(offsets.shape[1], np.uint32) if num_tokens is None else num_tokens
        return digest_blocks(self._registered[region_id], np.ascontiguousarray(offsets), self._layout(spec), lengths)

    def put(
        self,
        kv_namespace: bytes,
        spec: KvSpec,
        chain: NDArray[np.uint8],
        parents: NDArray[np.uint8],
        source: RegisteredBlocks,
        *,
        num_tokens: NDArray[np.uint32] | None = None,
        compute_s: float = 0.0,
    ) -> NDArray[np.uint8]:
        """Store the blocks `chain` [n, 16] of registered memory, in one round trip.

        `parents` [n, 16] are the keys of the blocks before. If `source` has digests, the pool node verifies them as it
        copies. `num_tokens` [n] is given if any block is partial (0: full). `compute_s` is the time that computing all
        blocks took, 0 = unknown. The memory may be reused when this returns. Returns a PutStatus per block, uint8 [n].
        Raises SpecMismatch, SpecError, PoolRefused, PutLost or LocalPoolUnavailable.
        """
        n, layout = len(check_chain(chain)), self._layout(spec)
        check_chain(parents)
        block_nbytes = 2 * KEY_NBYTES + 8 * (len(source.offsets) + layout.num_layers) + 4
        most = max(1, (MAX_BODY_NBYTES - len(layout.proto_bytes) - _PUT_ROOM_NBYTES) // block_nbytes)
        answers = []
        for at in range(0, n, most):
            part = slice(at, min(n, at + most))
            message = PutBlocks(
                kv_namespace,
                layout.proto_bytes,
                source.region_id,
                chain[part].tobytes(),
                parents[part].tobytes(),
                source.offsets[:, part].tobytes(),
                b"" if source.digests is None else source.digests[part].tobytes(),
                bytes(4 * (part.stop - at)) if num_tokens is None else num_tokens[part].astype(np.uint32).tobytes(),
                compute_s * (part.stop - at) / n,
            )
            answers.append(self._connection.request(message, PutReply).status)
        return np.frombuffer(b"".join(answers), np.uint8)

    def report_corrupt(self, kv_namespace: bytes, chain: NDArray[np.uint8]) -> None:
        """Report blocks [n, 16] whose bytes do not match their digests. The pool node removes them."""
        self.corrupt_blocks += len(chain)
        self._connection.send(ReportCorrupt(kv_namespace, chain.tobytes()))

    def send_touches(self) -> None:
        """Send the touches since the last call; they are dropped if another thread has a request in flight."""
        touched, self._touched = self._touched, {}
        self._num_touched, self._sent_s = 0, time.monotonic()
        for kv_namespace, keys in touched.items():
            self._connection.try_send(TouchBlocks(kv_namespace, b"".join(keys)))

    def touch(self, kv_namespace: bytes, chain: NDArray[np.uint8]) -> None:
        """Record a use of blocks [n, 16], to be reported with the next touches."""
        if not len(chain):
            return
        self._touched.setdefault(kv_namespace, []).append(chain.tobytes())
        self._num_touched += len(chain)
        if self._num_touched >= _TOUCHES or time.monotonic() - self._sent_s >= _TOUCHES_S:
            self.send_touches()

    def _check_alive(self) -> None:
        if not self._connection.alive():
            raise LocalPoolUnavailable(f"pool node {self.node_id!r} is gone; its memory must not be used any more")

    def _layout(self, spec: KvSpec) -> SpecLayout:
        asked, layout = self._last_plan
        if asked is not spec:
            layout = self._plans.setdefault(spec, SpecLayout(spec))
            self._last_plan = spec, layout
        return layout

    def _mapped(self, memory: NDArray[np.uint8]) -> MappedBytes:
        last = self._last
        if last.array is not memory:
            self._last = last = MappedBytes.of(memory)
            if not memory.flags.writeable:
                raise SpecError("the memory to copy blocks to is not writable")
        return last

    def _renew_index(self, old: MappedIndex) -> None:
        """Map the index that replaced `old`, unless another thread has already done so."""
        with self._moving:
            if self._index is old:
                if old.words[index_layout.AT_STATE] == index_layout.CLOSED:
                    raise LocalPoolUnavailable(f"pool node {self.node_id!r} has stopped")
                self._connection.renew_index()
                self._index = self._attach()

    def _attach(self) -> MappedIndex:
        words = self._connection.index.array.view(np.uint64)
        header = [int(word) for word in words[: index_layout.HEADER_WORDS]]
        buckets, entries = header[index_layout.AT_BUCKETS], header[index_layout.AT_ENTRIES]
        entry_words = header[index_layout.AT_ENTRY_WORDS]
        whole = len(words) == index_layout.index_words(buckets, entries, entry_words) and buckets & (buckets - 1) == 0
        known = (
            header[index_layout.AT_MAGIC] == index_layout.MAGIC
            and header[index_layout.AT_FORMAT] == index_layout.FORMAT
        )
        if not (known and whole) or header[index_layout.AT_INCARNATION] != self.incarnation:
            self._connection.close()
            raise LocalPoolUnavailable(
                f"pool node {self.node_id!r} has an index of another format: run one version of Moonpool everywhere"
            )
        return MappedIndex(words, np.array([buckets, entries, entry_words], np.int64))


def _words(kv_namespace: bytes, chain: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return a namespace as uint64 [2] and chain keys as uint64 [n, 2]. Raises AddressError."""
    if len(kv_namespace) != KEY_NBYTES:
        raise AddressError(f"a namespace of {len(kv_namespace)} bytes: expected {KEY_NBYTES}")
    chain = check_chain(chain)
    if not chain.flags.c_contiguous:
        chain = np.ascontiguousarray(chain)
    return np.frombuffer(kv_namespace, np.uint64), chain.view(np.uint64)
