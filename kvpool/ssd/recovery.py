"""Recovery: the blocks that a journal lists, even if it is damaged, restricted to the store's space and files.

Rules:
- Frames are read in order. Pages that are not a frame (torn, flipped, unreadable) are skipped one by one.
- Broken pages after the last good frame are a torn commit whose write never returned; it is ignored.
- A good frame after broken pages means that committed frames are lost, and with them the blocks that they sealed. The
  blocks that they freed may be listed again. That is harmless: such a block is still valid, or was overwritten, which
  its checksum detects on every read. Among blocks that overlap or have the same address, the latest is kept.
- If the header cannot be read, the journal is renamed and the store starts empty.
"""

import errno
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import msgpack

from kvpool.address import KEY_NBYTES
from kvpool.errors import SsdFolderError, SsdForeign
from kvpool.spec import KvSpec
from kvpool.ssd.disk import Disk
from kvpool.ssd.folder import Segments
from kvpool.ssd.journal import (
    CODED_VERSION,
    FRAME,
    FRAME_MAGIC,
    HEADER,
    HEADER_MAGIC,
    JOURNAL,
    VERSION,
    JournalHeader,
    checksum,
)
from kvpool.ssd.records import PAGE_NBYTES, ExtentState, SsdConfig, SsdEntry, SsdExtent, extent_nbytes

_CHUNK_NBYTES = 1 << 20
_SPACE_END = 1 << 62
_DIGEST_NBYTES = 8  # per layer
# What unpacking raises for contents that this version never writes.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    msgpack.UnpackException,
)


@dataclass
class RecoveredJournal:
    """Contents of a journal. `header` is None if it is missing or unreadable.

    `counts` has the keys frames; torn_end (0 or 1); lost_frames, committed but unreadable; superseded, the blocks that
    a later one overlaps or replaces; and those that `recover` and `extents_within` add.
    """

    header: JournalHeader | None = None
    extents: list[SsdExtent] = field(default_factory=list)  # in the order in which they were sealed
    counts: Counter[str] = field(default_factory=Counter)


def read_journal(path: Path) -> RecoveredJournal:
    """Read a journal. Raises SsdForeign if it has another version, and OSError if it cannot be opened."""
    data = _read(path)
    known = _read_header(data, path)
    if known is None:
        return RecoveredJournal()
    journal_id, header = known
    found = RecoveredJournal(header)
    at: dict[int, SsdExtent] = {}
    specs: dict[bytes, tuple[KvSpec, int]] = {}
    for body in _frames(data, journal_id, found.counts):
        try:
            freed, sealed = _unpack_frame(body, specs)
        except _MALFORMED as error:
            _log.error("a frame of the SSD journal %s has a right checksum, but no valid contents: %r", path, error)
            found.counts["lost_frames"] += 1
            continue
        for offset in freed:
            at.pop(offset, None)
        for extent in sealed:
            found.counts["superseded"] += at.pop(extent.start, None) is not None
            at[extent.start] = extent
    found.extents = _newest(list(at.values()), found.counts)
    return found


def _read(path: Path) -> bytearray:
    """Return the file's bytes, with zeros for pages that the disk cannot read."""
    data = bytearray()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        for at in range(0, size, _CHUNK_NBYTES):
            data += _read_part(file.fileno(), at, min(_CHUNK_NBYTES, size - at))
    return data


def _read_part(fd: int, at: int, nbytes: int) -> bytes:
    try:
        return os.pread(fd, nbytes, at).ljust(nbytes, b"\0")
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        if nbytes <= PAGE_NBYTES:
            return bytes(nbytes)
        parts = range(at, at + nbytes, PAGE_NBYTES)
        return b"".join(_read_part(fd, part, min(PAGE_NBYTES, at + nbytes - part)) for part in parts)


