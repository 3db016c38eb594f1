"""Targets: what a pool node reads. Its journal, its folder on the SSD, and frames of its local clients."""

import asyncio
import functools
import random
import socket
import struct
import tempfile
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import msgpack
import numpy as np

from kvpool import KvGroup, KvSpec, PoolNodeConfig, node_metrics
from kvpool.block_coding import decode_block, encode_block
from kvpool.errors import CodedBlockInvalid, KvPoolError, SsdError, SsdFolderError
from kvpool.local.protocol import Attach, GetIndex, PutBlocks, RegisterMemory, ReportCorrupt, TouchBlocks, encode
from kvpool.local.server import LocalPoolServer, start_local_pool_server
from kvpool.node import PoolNode
from kvpool.ssd import SsdConfig, SsdEntry, SsdRead, SsdStore, SsdWrite
from kvpool.ssd.disk import Disk
from kvpool.ssd.journal import FRAME, FRAME_MAGIC, HEADER, HEADER_MAGIC, JOURNAL, checksum
from kvpool.ssd.records import PAGE_NBYTES
from kvpool.ssd.recovery import recover
from messenger import MessengerConfig, SharedMemory
from settings.keys import assemble
from tools.fuzz import mutation
from tools.fuzz.target import FuzzTarget, Misjudged, scratch_folder
from tools.fuzz.targets.messenger import mutate_frames

_NAMESPACE = b"namespace".ljust(16, b"\0")
_SPEC = KvSpec((KvGroup("full", 0, (0,), 1, 256, "uint8"), KvGroup("window", 8, (1,), 1, 128, "uint8")), 4)
_OTHER_SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 1024, "uint8"),), 4)
_SPACE_NBYTES, _SEGMENT_NBYTES = 48 * PAGE_NBYTES, 16 * PAGE_NBYTES
_NUM_BLOCKS = 12


class UnsyncedDisk(Disk):
    """Disk without syncs: no case loses power."""

    def sync(self, fd: int) -> None:
        """Do nothing."""

    def sync_dir(self, path: Path) -> None:
        """Do nothing."""


class StoreTarget(FuzzTarget):
    """Base of targets with a store's folder, written once and copied for each case."""

    def open(self) -> None:
        """Write a folder with blocks in several commits, some of them freed."""
        self._folder = scratch_folder()
        self._patch = mock.patch("kvpool.ssd.folder.IN_MEMORY", ())  # damage does not depend on the device
        self._patch.start()
        self.original, self.path = Path(self._folder.name) / "original", Path(self._folder.name) / "case"
        self.original.mkdir()
        store = SsdStore.open(self.config(self.original), UnsyncedDisk())
        for number in range(_NUM_BLOCKS):
            if any(store.write([SsdWrite(entry_of(number), stored_of(number))])):
                raise RuntimeError("a block of the seed cannot be written")
            if number % 4 == 3:
                store.free([entry_of(number - 2).offset])
        store.close()

    def config(self, folder: Path) -> SsdConfig:
        """Return the store's configuration."""
        depths = {"read_depth": 1, "write_depth": 1}
        return SsdConfig(
            folder, _SPACE_NBYTES, "pool", "c", _SEGMENT_NBYTES, min_journal_nbytes=1 << 16, coded=True, **depths
        )

    def close(self) -> None:
        """Remove the folders."""
        self._patch.stop()
        self._folder.cleanup()


def entry_of(number: int) -> SsdEntry:
    """Return the block's entry; blocks lie one after the other. Some are coded."""
    spec = _spec_of(number)
    digests = tuple(bytes([number]) * (8 * spec.num_layers(g)) for g in range(spec.num_groups))
    key, parent = number.to_bytes(16, "big"), max(0, number - 1).to_bytes(16, "big")
    coded_nbytes = len(_coded_of(number)) if _is_coded(number) else 0
    start = number * 4 * PAGE_NBYTES
    return SsdEntry(start, _NAMESPACE, key, parent, spec, number % 3, digests, number / 4, coded_nbytes)


def data_of(number: int) -> list[Any]:
    """Return the block's bytes."""
    rng, spec = np.random.default_rng(number), _spec_of(number)
    values = 16 if _is_coded(number) else 256
    return [rng.integers(0, values, spec.slot_nbytes(g), dtype=np.uint8) for g in range(spec.num_groups)]


