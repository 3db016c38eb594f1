"""Shared memory: who may write to it, and what pages it is made of."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from messenger import InvalidArgument, SharedMemory
from messenger.memory import PeerMemory


def free_huge_pages() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:"))


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
    with pytest.raises(OSError, match=r"not enough free ones: reserve more \(sysctl vm.nr_hugepages\)") as raised:
        SharedMemory.create(nbytes, "huge", "on")
    assert raised.value.errno in (errno.ENOMEM, errno.EINVAL, errno.ENOSYS)


def test_huge_pages_auto_are_never_a_reason_to_fail() -> None:
    beyond = (free_huge_pages() + 8) << 21
    memory = SharedMemory.create(beyond, "arena", "auto")
    assert memory.pages in ("transparent", "small")
    assert memory.nbytes == beyond
    memory.array[-1] = 1
    memory.close()


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


def test_memory_closed_by_its_owner_stays_until_the_last_view_is_gone() -> None:
    memory = SharedMemory.create(4096, "short")
    view = memory.array
    memory.close()
    memory.close()
    view[:] = 3
    assert int(view.sum()) == 3 * 4096
    with pytest.raises(InvalidArgument, match="closed"):
        _ = memory.array