def _read_header(data: bytearray, path: Path) -> tuple[int, JournalHeader] | None:
    if len(data) < PAGE_NBYTES:
        return None
    magic, version, nbytes, expected = HEADER.unpack_from(data)
    body = bytes(data[HEADER.size : HEADER.size + nbytes])
    if magic != HEADER_MAGIC or checksum(bytes(data[: HEADER.size - len(expected)]), body) != expected:
        return None
    if version not in (VERSION, CODED_VERSION):
        raise SsdForeign(
            f"{path} has version {version} of the format, expected {VERSION} or {CODED_VERSION}: start the release "
            "of Moonpool that wrote it, give another folder, or empty this one (it is a cache). Nothing was changed"
        )
    try:
        journal_id, node_id, cluster, segment_nbytes = msgpack.unpackb(body)
        _require(type(journal_id) is int and isinstance(node_id, str) and isinstance(cluster, str), "header")
        _require(_is_offset(segment_nbytes) and segment_nbytes > 0, "size of a segment")
    except _MALFORMED as error:
        _log.error("the header of the SSD journal %s has a right checksum, but no valid contents: %r", path, error)
        return None
    return journal_id, JournalHeader(node_id, cluster, segment_nbytes)


def _frames(data: bytearray, journal_id: int, counts: Counter[str]) -> Iterator[bytes]:
    """Yield the bodies of the good frames."""
    position, expected = PAGE_NBYTES, 0
    broken = False  # something that is neither a frame nor zeros since the last frame
    while position < len(data):
        frame = _frame(data, position, journal_id, expected)
        if frame is None:
            broken = broken or any(data[position : position + PAGE_NBYTES])
            position += PAGE_NBYTES
            continue
        sequence, nbytes, body = frame
        counts["frames"] += 1
        counts["lost_frames"] += sequence - expected
        broken, expected = False, sequence + 1
        position += nbytes
        yield body
    counts["torn_end"] += broken