def stored_of(number: int) -> list[Any]:
    """Return the bytes that are stored for the block."""
    if not _is_coded(number):
        return data_of(number)
    padded = np.zeros(entry_of(number).nbytes, np.uint8)
    padded[: len(_coded_of(number))] = np.frombuffer(_coded_of(number), np.uint8)
    return [padded]


def _spec_of(number: int) -> KvSpec:
    return _OTHER_SPEC if number % 3 == 2 else _SPEC


def _is_coded(number: int) -> bool:
    return number % 6 == 5


@functools.cache
def _coded_of(number: int) -> bytes:
    coded = encode_block(data_of(number), _spec_of(number))
    if coded is None:
        raise RuntimeError("a block of the seed cannot be coded")
    return coded


class SsdJournal(StoreTarget):
    """The journal's bytes; damaged bodies usually have right checksums."""

    name = "ssd-journal"
    covers: tuple[str, ...] = ("kvpool/ssd/recovery.py", "kvpool/spec.py")
    allowed: tuple[type[BaseException], ...] = (KvPoolError,)
    tokens: tuple[bytes, ...] = (
        FRAME_MAGIC,
        HEADER_MAGIC,
        bytes(PAGE_NBYTES),
        bytes(16),
        b"\xc0",
        b"\xdd\xff\xff\xff\xff",
        b"\x90",
    )

    def seeds(self) -> Sequence[bytes]:
        whole = (self.original / JOURNAL).read_bytes().rstrip(b"\0")
        return [whole + bytes(-len(whole) % PAGE_NBYTES)]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate a header or frame as msgpack, the order of pages, or bytes."""
        pages = [case[at : at + PAGE_NBYTES] for at in range(0, len(case), PAGE_NBYTES)]
        action = rng.random()
        if not pages or action < 0.2:
            return mutation.mutate_bytes(rng, case, other, self.tokens)
        at = rng.randrange(len(pages))
        if action < 0.3:
            rng.choice((pages.reverse, lambda: pages.insert(at, pages[-1]), lambda: pages.pop(at)))()
        else:
            pages[at] = _changed_page(rng, pages[at])
        return b"".join(pages)[: mutation.MAX_CASE_NBYTES]

    def run(self, case: bytes) -> None:
        """Recover the journal. Blocks must be disjoint, of their specs' sizes, and aligned."""
        self.path.mkdir(exist_ok=True)
        (self.path / JOURNAL).write_bytes(case)
        found = recover(self.config(self.path), UnsyncedDisk())
        end = 0
        for extent in sorted(found.extents, key=lambda each: each.start):
            if extent.start < end or extent.start % PAGE_NBYTES or extent.end - extent.start != extent.entry.nbytes:
                raise Misjudged("extents overlap, are not aligned, or have another size than their blocks")
            end = extent.end
            _check_entry(extent.entry)
        for aside in self.path.glob(f"{JOURNAL}-unreadable.*"):
            aside.unlink()


def _check_entry(entry: SsdEntry) -> None:
    keys = (entry.kv_namespace, entry.chain_key, entry.parent)
    if not all(isinstance(key, bytes) and len(key) == 16 for key in keys):
        raise Misjudged("a key that has not 16 bytes")
    if type(entry.num_tokens) is not int or not 0 <= entry.num_tokens < entry.spec.block_tokens:
        raise Misjudged("a block with an impossible number of tokens")
    sizes = [len(each) if isinstance(each, bytes) else -1 for each in entry.digests]
    if sizes != [8 * entry.spec.num_layers(g) for g in range(entry.spec.num_groups)]:
        raise Misjudged("digests that do not fit the block's layers")
    if not isinstance(entry.compute_s, float | int) or not 0 <= entry.compute_s < float("inf"):
        raise Misjudged("a block with an impossible time")


