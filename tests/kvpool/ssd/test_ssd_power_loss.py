"""Power is lost: whatever part of the unsynced writes the disk kept, torn and in any order, no sealed block is lost or
wrong."""

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.ssd import SsdStore
from kvpool.ssd.disk import Disk, InFlightBatch, IoBatch, IoThreads
from tests.long_cases import others_long

Open = Callable[..., SsdStore]
PAGE, SECTOR = 4096, 512
IMAGES_PER_RUN = 45


@dataclass
class RecordingDisk(Disk):
    """Does what a disk does, and writes down in which order."""

    log: list[tuple[Any, ...]] = field(default_factory=list)
    files: dict[int, int] = field(default_factory=dict)  # descriptor to a number that the file keeps under any name

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        fd = super().open(path, create=create, direct=direct)
        self.files[fd] = path.stat().st_ino
        self.log.append(("name", path.name, self.files[fd]))
        return fd

    def allocate(self, fd: int, nbytes: int) -> None:
        super().allocate(fd, nbytes)
        self.log.append(("allocate", self.files[fd], nbytes))

    def write(self, fd: int, data: bytes, offset: int) -> None:
        super().write(fd, data, offset)
        self.log.append(("write", self.files[fd], offset, bytes(data)))

    def sync(self, fd: int) -> None:
        self.log.append(("sync", self.files[fd]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(("rename", source.name, target.name))

    def sync_dir(self, path: Path) -> None:
        self.log.append(("sync_dir",))

    def start(self, threads: IoThreads, batch: IoBatch, fds: NDArray[np.int32], *, write: bool) -> InFlightBatch:
        if write:
            for _, at, nbytes, first, count, *_ in batch.pieces.tolist():
                data = b"".join(ctypes.string_at(*run) for run in batch.piece_runs[first : first + count].tolist())
                data = data.ljust(nbytes, b"\0")
                while data:  # a piece may go on in the next segment
                    index, offset = divmod(at, batch.segment_nbytes)
                    part, data = data[: batch.segment_nbytes - offset], data[batch.segment_nbytes - offset :]
                    self.log.append(("write", self.files[int(fds[index])], offset, part))
                    at += len(part)
        return super().start(threads, batch, fds, write=write)


class Image:
    """Return the disk's contents after the first operations of a log, including writes that it need not have kept."""

    def __init__(self) -> None:
        self.files: dict[int, bytearray] = {}
        self.pending: dict[int, list[tuple[int, bytes]]] = {}
        self.names: dict[str, int] = {}
        self.pending_names: list[tuple[str, ...]] = []

    def replay(self, log: list[tuple[Any, ...]]) -> None:
        for kind, *rest in log:
            getattr(self, f"_{kind}")(*rest)

    def lose_power(self, rng: random.Random) -> dict[str, bytes]:
        """Files by name, as a disk might hold them: of what is pending, any part, by sectors."""
        names = dict(self.names)
        for change in self.pending_names[: rng.randint(0, len(self.pending_names))]:
            _apply(names, change)
        return {name: bytes(self._torn(number, rng)) for name, number in names.items()}

    def _torn(self, number: int, rng: random.Random) -> bytearray:
        data = bytearray(self.files[number])
        pending = list(self.pending[number])
        rng.shuffle(pending)
        how = rng.choice(("all", "none", "some", "torn", "torn"))
        for offset, content in pending:
            if how == "none" or (how == "some" and rng.random() < 0.5):
                continue
            for at in range(0, len(content), SECTOR):
                if how != "torn" or rng.random() < 0.7:
                    _put(data, offset + at, content[at : at + SECTOR])
        return data

    def _name(self, name: str, number: int) -> None:
        self.files.setdefault(number, bytearray())
        self.pending.setdefault(number, [])
        self.pending_names.append(("set", name, str(number)))

    def _allocate(self, number: int, nbytes: int) -> None:
        self.files[number].extend(bytes(max(0, nbytes - len(self.files[number]))))

    def _write(self, number: int, offset: int, data: bytes) -> None:
        self.pending[number].append((offset, data))

    def _sync(self, number: int) -> None:
        for offset, data in self.pending[number]:
            _put(self.files[number], offset, data)
        self.pending[number].clear()

    def _rename(self, source: str, target: str) -> None:
        self.pending_names.append(("rename", source, target))

    def _sync_dir(self) -> None:
        for change in self.pending_names:
            _apply(self.names, change)
        self.pending_names.clear()

    def _told(self, *_: Any) -> None:
        """Said to the caller: nothing to the disk."""


def _put(data: bytearray, offset: int, content: bytes) -> None:
    data.extend(bytes(max(0, offset + len(content) - len(data))))
    data[offset : offset + len(content)] = content


def _apply(names: dict[str, int], change: tuple[str, ...]) -> None:
    kind, first, second = change
    if kind == "set":
        names[first] = int(second)
    elif first in names:
        names[second] = names.pop(first)


def told(log: list[tuple[Any, ...]]) -> tuple[dict[int, int], set[int]]:
    """Return the guaranteed pages (number to page) after these operations, and the numbers that may exist besides."""
    sure: dict[int, int] = {}
    maybe: set[int] = set()
    for kind, *rest in log:
        if kind == "told":
            what, pages = rest
            if what == "writing":
                maybe |= pages.keys()
            elif what == "sealed":
                sure |= pages
            else:
                sure = {number: page for number, page in sure.items() if page not in pages}
    return sure, maybe


def work(store: SsdStore, blocks: Any, disk: RecordingDisk, rng: random.Random, numbers: range) -> None:
    """Write, free and write over, telling the log what a caller knows when."""
    held = [entry.offset // PAGE for entry in store.recovered]
    size = store.recovered[0].nbytes // PAGE if store.recovered else 2
    for number in numbers[::3]:
        if len(held) > 12 or (held and rng.random() < 0.3):
            gone = [held.pop(rng.randrange(len(held))) for _ in range(rng.randint(1, min(4, len(held))))]
            disk.log.append(("told", "freeing", set(gone)))
            store.free([page * PAGE for page in gone])
        chosen = rng.sample([page for page in range(0, 63, size) if page not in held], rng.randint(1, 3))
        pages = {number + i: page for i, page in enumerate(chosen)}
        disk.log.append(("told", "writing", pages))
        assert blocks.write(store, pages) == [None] * len(pages)
        disk.log.append(("told", "sealed", pages))
        held += chosen


@pytest.mark.parametrize("seed", others_long(range(4), [0]))
def test_no_sealed_block_is_lost_and_none_is_wrong_whatever_an_unsynced_disk_kept(
    open_store: Open, blocks_of: Any, ssd_path: Path, unsynced_disk: Disk, seed: int
) -> None:
    blocks, rng, disk = blocks_of(4096, 2400), random.Random(seed), RecordingDisk()
    live = ssd_path / "live"
    live.mkdir()
    for turn in range(2):  # the second begins with what the first left, and frees what it has not written
        store = open_store(live, disk=disk, segment_nbytes=15 * PAGE)
        work(store, blocks, disk, rng, range(1000 * turn, 1000 * turn + 90))
        assert store.stats().num_compactions > 0
        assert store.close()
    marks = [i for i, (kind, *_) in enumerate(disk.log) if kind in ("told", "rename", "sync", "sync_dir")]
    journals = {entry[2] for entry in disk.log if entry[0] == "name" and entry[1].startswith("journal")}
    frames = [i for i, entry in enumerate(disk.log) if entry[0] == "write" and entry[1] in journals]
    num_found = num_torn = 0
    for k in range(6 * IMAGES_PER_RUN):
        if k >= IMAGES_PER_RUN:  # which images were torn depends on the threads' timing, too
            if num_torn:
                break
            end = rng.choice(frames) + 1
        else:
            end = rng.choice(marks) + rng.choice((0, 1)) if k % 2 else rng.randrange(len(disk.log))
        image = Image()
        image.replay(disk.log[:end])
        sure, maybe = told(disk.log[:end])
        folder = ssd_path / f"image-{k}"
        folder.mkdir()
        for name, data in image.lose_power(rng).items():
            (folder / name).write_bytes(data)
        store = open_store(folder, disk=unsynced_disk, segment_nbytes=15 * PAGE)
        found = blocks.pages(store)
        assert found.items() >= sure.items(), "a sealed block is lost"
        assert found.keys() <= maybe | sure.keys()
        assert [blocks.read(store, number, page) for number, page in found.items()] == [None] * len(found)
        recovery = store.stats().recovery
        assert not recovery.get("lost_frames")
        assert not recovery.get("unreadable_journal")
        num_found += len(found)
        num_torn += recovery.get("torn_end", 0)
        assert store.close()
    assert num_found > IMAGES_PER_RUN
    assert num_torn > 0