def _frame(data: bytearray, position: int, journal_id: int, least_sequence: int) -> tuple[int, int, bytes] | None:
    """Return (sequence, bytes in whole pages, body) of a valid frame at `position`; None if there is none."""
    if data[position : position + len(FRAME_MAGIC)] != FRAME_MAGIC or len(data) - position < FRAME.size:
        return None
    _, found_id, sequence, nbytes, _, expected = FRAME.unpack_from(data, position)
    start = position + FRAME.size
    if found_id != journal_id or sequence < least_sequence or start + nbytes > len(data):
        return None
    body = bytes(data[start : start + nbytes])
    if checksum(bytes(data[position : start - len(expected)]), body) != expected:
        return None
    whole = -(-(FRAME.size + nbytes) // PAGE_NBYTES) * PAGE_NBYTES
    return sequence, whole, body


def _unpack_frame(body: bytes, specs: dict[bytes, tuple[KvSpec, int]]) -> tuple[list[int], list[SsdExtent]]:
    """Return the offsets freed and the blocks sealed by a frame. Raises one of `_MALFORMED`."""
    freed, groups = msgpack.unpackb(body)
    _require(all(map(_is_offset, freed)), "freed offset")
    return freed, list(chain.from_iterable(_unpack_blocks(group, specs) for group in groups))


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(f"invalid {what}")


def _is_offset(value: object) -> bool:
    return type(value) is int and 0 <= value < _SPACE_END and value % PAGE_NBYTES == 0


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == KEY_NBYTES


def _unpack_blocks(group: bytes, known: dict[bytes, tuple[KvSpec, int]]) -> list[SsdExtent]:
    """Return the blocks of a group; `known` caches specs with the size of their extents."""
    described, blocks = msgpack.unpackb(group)
    specs = []
    for description in described:
        name = msgpack.packb(description)
        if name not in known:
            spec = KvSpec.from_json(description)
            known[name] = spec, extent_nbytes(spec)
        specs.append(known[name])
    extents = []
    for offset, kv_namespace, chain_key, parent, number, num_tokens, digests, compute_s, summed, *coded in blocks:
        _require(type(number) is int and 0 <= number < len(specs), "number of a spec")
        spec, nbytes = specs[number]
        coded_nbytes = 0
        if coded:
            (coded_nbytes,) = coded
            _require(type(coded_nbytes) is int and 0 < coded_nbytes < spec.block_nbytes, "length of a coded block")
            nbytes = extent_nbytes(spec, coded_nbytes)
        _require(_is_offset(offset) and _is_offset(nbytes), "offset")
        _require(_is_key(kv_namespace) and _is_key(chain_key) and _is_key(parent), "key")
        _require(type(num_tokens) is int and 0 <= num_tokens < spec.block_tokens, "number of tokens")
        _require(type(compute_s) in (int, float) and 0 <= compute_s < math.inf, "time")
        _require(type(summed) is int and 0 <= summed < 1 << 64, "checksum")
        _require(
            [len(each) if isinstance(each, bytes) else -1 for each in digests]
            == [_DIGEST_NBYTES * spec.num_layers(g) for g in range(spec.num_groups)],
            "digests",
        )
        entry = SsdEntry(
            offset, kv_namespace, chain_key, parent, spec, num_tokens, tuple(digests), compute_s, coded_nbytes
        )
        extents.append(SsdExtent(entry, offset, offset + nbytes, summed, ExtentState.SEALED))
    return extents


def _newest(extents: list[SsdExtent], counts: Counter[str]) -> list[SsdExtent]:
    """Return the extents, in order, without those that a later one overlaps or has the same address as."""
    order = {extent: i for i, extent in enumerate(extents)}
    last = {(extent.entry.kv_namespace, extent.entry.chain_key): extent for extent in extents}
    kept: list[SsdExtent] = []
    for extent in sorted(last.values(), key=lambda each: each.start):
        while kept and kept[-1].end > extent.start and order[kept[-1]] < order[extent]:
            kept.pop()
        if not kept or kept[-1].end <= extent.start:
            kept.append(extent)
    counts["superseded"] += len(extents) - len(kept)
    return sorted(kept, key=order.__getitem__)


_log = logging.getLogger(__name__)


def recover(config: SsdConfig, disk: Disk) -> RecoveredJournal:
    """Return the contents of the folder's journal; empty if it is missing or has no readable header.

    Raises SsdForeign if the folder belongs to another node, cluster or version, SsdFolderError if the journal cannot
    be read or renamed.
    """
    path = config.dir / JOURNAL
    try:
        found = read_journal(path)
    except FileNotFoundError:
        return RecoveredJournal()
    except OSError as error:
        raise SsdFolderError(f"the SSD journal {path} cannot be read: {error.strerror}. Repair or remove it") from error
    if found.header is None:
        _set_aside(config, disk, found)
        return found
    for what, theirs, ours in (
        ("node", found.header.node_id, config.owner_id),
        ("cluster", found.header.cluster, config.cluster),
    ):
        if theirs != ours:
            raise SsdForeign(
                f"the SSD folder {config.dir} belongs to {what} {theirs!r}, not to {ours!r}: give this node its own "
                "folder, or empty this one (it is a cache). Nothing was changed"
            )
    for name in ("lost_frames", "superseded"):
        if found.counts[name]:
            _log.error("the SSD journal %s is damaged: %s %d", path, name, found.counts[name])
    return found


def extents_within(found: RecoveredJournal, segments: Segments) -> list[SsdExtent]:
    """Return the blocks that lie within the space and in files that existed. Counts the others in `found`."""
    kept = []
    for extent in found.extents:
        if extent.end > segments.nbytes:
            found.counts["outside"] += 1
        elif not segments.was_there(extent.start, extent.end):
            found.counts["missing_files"] += 1
        else:
            kept.append(extent)
    if found.counts["missing_files"]:
        _log.error("segment files are missing or truncated: %d blocks are lost", found.counts["missing_files"])
    return kept


def _set_aside(config: SsdConfig, disk: Disk, found: RecoveredJournal) -> None:
    path = config.dir / JOURNAL
    numbers = (int(old.suffix[1:]) for old in config.dir.glob(f"{JOURNAL}-unreadable.*") if old.suffix[1:].isdigit())
    aside = config.dir / f"{JOURNAL}-unreadable.{max(numbers, default=0) + 1}"
    try:
        disk.rename(path, aside)
    except OSError as error:
        raise SsdFolderError(f"the SSD journal {path} is unreadable and cannot be moved: {error.strerror}") from error
    _log.error(
        "the SSD journal %s has no readable header: the tier starts empty; the journal is kept as %s", path, aside
    )
    found.counts["unreadable_journal"] = 1
