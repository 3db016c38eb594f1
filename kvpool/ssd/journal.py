"""The journal's format and its writer. Reading one back is `kvpool.ssd.recovery`.

A file of whole pages of 4096 bytes. The first holds the header: magic, version, length and checksum in places that no
version moves, then what folder this is. After it come frames, each on pages of its own:

    magic 8 | journal id 8 | sequence 8 | body length 4 | zero 4 | BLAKE3-128 of all that and the body 16 | body

A frame is one commit: offsets freed, then groups of blocks sealed, each with the specs that its blocks name by index,
so that each frame can be read without any other. Pages of frames are never written again, and are zeros before: a torn
frame harms no other. When the file has grown too large the blocks that are still there are written to a new one, which
takes its place by rename.
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
VERSION = 1
HEADER_MAGIC, HEADER = b"MOONPSSD", struct.Struct("<8sII16s")
FRAME_MAGIC, FRAME = b"MOONPFRM", struct.Struct("<8sQQII16s")
_CHECKSUM_NBYTES = 16
_SNAPSHOT_BLOCKS = 1024  # per frame of a journal written anew
_MAX_GROWTH_NBYTES = 1 << 20


@dataclass(frozen=True)
class JournalHeader:
    """Identity of a folder."""

    node_id: str
    cluster: str
    segment_nbytes: int

    def to_page(self, journal_id: int) -> bytes:
        body = msgpack.packb([journal_id, self.node_id, self.cluster, self.segment_nbytes])
        start = HEADER.pack(HEADER_MAGIC, VERSION, len(body), b"")[:-_CHECKSUM_NBYTES]
        return _padded(start + checksum(start, body) + body)


def checksum(start: bytes, body: bytes) -> bytes:
    """Return the checksum of a header or frame; `start` is everything before the checksum."""
    return blake3(start + body).digest(length=_CHECKSUM_NBYTES)


class JournalWriter:
    """Appends frames to a journal. One thread at a time."""

    def __init__(self, disk: Disk, config: SsdConfig, header: JournalHeader, extents: Iterable[SsdExtent]) -> None:
        """Write a durable new journal with these blocks, beside the old one until `install`. Raises OSError."""
        self._disk, self._folder = disk, config.dir
        self._growth_nbytes = min(config.min_journal_nbytes, _MAX_GROWTH_NBYTES)
        # Each journal has an id of its own: nothing that a disk brings back of an older one can pass for a frame.
        self._journal_id = secrets.randbits(63)
        self._sequence = 0
        self._nbytes_zeroed = 0
        self.nbytes = PAGE_NBYTES
        self._fd = disk.open(self._folder / _NEW_JOURNAL, create=True)
        try:
            disk.truncate(self._fd, 0)
            disk.write(self._fd, header.to_page(self._journal_id), 0)
            remaining = iter(extents)
            while chunk := list(islice(remaining, _SNAPSHOT_BLOCKS)):
                self._write(self.frame([], [pack_blocks(chunk)]))
            self._grow(self.nbytes)
        except BaseException:
            disk.close(self._fd)
            raise

    def install(self) -> None:
        """Replace the old journal. After an OSError it is unknown which of the two a restart will find."""
        self._disk.rename(self._folder / _NEW_JOURNAL, self._folder / JOURNAL)
        self._disk.sync_dir(self._folder)

    def frame(self, freed: Sequence[int], sealed: Sequence[bytes]) -> bytes:
        """Return the next frame, for `reserve` and `append`; `sealed` consists of `pack_blocks` results."""
        body = msgpack.packb([list(freed), sealed])
        start = FRAME.pack(FRAME_MAGIC, self._journal_id, self._sequence, len(body), 0, b"")[:-_CHECKSUM_NBYTES]
        return _padded(start + checksum(start, body) + body)

    def reserve(self, nbytes: int) -> None:
        """Make room for a frame. If it raises OSError, nothing has changed and the journal stays usable."""
        if self.nbytes + nbytes > self._nbytes_zeroed:
            self._grow(self.nbytes + nbytes)

    def append(self, frame: bytes) -> None:
        """Append a frame, durably. After an OSError the journal's contents are unknown, and only a new journal
        helps.
        """
        self._write(frame)
        self._disk.sync(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)

    def _write(self, frame: bytes) -> None:
        self._disk.write(self._fd, frame, self.nbytes)
        self.nbytes += len(frame)
        self._sequence += 1

    def _grow(self, least_nbytes: int) -> None:
        # Zeros that are on the disk already make a commit one write without any change to the file's metadata.
        end = -(-least_nbytes // self._growth_nbytes) * self._growth_nbytes
        start = max(self.nbytes, self._nbytes_zeroed)
        self._disk.write(self._fd, bytes(end - start), start)
        self._disk.sync(self._fd)
        self._nbytes_zeroed = end


def pack_blocks(extents: Iterable[SsdExtent]) -> bytes:
    """Return a group of blocks in the form that a frame takes."""
    # Told apart by identity, which is quick: a spec that is here twice is written twice.
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
            )
        )
    packed: bytes = msgpack.packb([[spec.to_json() for spec in specs], blocks])
    return packed


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % PAGE_NBYTES)