def _changed_page(rng: random.Random, page: bytes) -> bytes:
    """Return the page with its msgpack body changed and, mostly, its checksum right."""
    is_header = page.startswith(HEADER_MAGIC)
    layout = HEADER if is_header else FRAME
    if len(page) < layout.size:
        return mutation.mutate_bytes(rng, page, page)
    fields = list(layout.unpack_from(page))
    place = 2 if is_header else 3
    body = page[layout.size : layout.size + fields[place]]
    try:
        value = msgpack.unpackb(body, strict_map_key=False)
        if not is_header and rng.random() < 0.8 and value[1]:
            group = rng.randrange(len(value[1]))
            blocks = mutation.mutate_value(
                rng, msgpack.unpackb(value[1][group], strict_map_key=False), None, _JOURNAL_WORDS
            )
            value[1][group] = msgpack.packb(blocks, unicode_errors="surrogatepass")
        else:
            value = mutation.mutate_value(rng, value, None, _JOURNAL_WORDS)
        body = msgpack.packb(value, unicode_errors="surrogatepass")
    except (ValueError, TypeError, OverflowError, IndexError, KeyError, msgpack.UnpackException):
        body = mutation.mutate_bytes(rng, body, body)
    fields[place] = len(body)
    if rng.random() < 0.05:
        fields[1 if is_header else 2] = rng.choice(mutation.INTEGERS) % (1 << 32)
    start = layout.pack(*fields)[:-16]
    whole = start + (checksum(start, body) if rng.random() < 0.97 else bytes(16)) + body
    return whole + bytes(-len(whole) % PAGE_NBYTES)


_JOURNAL_WORDS = (b"", bytes(16), bytes(15), 4096, 4095, _SPACE_NBYTES, "full", "uint8", "layers", 0, 1)


