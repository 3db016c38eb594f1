"""The journal's format and its writer. `kvpool.ssd.recovery` reads it.

The journal is a file of whole pages of 4096 bytes. The first page holds the header: magic, version, length and checksum
at offsets that are the same in all versions, then the identity of the folder. Frames follow, each in its own pages:

    magic 8 | journal id 8 | sequence 8 | body length 4 | zero 4 | BLAKE3-128 of all that and the body 16 | body

A frame is one commit: offsets freed, then groups of blocks sealed, each with the specs that its blocks refer to by
index, so that a frame can be read without the others. A coded block has one more field than a plain one, its length. A
frame's pages are zeros before it is written and are never written again, so a torn frame damages no other. When the
file has grown too large, the remaining blocks are written to a new file, which replaces it by rename.
"""

import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import msgpack
from blake3 import blake3

from kvpool.spec import KvSpec
from kvpool.ssd.disk import Disk
from kvpool.ssd.records import PAGE_NBYTES, SsdConfig, SsdExtent

JOURNAL = "journal"
_NEW_JOURNAL = "journal.new"
VERSION, CODED_VERSION = 1, 2
"""Versions of the format. A folder has the second, which older releases reject, only if it may have coded blocks."""
HEADER_MAGIC, HEADER = b"MOONPSSD", struct.Struct("<8sII16s")
FRAME_MAGIC, FRAME = b"MOONPFRM", struct.Struct("<8sQQII16s")
_CHECKSUM_NBYTES = 16
_SNAPSHOT_BLOCKS = 1024  # per frame of a rewritten journal
_MAX_GROWTH_NBYTES = 1 << 20


@dataclass(frozen=True)
class JournalHeader:
    """Identity of a folder."""

    node_id: str
    cluster: str
    segment_nbytes: int

    def to_page(self, journal_id: int, version: int) -> bytes:
        body = msgpack.packb([journal_id, self.node_id, self.cluster, self.segment_nbytes])
        start = HEADER.pack(HEADER_MAGIC, version, len(body), b"")[:-_CHECKSUM_NBYTES]
        return _padded(start + checksum(start, body) + body)


def checksum(start: bytes, body: bytes) -> bytes:
    """Return the checksum (16 bytes) of a header or frame; `start` is everything before the checksum."""
    return blake3(start + body).digest(length=_CHECKSUM_NBYTES)


class JournalWriter:
    """Writer of one journal. Only one thread may use it at a time."""

    def __init__(self, disk: Disk, config: SsdConfig, header: JournalHeader, extents: Iterable[SsdExtent]) -> None:
        """Write a new durable journal with these blocks; `install` replaces the old one by it. Raises OSError."""
        self._disk, self._folder = disk, config.dir
        self._growth_nbytes = min(config.min_journal_nbytes, _MAX_GROWTH_NBYTES)
        # A unique id, so that frames of an older journal that reappear on the disk are not accepted.
        self._journal_id = secrets.randbits(63)
        self._sequence = 0
        self._nbytes_zeroed = 0
        self.nbytes = PAGE_NBYTES
        extents = list(extents)
        is_coded = config.coded or any(extent.entry.coded_nbytes for extent in extents)
        self._fd = disk.open(self._folder / _NEW_JOURNAL, create=True)
        try:
            disk.truncate(self._fd, 0)
            disk.write(self._fd, header.to_page(self._journal_id, CODED_VERSION if is_coded else VERSION), 0)
            remaining = iter(extents)
            while chunk := list(islice(remaining, _SNAPSHOT_BLOCKS)):
                self._write(self.frame([], [pack_blocks(chunk)]))
            self._grow(self.nbytes)
        except BaseException:
            disk.close(self._fd)
            raise

    def install(self) -> None:
        """Replace the old journal. After an OSError, a restart may find either of the two."""
        self._disk.rename(self._folder / _NEW_JOURNAL, self._folder / JOURNAL)
        self._disk.sync_dir(self._folder)

    def frame(self, freed: Sequence[int], sealed: Sequence[bytes]) -> bytes:
        """Return the next frame, for `reserve` and `append`; `sealed` consists of `pack_blocks` results."""
        body = msgpack.packb([list(freed), sealed])
        start = FRAME.pack(FRAME_MAGIC, self._journal_id, self._sequence, len(body), 0, b"")[:-_CHECKSUM_NBYTES]
        return _padded(start + checksum(start, body) + body)

    def reserve(self, nbytes: int) -> None:
        """Allocate space for a frame of `nbytes`. After an OSError, the journal is unchanged and stays usable."""
        if self.nbytes + nbytes > self._nbytes_zeroed:
            self._grow(self.nbytes + nbytes)

    def append(self, frame: bytes) -> None:
        """Append a frame durably. After an OSError, the contents are unknown and the journal must be rewritten."""
        self._write(frame)
        self._disk.sync(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)

    def _write(self, frame: bytes) -> None:
        self._disk.write(self._fd, frame, self.nbytes)
        self.nbytes += len(frame)
        self._sequence += 1

    def _grow(self, least_nbytes: int) -> None:
        # Writing into zeros that are already on the disk lets a commit sync without a change of the file's metadata.
        end = -(-least_nbytes // self._growth_nbytes) * self._growth_nbytes
        start = max(self.nbytes, self._nbytes_zeroed)
        self._disk.write(self._fd, bytes(end - start), start)
        self._disk.sync(self._fd)
        self._nbytes_zeroed = end


def pack_blocks(extents: Iterable[SsdExtent]) -> bytes:
    """Return a group of blocks, packed for `JournalWriter.frame`."""
    # Specs are distinguished by identity, which is fast; equal specs of different identity are written twice.
    numbers: dict[int, int] = {}
    specs: list[KvSpec] = []
    blocks: list[tuple[Any, ...]] = []
    for extent in extents:
        entry = extent.entry
        spec = entry.spec
        number = numbers.setdefault(id(spec), len(specs))
        if number == len(specs):
            specs.append(spec)
        blocks.append(
            (
                entry.offset,
                entry.kv_namespace,
                entry.chain_key,
                entry.parent,
                number,
                entry.num_tokens,
                entry.digests,
                entry.compute_s,
                extent.checksum,
                *((entry.coded_nbytes,) if entry.coded_nbytes else ()),
            )
        )
    packed: bytes = msgpack.packb([[spec.to_json() for spec in specs], blocks])
    return packed


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % PAGE_NBYTES)
