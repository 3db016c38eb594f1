"""Disks that fail: an error of the right kind for the block it hit, counted; all else goes on, and nothing hangs."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import SsdCorrupt, SsdFull, SsdIoError
from kvpool.ssd import SsdStore
from kvpool.ssd.disk import Disk

Open = Callable[..., SsdStore]
PAGE = 4096


def put_in_place_of(store: SsdStore, segment: int, path: str, flags: int) -> None:
    """Let the store's descriptor of a segment be that of a device or file which fails as we need it."""
    fd = os.open(path, flags)
    os.dup2(fd, int(store._segments.fds[segment]))
    os.close(fd)


class FailingDisk(Disk):
    """Fails syncs and writes of the files named in `failing`, and renames if it says so; otherwise syncs nothing."""

    def __init__(self) -> None:
        self.failing: set[str] = set()
        self.names: dict[int, str] = {}

    def open(self, path: Path, *, create: bool = False, direct: bool = False) -> int:
        fd = super().open(path, create=create, direct=direct)
        self.names[fd] = path.name
        return fd

    def rename(self, source: Path, target: Path) -> None:
        if "rename" in self.failing:
            raise OSError(errno.EIO, "test")
        super().rename(source, target)
        self.names = {fd: target.name if name == source.name else name for fd, name in self.names.items()}

    def write(self, fd: int, data: bytes, offset: int) -> None:
        kind = "write" if any(data) else "grow"
        if f"{kind} {self.names[fd]}" in self.failing:
            raise OSError(errno.ENOSPC, "test")
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if f"sync {self.names[fd]}" in self.failing:
            raise OSError(errno.EIO, "test")

    def sync_dir(self, path: Path) -> None:
        pass


@pytest.fixture
def failing_disk() -> FailingDisk:
    return FailingDisk()


def test_a_full_disk_fails_the_blocks_it_hits_and_no_other(open_store: Open, blocks: Any) -> None:
    store = open_store()
    put_in_place_of(store, 1, "/dev/full", os.O_RDWR)
    results = blocks.write(store, {1: 1, 2: 17, 3: 18, 4: 40})
    assert [type(result) for result in results] == [type(None), SsdFull, SsdFull, type(None)]
    assert store.stats().writes.errors == {"full": 2}
    assert [blocks.read(store, number, page) for number, page in {1: 1, 4: 40}.items()] == [None, None]
    assert store.close()
    assert blocks.pages(open_store()) == {1: 1, 4: 40}


def test_an_error_of_the_medium_fails_the_reads_it_hits_and_no_other(open_store: Open, blocks: Any) -> None:
    store = open_store()
    blocks.write(store, {1: 1, 2: 17})
    put_in_place_of(store, 1, "/proc/self/mem", os.O_RDWR)  # nothing is mapped at its start: EIO
    error = blocks.read(store, 2, 17)
    assert isinstance(error, SsdIoError)
    assert error.errno == errno.EIO
    assert blocks.read(store, 1, 1) is None
    assert store.stats().reads.errors == {"io": 1}


def test_a_read_only_file_fails_writes_and_serves_reads(open_store: Open, blocks: Any, ssd_path: Path) -> None:
    store = open_store()
    blocks.write(store, {1: 1})
    put_in_place_of(store, 0, str(ssd_path / "segment-00000"), os.O_RDONLY)
    (error,) = blocks.write(store, {2: 2})
    assert isinstance(error, SsdIoError)
    assert error.errno == errno.EBADF
    assert blocks.read(store, 1, 1) is None


def test_a_file_cut_under_the_store_is_an_error_and_no_block(open_store: Open, blocks: Any, ssd_path: Path) -> None:
    store = open_store()
    blocks.write(store, {1: 1, 2: 20})
    os.truncate(ssd_path / "segment-00001", PAGE)
    error = blocks.read(store, 2, 20)
    assert isinstance(error, SsdIoError)
    assert "truncated or replaced" in str(error)
    assert blocks.read(store, 1, 1) is None


def test_files_deleted_under_the_store_serve_on_and_are_missed_by_a_restart(
    open_store: Open, blocks: Any, ssd_path: Path
) -> None:
    store = open_store()
    blocks.write(store, {1: 1, 2: 20})
    (ssd_path / "segment-00001").unlink()
    assert blocks.read(store, 2, 20) is None
    assert store.close()
    assert blocks.pages(open_store()) == {1: 1}


