"""Directory snapshots: written in the background, restored at startup. Without one, pool nodes send all their contents.

A new file is written beside the old one and renamed; it is verified completely before use. Format: magic; then parts of
[count uint32, keys uint64 [count], codes uint32 [count]], the last with count 0; then the length of a JSON text
(uint32) and the text, which maps the numbers in the codes to nodes; then BLAKE2b-128 of everything before.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from conductor.directory import Directory
from conductor.directory.directory import DumpedNode, Position
from conductor.directory.table import Replicas
from conductor.errors import SnapshotUnusable
from conductor.shared_store.redis_store import SnapshotPointer
from rpc.private_folder import open_trusted

_MAGIC = b"MOONDIR1"
_DIGEST_NBYTES = 16
_READ_NBYTES = 1 << 20
_MAX_NODE_NUMBER = 1 << 20  # numbers of nodes that left are used again
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class SnapshotFacts:
    """Metadata of a snapshot. `nodes`: as dumped; `targets`: addresses of their event streams."""

    cluster: str
    written_at: float  # seconds since 1970
    nodes: tuple[DumpedNode, ...]
    targets: dict[str, str]


class SnapshotWriter:
    """Blocking writer: `add` parts, then `finish`. After a failure, the former snapshot is intact."""

    def __init__(self, path: Path) -> None:
        """Create a temporary file beside `path`. Raises OSError."""
        self._path, self._beside = path, path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        self._hash = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        self._file: BinaryIO = self._beside.open("wb")
        self._put(_MAGIC)

    def add(self, replicas: Replicas) -> None:
        """Write one part. Raises OSError."""
        if len(replicas.keys):
            self._put(_LENGTH.pack(len(replicas.keys)))
            self._put(replicas.keys.astype("<u8", copy=False).tobytes())
            self._put(replicas.codes.astype("<u4", copy=False).tobytes())

    def finish(self, facts: SnapshotFacts) -> int:
        """Complete the snapshot and replace the former one. Returns its size in bytes. Raises OSError."""
        text = json.dumps(asdict(facts) | {"nodes": [list(node) for node in facts.nodes]}).encode()
        self._put(_LENGTH.pack(0) + _LENGTH.pack(len(text)) + text)
        self._file.write(self._hash.digest())
        self._file.flush()
        os.fsync(self._file.fileno())
        nbytes = self._file.tell()
        self._file.close()
        self._beside.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._beside.unlink(missing_ok=True)

    def _put(self, piece: bytes) -> None:
        self._hash.update(piece)
        self._file.write(piece)


def remove_unfinished(path: Path) -> None:
    """Remove temporary files of killed writers of `path`; a concurrent writer fails and may retry. Raises OSError."""
    for beside in path.parent.glob(f"{path.name}.*.new"):
        beside.unlink(missing_ok=True)


class SnapshotReader:
    """Blocking reader of a verified snapshot, as a context manager; the file may be replaced meanwhile."""

    def __init__(self, path: Path) -> None:
        """Open and verify the file. Raises SnapshotUnusable, or OSError."""
        self._file = path.open("rb")
        try:
            self._check(path)
            self.facts = self._facts(path)
        except BaseException:
            self._file.close()
            raise

    def parts(self) -> Iterator[Replicas]:
        """Yield the parts. Raises OSError."""
        self._file.seek(len(_MAGIC))
        while (count := _length(self._file)) > 0:
            keys = np.frombuffer(self._file.read(8 * count), "<u8")
            yield Replicas(keys, np.frombuffer(self._file.read(4 * count), "<u4"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _check(self, path: Path) -> None:
        left = os.fstat(self._file.fileno()).st_size - _DIGEST_NBYTES
        digest = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        while left > 0 and (piece := self._file.read(min(left, _READ_NBYTES))):
            digest.update(piece)
            left -= len(piece)
        if left or self._file.read() != digest.digest():
            raise SnapshotUnusable(f"{path} is damaged or truncated: its checksum differs")
        self._file.seek(0)
        if (found := self._file.read(len(_MAGIC))) != _MAGIC:
            raise SnapshotUnusable(
                f"{path} is not a snapshot of this version: it starts with {found!r}, not {_MAGIC!r}"
            )

    def _facts(self, path: Path) -> SnapshotFacts:
        try:
            while (count := _length(self._file)) > 0:
                self._file.seek(12 * count, os.SEEK_CUR)
            fields = json.loads(self._file.read(_length(self._file)))
            return _checked_facts(fields)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
            raise SnapshotUnusable(f"{path} has invalid metadata ({error!r})") from error


def _length(file: BinaryIO) -> int:
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    return int(length)


def _checked_facts(fields: Any) -> SnapshotFacts:
    """Return the metadata. Raises ValueError, TypeError or KeyError if a field has another type or range."""
    nodes = tuple(_dumped_node(*row) for row in fields["nodes"])
    targets = dict(fields["targets"])
    if not isinstance(fields["cluster"], str) or not math.isfinite(fields["written_at"]):
        raise ValueError("cluster must be a text, and written_at a finite number")
    if not all(isinstance(text, str) for pair in targets.items() for text in pair):
        raise TypeError("targets must be texts by node")
    for what, values in (("node", [each.node for each in nodes]), ("number", [each.number for each in nodes])):
        if len(set(values)) < len(values):
            raise ValueError(f"a {what} occurs twice")
    return SnapshotFacts(fields["cluster"], float(fields["written_at"]), nodes, targets)


def _dumped_node(node: str, number: int, generation: int, position: Sequence[int], right_at: int) -> DumpedNode:
    incarnation, seq = position
    if not isinstance(node, str):
        raise TypeError(f"a node's id must be a text, got {type(node).__name__}")
    for value in (number, generation, incarnation, seq, right_at):
        if type(value) is not int or not 0 <= value < 1 << 64:
            raise ValueError(f"node {node[:80]!r} has numbers of another type or range")
    if number > _MAX_NODE_NUMBER:
        raise ValueError(f"node {node[:80]!r} has the number {number}, expected at most {_MAX_NODE_NUMBER}")
    return DumpedNode(node, number, generation, Position(incarnation, seq), right_at)


log = logging.getLogger(__name__)
FILE_NAME = "directory.snapshot"


class Snapshots:
    """Snapshots of one conductor's directory, in the file `directory.snapshot` of a folder."""

    def __init__(self, folder: Path, cluster_name: str, directory: Directory) -> None:
        """Create the folder. Raises OSError if it cannot be created or written."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(open_trusted(folder))
        self.path = folder.resolve() / FILE_NAME
        remove_unfinished(self.path)
        self._cluster_name = cluster_name
        self._directory = directory
        self._last: Sequence[DumpedNode] = ()  # nodes of the last snapshot

    async def restore(self, elsewhere: Sequence[SnapshotPointer]) -> dict[str, str]:
        """Restore the newest readable snapshot: the local file, or one that another conductor wrote.

        Returns the targets of its nodes. The directory must not follow any node yet.
        """
        ways = [Path(pointer.path) for pointer in sorted(elsewhere, key=lambda pointer: -pointer.written_at)]
        with contextlib.ExitStack() as opened:
            readers = []
            for path in dict.fromkeys([self.path, *ways]):
                try:
                    readers.append(opened.enter_context(await asyncio.to_thread(self._open, path)))
                except FileNotFoundError:
                    continue
                except (SnapshotUnusable, OSError) as error:
                    log.warning("a snapshot of the directory is ignored: %s", error)
            if not readers:
                return {}
            newest = max(readers, key=lambda reader: reader.facts.written_at)
            return await self._load(newest)

    async def write(self, targets: Callable[[], dict[str, str]]) -> SnapshotPointer | None:
        """Write a snapshot of the directory while events are applied; return None if nothing has changed since."""
        dumped = self._directory.begin_dump()
        if not dumped or dumped == self._last:
            return None
        began_s = time.monotonic()
        with await asyncio.to_thread(SnapshotWriter, self.path) as writer:
            for replicas in self._directory.dump(frozenset(node.number for node in dumped)):
                await asyncio.to_thread(writer.add, replicas)
            complete = self._directory.end_dump(dumped)
            facts = SnapshotFacts(self._cluster_name, time.time(), tuple(complete), targets())
            nbytes = await asyncio.to_thread(writer.finish, facts)
        self._last = dumped
        seconds = time.monotonic() - began_s
        log.info("wrote a snapshot of the directory: %d nodes, %d bytes in %.1f s", len(complete), nbytes, seconds)
        positions = {node.node: (node.position.incarnation, node.position.seq) for node in complete}
        return SnapshotPointer(str(self.path), socket.gethostname(), facts.written_at, positions)

    def _open(self, path: Path) -> SnapshotReader:
        reader = SnapshotReader(path)
        if reader.facts.cluster != self._cluster_name:
            with reader:
                raise SnapshotUnusable(
                    f"{path} belongs to the cluster {reader.facts.cluster!r}, not {self._cluster_name!r}"
                )
        return reader

    async def _load(self, reader: SnapshotReader) -> dict[str, str]:
        facts = reader.facts
        nodes = [node for node in facts.nodes if node.node in facts.targets]
        numbers = np.zeros(1 + max((node.number for node in facts.nodes), default=0), np.int64)
        num_blocks, is_complete = 0, False
        try:
            for node in nodes:
                numbers[node.number] = self._directory.restore_node(node)
            parts = reader.parts()
            while (replicas := await asyncio.to_thread(next, parts, None)) is not None:
                self._directory.restore(_renumbered(replicas, numbers))
                num_blocks += len(replicas.keys)
            is_complete = True
        except OSError as error:
            log.warning("the snapshot of the directory could not be read completely: %s", error)
        finally:
            if not is_complete:
                for node in nodes:
                    self._directory.drop_node(node.node)
        if not is_complete:
            return {}
        age_s = time.time() - facts.written_at
        text = "loaded a directory snapshot from %.0f s ago: %d blocks on %d nodes; reading later events"
        log.info(text, age_s, num_blocks, len(nodes))
        return {node.node: facts.targets[node.node] for node in nodes}


def _renumbered(replicas: Replicas, numbers: np.typing.NDArray[np.int64]) -> Replicas:
    """Return the replicas with this directory's numbers, without nodes that are missing in the metadata."""
    old = (replicas.codes >> 1).astype(np.int64)
    new = np.where(old < len(numbers), numbers[np.minimum(old, len(numbers) - 1)], 0)
    kept = new > 0
    codes = (new[kept] * 2 + (replicas.codes[kept] & 1)).astype(np.uint32)
    return Replicas(np.ascontiguousarray(replicas.keys[kept], np.uint64), codes)
