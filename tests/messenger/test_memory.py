"""Shared memory: who may write to it, and what pages it is made of."""

import ctypes
import errno
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from messenger import InvalidArgument, SharedMemory, mapping
from messenger.mapping import HUGE_NBYTES, can_collapse
from messenger.memory import PeerMemory

MAP_FIXED_NOREPLACE = 0x100000  # from linux/mman.h


def free_huge_pages() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:"))


def mapped_as_huge(address: int) -> int:
    """Bytes of the mapping that this process sees as huge pages."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(f"{address:x}-") for line in lines)
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("ShmemPmdMapped:"))


def test_who_is_given_the_descriptor_can_read_and_never_write() -> None:
    memory = SharedMemory.create(1 << 16, "mine")
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, memory.nbytes)
    with mmap.mmap(memory.fd, memory.nbytes, prot=mmap.PROT_READ) as mapping:
        memory.array[7] = 9
        assert mapping[7] == 9
    memory.close()


def test_huge_pages_on_are_had_or_refused_with_what_to_do() -> None:
    nbytes = (3 << 21) + 5
    if free_huge_pages() > 3:
        memory = SharedMemory.create(nbytes, "huge", "on")
        assert memory.pages == "huge"
        assert memory.nbytes >= nbytes
        memory.close()
        return
    with pytest.raises(
        OSError, match=r"more huge pages than are free: reserve more \(sysctl vm.nr_hugepages\)"
    ) as raised:
        SharedMemory.create(nbytes, "huge", "on")
    assert raised.value.errno in (errno.ENOMEM, errno.EINVAL, errno.ENOSYS)


def test_huge_pages_auto_are_never_a_reason_to_fail() -> None:
    beyond = (free_huge_pages() + 8) << 21
    memory = SharedMemory.create(beyond, "arena", "auto")
    assert memory.pages == "small"
    assert memory.nbytes == beyond
    memory.array[-1] = 1
    memory.close()


def test_committing_joins_pages_of_this_process_and_of_readers() -> None:
    nbytes = ((free_huge_pages() + 3) << 21) + 5000
    memory = SharedMemory.create(nbytes, "arena", "auto")
    early = PeerMemory(os.dup(memory.fd), nbytes)
    memory.array[5000] = 7
    memory.array[-1] = 9
    assert early.array[5000] == 7
    assert memory.try_commit(HUGE_NBYTES + 4096, 1 << 20)  # touches the second huge page alone
    assert memory.try_commit(0, nbytes)
    late = PeerMemory(os.dup(memory.fd), nbytes)
    assert memory.array.nonzero()[0].tolist() == [5000, nbytes - 1]
    assert np.array_equal(early.array, memory.array)
    assert np.array_equal(late.array, memory.array)
    if can_collapse():
        assert memory.pages == "transparent"
        whole = nbytes // HUGE_NBYTES * HUGE_NBYTES
        assert [mapped_as_huge(one.array.ctypes.data) for one in (memory, early, late)] == [whole] * 3
    memory.close()


class MappingsInHoles:
    """The C library, whose failing `mmap` is followed at once by another thread's mapping in the range it unmapped."""

    def __init__(self, library: ctypes.CDLL, *, fails: bool) -> None:
        self.found: list[np.ndarray[Any, np.dtype[np.uint8]]] = []
        self._library, self._fails = library, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def mmap(self, address: int, nbytes: int, protection: int, flags: int, fd: int, start: int) -> int:
        # A descriptor that does not exist is noticed too early: the kernel has unmapped nothing then.
        if self._fails:
            assert self._library.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) == 0
            at = -1
        else:
            at = self._library.mmap(address, nbytes, protection, flags, fd, start)
        if at != address:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
            mine = self._library.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
            assert mine == address, "the range has been unmapped"
            self.found.append(np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
        return int(at)


@pytest.mark.parametrize("huge_pages", [True, False], ids=["reserved", "small"])
def test_a_failed_mapping_takes_no_memory_away_that_another_thread_has_mapped_meanwhile(
    huge_pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = MappingsInHoles(mapping._libc(), fails=not huge_pages)
    monkeypatch.setattr(mapping, "_libc", lambda: library)
    fd = os.memfd_create("m", os.MFD_HUGETLB if huge_pages else 0)
    nbytes = (free_huge_pages() + 3) << 21
    os.ftruncate(fd, nbytes)
    with pytest.raises(OSError, match=r"Errno"):
        mapping.mapped(fd, nbytes, writable=True)
    gc.collect()
    os.close(fd)
    assert len(library.found) == (not huge_pages)
    for memory in library.found:
        memory[:] = 7  # a process that may not ends here, with a signal
        assert memory.min() == 7


def test_memory_that_was_not_to_be_huge_is_not() -> None:
    memory = SharedMemory.create(2 * HUGE_NBYTES, "arena")
    assert memory.try_commit(0, memory.nbytes)
    assert memory.pages == "small"
    memory.close()


def test_where_the_kernel_joins_no_pages_they_are_committed_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_MADV_COLLAPSE", 12345)  # EINVAL, as from a kernel that does not know it
    memory = SharedMemory.create((free_huge_pages() + 2) << 21, "arena", "auto")
    memory.array[-1] = 9
    assert memory.try_commit(0, memory.nbytes)
    assert memory.pages == "small"
    assert os.fstat(memory.fd).st_blocks * 512 == memory.nbytes
    assert memory.array.nonzero()[0].tolist() == [memory.nbytes - 1]
    memory.close()


@pytest.mark.parametrize("nbytes", [1, 4097, (1 << 21) - 1, 1 << 21, (5 << 21) + 1])
def test_a_mapping_ends_with_the_last_array_over_it_and_leaves_nothing(nbytes: int) -> None:
    memory = SharedMemory.create(nbytes, "moonpool-passing")
    peer = PeerMemory(os.dup(memory.fd), nbytes)
    memory.array[-1] = 5
    assert peer.array[-1] == 5
    with pytest.raises(ValueError, match="read-only"):
        peer.array[0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        peer.array.flags.writeable = True
    if nbytes >= HUGE_NBYTES:
        assert memory.array.ctypes.data % HUGE_NBYTES == peer.array.ctypes.data % HUGE_NBYTES == 0
    view = memory.array[nbytes // 2 :]
    memory.close()
    del memory, peer
    maps = Path("/proc/self/maps").read_text()
    assert maps.count("moonpool-passing") == 1
    assert view[-1] == 5
    del view
    assert "moonpool-passing" not in Path("/proc/self/maps").read_text()


def test_memory_of_huge_pages_crosses_to_a_reader_as_any_other() -> None:
    memory = SharedMemory.create(1 << 20, "arena", "auto")
    memory.array[:4] = (1, 2, 3, 4)
    view = PeerMemory(os.dup(memory.fd), memory.nbytes)
    assert view.array[:4].tolist() == [1, 2, 3, 4]
    memory.close()


def test_committed_memory_keeps_what_is_in_it() -> None:
    memory = SharedMemory.create(1 << 20, "arena")
    memory.array[5000] = 7
    if memory.try_commit(4096, 1 << 19):
        assert os.fstat(memory.fd).st_blocks * 512 >= 1 << 19
    assert memory.array[5000] == 7
    assert not memory.array[5001:].any()
    memory.close()


def test_memory_that_is_closed_while_it_is_committed_stays_mapped_until_that_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SharedMemory.create(1 << 20, "ending")
    mappings: list[int] = []

    def closed_meanwhile(_address: int, _nbytes: int) -> bool:
        memory.close()
        mappings.append(Path("/proc/self/maps").read_text().count("/memfd:ending "))
        return True

    monkeypatch.setattr("messenger.memory.populate", closed_meanwhile)
    assert memory.try_commit(0, memory.nbytes)
    assert mappings == [1]
    assert "/memfd:ending " not in Path("/proc/self/maps").read_text()


def test_memory_closed_by_its_owner_stays_until_the_last_view_is_gone() -> None:
    memory = SharedMemory.create(4096, "short")
    view = memory.array
    memory.close()
    memory.close()
    view[:] = 3
    assert int(view.sum()) == 3 * 4096
    with pytest.raises(InvalidArgument, match="closed"):
        _ = memory.array
