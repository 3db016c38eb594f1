"""Work requests built from slice lists as arrays, at a few nanoseconds per slice. No calls of verbs."""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from messenger.rdma.verbs import abi
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows

Requests = npt.NDArray[np.void]

# A request (abi.SEND_WR), padded, and behind it its slice (abi.SGE).
_SINGLE: Final = struct.Struct("<QQQiiI4sQI76xQII")
_SLICE_AT: Final = abi.SEND_WR.itemsize
# A request as 64-bit words, which are several times faster to fill than fields: two fields of 32 bits share a word, the
# first one in its lower half.
_WORDS: Final = abi.SEND_WR.itemsize // 8
_NEXT, _SLICES, _COUNT_AND_OPCODE, _FLAGS, _REMOTE, _KEY = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True, eq=False)
class Work:
    """A chain of requests (abi.SEND_WR), linked by address, with the slices (abi.SGE) that they point to.

    Both must stay alive and in place until they are posted; afterwards the device has its own copy.
    """

    requests: Requests
    slices: Requests

    @classmethod
    def moves(
        cls,
        rows: Rows,
        *,
        opcode: int,
        local_address: int,
        lkey: int,
        remote_address: int,
        rkey: int,
        max_sge: int,
        signalled: bool = True,
    ) -> "Work":
        """Build writes or reads of int64 [n, 3] rows (local_offset, remote_offset, nbytes).

        Rows that are adjacent in the remote memory share a request, which gathers (or scatters) them locally.
        """
        flags = abi.SEND_SIGNALED if signalled else 0
        words = rows.view(np.uint64)
        slices = np.empty((len(rows), 2), dtype=np.uint64)
        np.add(words[:, LOCAL], np.uint64(local_address), out=slices[:, 0])
        np.add(words[:, NBYTES], np.uint64(lkey << 32), out=slices[:, 1])
        firsts, counts = _requests(rows, max_sge)
        requests = np.zeros((len(firsts), _WORDS), dtype=np.uint64)
        requests[:, _SLICES] = firsts * abi.SGE.itemsize + int(slices.ctypes.data)
        requests[:, _COUNT_AND_OPCODE] = counts + (opcode << 32)
        np.add(words[firsts, REMOTE], np.uint64(remote_address), out=requests[:, _REMOTE])
        requests[:, _KEY] = rkey
        requests[-1, _FLAGS] = flags
        own = int(requests.ctypes.data)
        size = abi.SEND_WR.itemsize
        requests[:-1, _NEXT] = np.arange(own + size, own + size * len(requests), size)
        return cls(requests.view(abi.SEND_WR)[:, 0], slices.view(abi.SGE)[:, 0])


class Singles:
    """Ring of preallocated requests with at most one slice, the most frequent kind; a tenth of the cost of arrays.

    An entry is reused after `depth` requests, when the device has its own copy.
    """

    def __init__(self, depth: int) -> None:
        memory = np.zeros(depth * _SINGLE.size, dtype=np.uint8)
        self._depth = depth
        self._address = int(memory.ctypes.data)
        self._view = memoryview(memory)  # type: ignore[arg-type]

    def fill(
        self,
        number: int,
        slice_: tuple[int, int, int] | None,
        *,
        opcode: int,
        flags: int,
        imm: int = 0,
        remote_address: int = 0,
        rkey: int = 0,
    ) -> int:
        """Fill in the request `number` and return its address. `slice_` is (address, bytes, lkey)."""
        place = number % self._depth * _SINGLE.size
        own = self._address + place
        address, nbytes, lkey = slice_ or (0, 0, 0)
        _SINGLE.pack_into(
            self._view, place, number, 0, own + _SLICE_AT, slice_ is not None, opcode, flags,
            (imm & 0xFFFFFFFF).to_bytes(4, "big"), remote_address, rkey, address, nbytes, lkey,
        )  # fmt: skip
        return own


def _requests(rows: Rows, max_sge: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | int]:
    """Return (indices of the rows at which requests begin, number of rows per request).

    A request begins at every row that is not adjacent to its predecessor, and at every `max_sge`-th row of a run.
    """
    index = np.arange(len(rows))
    follows = rows[1:, REMOTE] == rows[:-1, REMOTE] + rows[:-1, NBYTES]
    if not follows.any():
        return index, 1
    run_starts = index.copy()
    run_starts[1:][follows] = 0
    np.maximum.accumulate(run_starts, out=run_starts)
    firsts = np.flatnonzero((index - run_starts) % max_sge == 0)
    counts = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=counts[:-1])
    counts[-1] = len(rows) - firsts[-1]
    return firsts, counts