def test_data_that_cannot_be_made_durable_is_not_sealed(
    open_store: Open, blocks: Any, failing_disk: FailingDisk
) -> None:
    store = open_store(disk=failing_disk)
    failing_disk.failing.add("sync segment-00001")
    first, second = blocks.write(store, {1: 1, 2: 17})
    assert first is None
    assert isinstance(second, SsdIoError)
    failing_disk.failing.clear()
    assert blocks.write(store, {3: 17}) == [None]
    assert store.close()
    assert blocks.pages(open_store()) == {1: 1, 3: 17}


def test_a_journal_that_fails_once_is_written_anew_without_the_doubtful_commit(
    open_store: Open, blocks: Any, failing_disk: FailingDisk
) -> None:
    store = open_store(disk=failing_disk)
    blocks.write(store, {1: 1, 2: 2})
    store.free([PAGE])
    failing_disk.failing.add("sync journal")
    (error,) = blocks.write(store, {3: 3})
    assert isinstance(error, SsdIoError)
    assert store.stats().accepts_writes
    assert store.stats().num_compactions == 1
    failing_disk.failing.clear()
    assert blocks.write(store, {4: 1, 5: 3}) == [None, None]
    assert store.close()
    assert blocks.pages(open_store()) == {2: 2, 4: 1, 5: 3}


@pytest.mark.parametrize("also", ["write journal.new", "sync journal.new", "rename"])
def test_a_journal_that_cannot_be_written_stops_writes_until_it_can_and_serves_reads(
    open_store: Open, blocks: Any, failing_disk: FailingDisk, also: str
) -> None:
    store = open_store(disk=failing_disk)
    blocks.write(store, {1: 1, 2: 2})
    store.free([2 * PAGE])
    failing_disk.failing |= {"sync journal", also}
    for number in (3, 4):
        (error,) = blocks.write(store, {number: 2})
        assert isinstance(error, SsdIoError)
        assert not store.stats().accepts_writes
        assert blocks.read(store, 1, 1) is None
    assert "each write retries" in str(error)
    failing_disk.failing.clear()
    assert blocks.write(store, {5: 2}) == [None]
    assert store.stats().accepts_writes
    assert store.close()
    assert blocks.pages(open_store()) == {1: 1, 5: 2}


def test_a_journal_without_room_refuses_the_commit_and_takes_the_next(
    open_store: Open, blocks: Any, failing_disk: FailingDisk
) -> None:
    store = open_store(disk=failing_disk, min_journal_nbytes=4 << 20)
    failing_disk.failing.add("grow journal")
    for number in range(200):  # until what was set aside when the journal was begun is full
        store.free([0])
        if blocks.write(store, {number: 0}) != [None]:
            failing_disk.failing.clear()
    assert store.stats().writes.errors == {"full": 1}
    assert store.stats().num_compactions == 0
    assert store.close()
    assert blocks.pages(open_store()) == {199: 0}


def test_bytes_that_changed_on_the_disk_are_noticed(open_store: Open, blocks: Any, ssd_path: Path) -> None:
    store = open_store()
    blocks.write(store, {1: 1, 2: 2})
    one, two = ((ssd_path / "segment-00000").read_bytes()[page * PAGE : (page + 1) * PAGE] for page in (1, 2))
    with (ssd_path / "segment-00000").open("r+b") as file:
        for torn in (two, one[:512] + two[512:], bytes(PAGE)):  # misdirected, torn, lost
            file.seek(PAGE)
            file.write(torn)
            file.flush()
            os.fsync(file.fileno())
            assert isinstance(blocks.read(store, 1, 1), SsdCorrupt)
    assert blocks.read(store, 2, 2) is None
    assert store.stats().reads.errors == {"corrupt": 3}


def test_closing_does_not_wait_for_a_disk_that_does_not_answer(open_store: Open, blocks: Any) -> None:
    asked, answer = threading.Event(), threading.Event()

    class StuckDisk(Disk):
        def start(self, *arguments: Any, write: bool) -> Any:
            asked.set()
            answer.wait(60)
            return super().start(*arguments, write=write)

    store = open_store(disk=StuckDisk())
    results: list[Any] = []
    writer = threading.Thread(target=lambda: results.extend(blocks.write(store, {1: 1})))
    writer.start()
    assert asked.wait(60)
    assert not store.close(timeout_s=0.01)
    assert store.stats().writes.num_in_flight == 1
    answer.set()
    writer.join(60)
    assert results == [None]
    assert store.close()
    assert blocks.pages(open_store()) == {1: 1}
