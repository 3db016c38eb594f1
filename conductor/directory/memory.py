"""Arrays that grow without being copied: their pages are mapped elsewhere. What lies beyond the end is zeros."""

import contextlib
import mmap
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["GrowingArray"]

Scalar = TypeVar("Scalar", bound=np.generic)


class GrowingArray(Generic[Scalar]):
    """One-dimensional. Memory that was never written takes no room, so it may be asked for generously."""

    def __init__(self, dtype: type[Scalar], size: int) -> None:
        self._dtype = np.dtype(dtype)
        self._memory = _map(size * self._dtype.itemsize)

    @property
    def array(self) -> NDArray[Scalar]:
        """All of it, for use until the next `grow`: then nobody may still have it."""
        return np.frombuffer(self._memory, self._dtype)

    def grow(self, size: int) -> None:
        """Make it longer. Raises BufferError when somebody still has the array."""
        nbytes = size * self._dtype.itemsize
        try:
            self._memory.resize(nbytes)
        except (SystemError, ValueError):  # a system without mremap
            former, self._memory = self._memory, _map(nbytes)
            self._memory[: len(former)] = former[:]
            former.close()
        else:
            _prefer_large_pages(self._memory)


def _map(nbytes: int) -> Any:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _prefer_large_pages(memory)
    return memory


def _prefer_large_pages(memory: Any) -> None:
    """A lookup is one read at a random address: with small pages, most of its time goes into finding the page."""
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
