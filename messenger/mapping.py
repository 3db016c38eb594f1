"""Mappings of shared memory: their alignment, and the sizes of their pages.

A mapping is aligned to huge pages, so that the kernel can map a huge page of the memory as one. System calls on pages
run without the GIL.
"""

import ctypes
import mmap
import os
from functools import cache

import numpy as np
import numpy.typing as npt

__all__ = ["HUGE_NBYTES", "advise_huge", "can_collapse", "collapse", "give_back", "mapped", "populate"]

HUGE_NBYTES = 2 << 20
"""Size of transparent huge pages, which the kernel makes of small pages; reserved huge pages may be larger."""

# From linux/mman.h; the mmap module of Python 3.11 names neither.
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_MADV_COLLAPSE = 25  # since Linux 6.1
_FALLOC_PUNCH_HOLE = 0x01 | 0x02  # with FALLOC_FL_KEEP_SIZE, from linux/falloc.h
_STEP_NBYTES = 32 << 20  # per call; each call first synchronises with the other cores

# Ranges of failed mappings. Linux has unmapped the part that was to be replaced, where another thread may have mapped
# memory since: to unmap the whole range would take that away.
_never_unmapped: list[npt.NDArray[np.uint8]] = []


def mapped(fd: int, nbytes: int, *, writable: bool) -> npt.NDArray[np.uint8]:
    """Map a descriptor's memory as uint8 [nbytes], read-only unless `writable`.

    It is unmapped with the last array over it. Raises OSError.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    is_huge = os.fstat(fd).st_blksize >= HUGE_NBYTES  # of reserved huge pages, to which the kernel aligns by itself
    if is_huge or nbytes < HUGE_NBYTES:
        return np.frombuffer(mmap.mmap(fd, nbytes, prot=protection), dtype=np.uint8)
    # The mapping replaces the aligned part of a larger one, which owns the address range throughout its life.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    room = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_NBYTES, flags=flags, prot=protection), dtype=np.uint8)
    address = int(room.ctypes.data)
    skipped = -address % HUGE_NBYTES
    at = _libc().mmap(address + skipped, nbytes, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
    if at != address + skipped:
        error = _error()
        _never_unmapped.append(room)
        raise error
    return room[skipped : skipped + nbytes]


def populate(address: int, nbytes: int) -> bool:
    """Have the kernel allocate the pages of a writable mapping, keeping contents. Returns False if it cannot."""
    first = address // mmap.PAGESIZE * mmap.PAGESIZE
    return bool(_libc().madvise(first, address + nbytes - first, _MADV_POPULATE_WRITE) == 0)


def give_back(fd: int, start: int, nbytes: int) -> None:
    """Remove the whole pages in [start, start + nbytes) of a memfd, from all mappings too. Raises OSError."""
    first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < end and _libc().fallocate(fd, _FALLOC_PUNCH_HOLE, first, end - first):
        raise _error()


def advise_huge(address: int, nbytes: int) -> None:
    """Request huge pages at first use, where the system's setting of transparent huge pages is `madvise`."""
    _libc().madvise(address, nbytes, mmap.MADV_HUGEPAGE)


def collapse(address: int, nbytes: int) -> int:
    """Convert a writable mapping to huge pages; both arguments are multiples of HUGE_NBYTES. Returns converted bytes.

    Contents are kept. Pages that do not exist yet are only cleared, 10 times as fast as populating them with small
    pages. Works under every setting of transparent huge pages. Fewer than `nbytes` are converted if the kernel does not
    have the call, or cannot convert a whole step because no huge page is free or a small one is pinned.
    """
    joined = 0
    for at in range(address, address + nbytes, _STEP_NBYTES):
        step = min(_STEP_NBYTES, address + nbytes - at)
        for page in range(at, at + step, HUGE_NBYTES):
            populate(page, 1)  # the kernel collapses only ranges with at least one page
        if _libc().madvise(at, step, _MADV_COLLAPSE) == 0:
            joined += step
    return joined


@cache
def can_collapse() -> bool:
    """Return True if this kernel can make huge pages of shared memory on request."""
    fd = os.memfd_create("moonpool-probe", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, HUGE_NBYTES)
        probe = mapped(fd, HUGE_NBYTES, writable=True)
        return collapse(int(probe.ctypes.data), HUGE_NBYTES) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def _error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    return libc
