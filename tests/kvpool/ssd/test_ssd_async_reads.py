"""Small reads that one thread keeps in flight: bytes, checksums and errors as of reads that threads wait for."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.ssd import disk as ssd_disk
from kvpool.ssd.disk import BatchResult, Disk, IoBatch, IoThreads
from kvpool.ssd.kernels import SHORT

PAGE = 4096
NUM_PAGES = 300
SEGMENT_NBYTES = 256 * PAGE


@pytest.fixture
def segments(ssd_dir: Path) -> Any:
    """Two files of random pages, the second one shorter than its part of the space."""
    disk, rng = Disk(), np.random.default_rng(0)
    data = rng.integers(0, 256, NUM_PAGES * PAGE, np.uint8)
    fds = []
    for i in range(2):
        fd = disk.open(ssd_dir / str(i), create=True, direct=False)
        disk.write(fd, data[i * SEGMENT_NBYTES :][:SEGMENT_NBYTES].tobytes(), 0)
        disk.sync(fd)
        disk.close(fd)
        fds.append(disk.open(ssd_dir / str(i), direct=True))
    yield data, np.array(fds, np.int32)
    for fd in fds:
        os.close(fd)


def pages_at(count: int) -> Any:
    memory = np.zeros((count + 1) * PAGE, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + count * PAGE].reshape(count, PAGE)


def read(threads: IoThreads, fds: Any, pages: list[int], memory: Any, runs: int = 1) -> BatchResult:
    part = PAGE if runs == 1 else PAGE * runs
    where = [[(memory[i * runs + r].ctypes.data, PAGE) for r in range(runs)] for i in range(len(memory) * PAGE // part)]
    batch = IoBatch([page * PAGE for page in pages], where, SEGMENT_NBYTES)
    return threads.start(batch, fds, write=False).finish()


def test_pages_are_read_as_by_threads_that_wait_for_each(segments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data, fds = segments
    pages = np.random.default_rng(1).permutation(NUM_PAGES).tolist()
    results = []
    for is_async in (True, False):
        if not is_async:
            monkeypatch.setattr(ssd_disk, "SYSTEM_CALLS", None)
        threads, memory = IoThreads(8, "test"), pages_at(NUM_PAGES)
        assert threads.reads_async is is_async
        results.append(read(threads, fds, pages, memory))
        threads.stop()
        assert np.array_equal(memory, data.reshape(-1, PAGE)[pages])
        assert not results[-1].status.any()
        assert (results[-1].latency_ns > 0).all()
    assert np.array_equal(results[0].sums, results[1].sums)


def test_one_read_fills_several_runs_of_memory(segments: Any) -> None:
    data, fds = segments
    threads, memory = IoThreads(4, "test"), pages_at(3 * 50)
    outcome = read(threads, fds, [4 * i for i in range(50)], memory, runs=3)
    threads.stop()
    assert not outcome.status.any()
    wanted = [4 * i + r for i in range(50) for r in range(3)]
    assert np.array_equal(memory, data.reshape(-1, PAGE)[wanted])


def test_each_failed_read_has_its_own_error(segments: Any) -> None:
    data, fds = segments
    threads, memory = IoThreads(8, "test"), pages_at(40)
    pages = [*range(20), *range(NUM_PAGES, NUM_PAGES + 10), *range(20, 30)]  # ten lie beyond the end of the second file
    outcome = read(threads, fds, pages, memory)
    assert outcome.status.tolist() == [0] * 20 + [SHORT] * 10 + [0] * 10
    assert np.array_equal(memory[30:], data.reshape(-1, PAGE)[20:30])
    nowhere = np.array([fds[0], 1 << 20], np.int32)
    outcome = read(threads, nowhere, [1, 257, 2, 258], pages_at(4))
    threads.stop()
    assert outcome.status.tolist() == [0, errno.EBADF, 0, errno.EBADF]
