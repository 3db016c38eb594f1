"""A snapshot of the directory as a file: written beside and renamed, checked as a whole before any of it is used.

Magic; then parts of [count uint32, keys uint64 [count], codes uint32 [count]], the last of count 0; then the length of
a JSON text (uint32) and the text, which says what the numbers in the codes stand for; then BLAKE2b-128 of all that.
"""

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np

from conductor.directory.directory import DumpedNode, Position
from conductor.directory.table import Replicas
from conductor.errors import SnapshotUnusable

__all__ = ["SnapshotFacts", "SnapshotReader", "SnapshotWriter", "remove_unfinished"]

_MAGIC = b"MOONDIR1"
_DIGEST_NBYTES = 16
_READ_NBYTES = 1 << 20
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class SnapshotFacts:
    """What a snapshot says beside blocks. `nodes`: as dumped; `targets`: where their events are to be had."""

    cluster: str
    written_at: float  # seconds since 1970
    nodes: tuple[DumpedNode, ...]
    targets: dict[str, str]


class SnapshotWriter:
    """Blocking; `add` parts, then `finish`. Whatever goes wrong, a former snapshot stays as it is."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path, self._beside = path, path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
        self._hash = hashlib.blake2b(digest_size=_DIGEST_NBYTES)
        self._file: BinaryIO = self._beside.open("wb")
        self._put(_MAGIC)

    def add(self, replicas: Replicas) -> None:
        """One part. Raises OSError."""
        if len(replicas.keys):
            self._put(_LENGTH.pack(len(replicas.keys)))
            self._put(replicas.keys.astype("<u8", copy=False).tobytes())
            self._put(replicas.codes.astype("<u4", copy=False).tobytes())

    def finish(self, facts: SnapshotFacts) -> int:
        """The snapshot is complete and takes the former one's place. Returns its bytes. Raises OSError."""
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
    """Remove what killed writers of `path` left. Who writes one right now fails, and may try again. Raises OSError."""
    for beside in path.parent.glob(f"{path.name}.*.new"):
        beside.unlink(missing_ok=True)


class SnapshotReader:
    """A snapshot, opened and checked as a whole; the file may be replaced meanwhile. Blocking; a context manager."""

    def __init__(self, path: Path) -> None:
        """Raises SnapshotUnusable, or OSError."""
        self._file = path.open("rb")
        try:
            self._check(path)
            self.facts = self._facts(path)
        except BaseException:
            self._file.close()
            raise

    def parts(self) -> Iterator[Replicas]:
        """What it holds. Raises OSError."""
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
            raise SnapshotUnusable(f"{path} is damaged or cut short: its checksum is another")
        self._file.seek(0)
        if (found := self._file.read(len(_MAGIC))) != _MAGIC:
            raise SnapshotUnusable(f"{path} is no snapshot of this version: it begins with {found!r}, not {_MAGIC!r}")

    def _facts(self, path: Path) -> SnapshotFacts:
        while (count := _length(self._file)) > 0:
            self._file.seek(12 * count, os.SEEK_CUR)
        try:
            fields = json.loads(self._file.read(_length(self._file)))
            nodes = (
                DumpedNode(node, number, generation, _position(position), right_at)
                for node, number, generation, position, right_at in fields["nodes"]
            )
            return SnapshotFacts(fields["cluster"], fields["written_at"], tuple(nodes), fields["targets"])
        except (ValueError, KeyError, TypeError) as error:
            raise SnapshotUnusable(f"{path} says nothing of its nodes that can be understood ({error!r})") from error


def _length(file: BinaryIO) -> int:
    (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
    return int(length)


def _position(pair: list[int]) -> Position:
    incarnation, seq = pair
    return Position(int(incarnation), int(seq))