class DamagedSsdFolder(StoreTarget):
    """A whole folder with damage: a msgpack list of [file, action, offset, bytes]."""

    name = "ssd-folder"
    covers: tuple[str, ...] = (
        "kvpool/ssd/recovery.py",
        "kvpool/ssd/store.py",
        "kvpool/ssd/folder.py",
        "kvpool/ssd/group_commit.py",
    )
    allowed: tuple[type[BaseException], ...] = (SsdFolderError,)

    def seeds(self) -> Sequence[bytes]:
        return [
            msgpack.packb([]),
            msgpack.packb([["segment-00001", "put", 5000, b"damage"]]),
            msgpack.packb([[JOURNAL, "cut", 9000, b""]]),
        ]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Add damage, or remove some."""
        edits = [*msgpack.unpackb(case)]
        if edits and rng.random() < 0.3:
            del edits[rng.randrange(len(edits))]
        for _ in range(rng.choice((1, 1, 2, 4))):
            name = rng.choice((JOURNAL, JOURNAL, "segment-00000", "segment-00001", "segment-00002"))
            size = (self.original / name).stat().st_size
            at = rng.choice((rng.randrange(size), rng.randrange(0, size, PAGE_NBYTES), rng.randrange(min(size, 16384))))
            action = rng.choice(("put", "put", "flip", "flip", "zero", "cut", "swap", "remove", "grow", "old"))
            edits.append([name, action, at, rng.randbytes(rng.choice((1, 2, 8, 512)))])
        packed: bytes = msgpack.packb(edits[-8:])
        return packed

    def run(self, case: bytes) -> None:
        """Open the damaged store, read all blocks, use it, and sometimes open it again."""
        self._restore()
        for name, action, at, data in msgpack.unpackb(case):
            _damage(self.path / name, action, at, data)
        for _ in range(2 if zlib.crc32(case) % 4 == 0 else 1):
            store = SsdStore.open(self.config(self.path), UnsyncedDisk())
            try:
                kept = self._read_all(store)
                self._write_again(store, kept)
            finally:
                if not store.close():
                    raise Misjudged("the store does not close")

    def _restore(self) -> None:
        """Give the folder its original contents, in place: removing files takes most file systems long."""
        self.path.mkdir(exist_ok=True)
        originals = {path.name: path for path in self.original.iterdir()}
        for path in self.path.iterdir():
            if path.name not in originals:
                path.unlink()
        for name, original in originals.items():
            (self.path / name).write_bytes(original.read_bytes())

    def _read_all(self, store: SsdStore) -> set[int]:
        kept = set()
        for entry in store.recovered:
            number = int.from_bytes(entry.chain_key, "big")
            if entry != entry_of(number):
                raise Misjudged("a recovered block is not one that was written")
            targets = [np.zeros(len(each), np.uint8) for each in stored_of(number)]
            (error,) = store.read([SsdRead(entry.offset, entry.kv_namespace, entry.chain_key, targets)])
            if error is None and not all(map(np.array_equal, targets, stored_of(number))):
                raise Misjudged("wrong bytes were served")
            if error is not None and not isinstance(error, SsdError):
                raise error
            kept.add(number)
        return kept

    def _write_again(self, store: SsdStore, kept: set[int]) -> None:
        missing = next((number for number in range(_NUM_BLOCKS) if number not in kept), None)
        if missing is not None:
            (error,) = store.write([SsdWrite(entry_of(missing), stored_of(missing))])
            if error is not None:
                raise Misjudged(f"a store that opened does not take a block: {error!r}")
        elif kept:
            store.free([entry_of(min(kept)).offset])


def _damage(path: Path, action: str, at: int, data: bytes) -> None:
    if action == "remove":
        path.unlink(missing_ok=True)
    if not path.exists():
        return
    with path.open("r+b") as file:
        whole = bytearray(file.read())
        if action == "put":
            whole[at : at + len(data)] = data
        elif action == "flip" and at < len(whole):
            whole[at] ^= data[0] or 1
        elif action == "zero":
            whole[at : at + PAGE_NBYTES] = bytes(PAGE_NBYTES)
        elif action == "cut":
            del whole[at:]
        elif action == "grow":
            whole += data
        elif action == "swap":
            first = at // PAGE_NBYTES * PAGE_NBYTES
            pages = whole[first : first + PAGE_NBYTES], whole[first + PAGE_NBYTES : first + 2 * PAGE_NBYTES]
            whole[first : first + 2 * PAGE_NBYTES] = pages[1] + pages[0]
        elif action == "old":  # a page as it was before: zeros, or the one before it
            first = at // PAGE_NBYTES * PAGE_NBYTES
            whole[first : first + PAGE_NBYTES] = whole[max(0, first - PAGE_NBYTES) : first] or bytes(PAGE_NBYTES)
        file.seek(0)
        file.truncate()
        file.write(whole)


class CodedBlocks(FuzzTarget):
    """Coded blocks, as read from an SSD."""

    name = "coded-block"
    covers: tuple[str, ...] = ("kvpool/block_coding.py",)
    allowed: tuple[type[BaseException], ...] = (CodedBlockInvalid,)
    tokens: tuple[bytes, ...] = (b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18", struct.pack("<I", 1 << 31), bytes(16))
    max_growth_nbytes = 64 << 20

    _spec = KvSpec(
        (KvGroup("full", 0, (0,), 2, 32, "bfloat16"), KvGroup("window", 8, (1,), 1, 32, "int8", scale_group=16)), 8
    )
    _guard = 64

    def seeds(self) -> Sequence[bytes]:
        rng = np.random.default_rng(0)
        sizes = [self._spec.slot_nbytes(g) for g in range(2)]
        coded = [
            encode_block([rng.integers(0, values, size, dtype=np.uint8) for size in sizes], self._spec)
            for values in (2, 16, 128)
        ]
        return [each for each in coded if each is not None]

    def run(self, case: bytes) -> None:
        """Decode the case between bytes that must not change. What is accepted must be encoded and decoded again."""
        sizes = [self._spec.slot_nbytes(g) for g in range(2)]
        memory = np.full(sum(sizes) + 3 * self._guard, 7, np.uint8)
        slots = [memory[self._guard :][: sizes[0]], memory[2 * self._guard + sizes[0] :][: sizes[1]]]
        try:
            decode_block(np.frombuffer(case, np.uint8), slots, self._spec)
        finally:
            ends = (0, self._guard + sizes[0], 2 * self._guard + sum(sizes))
            if any((memory[at : at + self._guard] != 7).any() for at in ends):
                raise Misjudged("bytes outside of the block's slots changed")
        coded = encode_block(slots, self._spec)
        if coded is not None:
            again = [np.zeros(size, np.uint8) for size in sizes]
            decode_block(np.frombuffer(coded, np.uint8), again, self._spec)
            if not all(map(np.array_equal, again, slots)):
                raise Misjudged("a block is another one after encoding and decoding it again")


class LocalPool(FuzzTarget):
    """Frames of a client on the host of a pool node, after Attach and the registration of its memory."""

    name = "pool-local"
    covers: tuple[str, ...] = ("kvpool/local/server.py", "kvpool/local/protocol.py", "kvpool/local/block_copy.py")
    tokens: tuple[bytes, ...] = (
        b"MPDR",
        bytes(16),
        struct.pack("<q", -1),
        struct.pack("<q", 1 << 62),
        b"\xc0",
        b"\xdd\xff\xff\xff\xff",
    )
    _check_one_in = 50

    def open(self) -> None:
        """Start a pool node with its local server."""
        self._folder = tempfile.TemporaryDirectory(prefix="mpf-")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._unhandled)
        self._unhandled_error: BaseException | None = None
        self._cases = 0
        self._memory = SharedMemory.create(1 << 16, "client")
        self._loop.run_until_complete(self._start())

    async def _start(self) -> None:
        folder = Path(self._folder.name)
        config = assemble(
            PoolNodeConfig,
            node_id="pool",
            listen=f"unix:{folder}/pool.sock",
            pool_bytes=1 << 18,
            messenger=assemble(MessengerConfig, shm_dir=folder),
        )
        self._node = PoolNode(config, 7)
        await self._node.start()
        server = await start_local_pool_server(self._node)
        if server is None:
            raise RuntimeError("the pool node has no unix socket")
        self._server: LocalPoolServer = server

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._unhandled_error = context.get("exception") or Misjudged(str(context.get("message")))

    def seeds(self) -> Sequence[bytes]:
        spec = _SPEC.to_proto().SerializeToString()
        offsets = np.array([[0, 2048], [8192, 10240]], np.int64).tobytes()
        chain, parents = bytes(range(32)), bytes(16) + bytes(range(16))
        tokens = np.zeros(2, np.uint32).tobytes()
        put = PutBlocks(_NAMESPACE, spec, 1, chain, parents, offsets, b"", tokens, 0.25)
        digests = put._replace(digests=np.zeros((2, 2), np.uint64).tobytes(), chain=bytes(range(32, 64)))
        partial = put._replace(num_tokens=np.array([3, 0], np.uint32).tobytes(), chain=bytes(range(64, 96)))
        messages: list[Any] = [
            put, digests, partial, TouchBlocks(_NAMESPACE, chain), ReportCorrupt(_NAMESPACE, chain), GetIndex(),
        ]  # fmt: skip
        return [*(encode(one) for one in messages), b"".join(map(encode, messages))]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the frames."""
        return mutate_frames(rng, case, other, self.tokens)

    def run(self, case: bytes) -> None:
        """Send the case as a client; regularly require that the node is consistent."""
        self._unhandled_error = None
        self._cases += 1
        self._loop.run_until_complete(self._client(case))
        if self._unhandled_error is not None:
            raise self._unhandled_error
        if self._cases % self._check_one_in == 0:
            report = node_metrics.validate(self._node)
            if not report["ok"]:
                raise Misjudged(f"the node is inconsistent: {report['problems'][0]}")

    async def _client(self, case: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, str(self._server.path))
            await _until(lambda: bool(self._server.clients))
            sock.send(encode(Attach("w", 1)))
            socket.send_fds(sock, [encode(RegisterMemory(1, self._memory.nbytes))], [self._memory.fd])
            left = memoryview(case)
            with suppress(ConnectionError):
                while left and self._server.clients:
                    with suppress(BlockingIOError):
                        left = left[sock.send(left) :]
                    await self._pump(sock)
                await self._pump(sock)
        await _until(lambda: not self._server.clients and not any(one.putting for one in self._server.clients))

    async def _pump(self, sock: socket.socket) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
            with suppress(BlockingIOError, ConnectionError):
                sock.recv(1 << 20)
        while any(client.putting is not None for client in self._server.clients):
            await asyncio.sleep(0.0005)

    def close(self) -> None:
        """Stop the node."""

        async def stop() -> None:
            await self._server.close()
            await self._node.close()

        self._loop.run_until_complete(stop())
        self._loop.close()
        self._memory.close()
        self._folder.cleanup()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)
