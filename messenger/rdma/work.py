"""Work requests from slice lists, as arrays; pure. A thousand slices cost as many nanoseconds each as one call does."""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from messenger.rdma.verbs import abi
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows

Requests = npt.NDArray[np.void]

_ONE: Final = np.dtype([("request", abi.SEND_WR), ("slice", abi.SGE)])
_SLICE_AT: Final = abi.SEND_WR.itemsize


@dataclass(frozen=True, eq=False)
class Work:
    """A chain of requests (abi.SEND_WR), linked by address, with the slices (abi.SGE) they point to.

    Both must stay alive and in place until they are posted; then the device has its own copy.
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
        """Writes or reads of int64 [n, 3] rows (local_offset, remote_offset, nbytes).

        Rows that follow each other in the remote memory share a request, which gathers (or scatters) them locally.
        """
        flags = abi.SEND_SIGNALED if signalled else 0
        if len(rows) == 1:
            offset, remote, nbytes = rows[0].tolist()
            near = (offset + local_address, nbytes, lkey)
            return cls._one(near, opcode=opcode, flags=flags, imm=0, remote_address=remote + remote_address, rkey=rkey)
        slices = np.empty(len(rows), dtype=abi.SGE)
        slices["addr"] = rows[:, LOCAL] + local_address
        slices["length"] = rows[:, NBYTES]
        slices["lkey"] = lkey
        firsts = _firsts(rows, max_sge)
        requests = np.zeros(len(firsts), dtype=abi.SEND_WR)
        requests["sg_list"] = firsts * abi.SGE.itemsize + slices.ctypes.data
        requests["num_sge"] = np.diff(firsts, append=len(rows))
        requests["opcode"] = opcode
        requests["remote_addr"] = rows[firsts, REMOTE] + remote_address
        requests["rkey"] = rkey
        return cls(_linked(requests, flags), slices)

    @classmethod
    def frame(cls, *, address: int, nbytes: int, lkey: int, remote_address: int, rkey: int, number: int) -> "Work":
        """A write that tells the peer of itself."""
        return cls._one(
            (address, nbytes, lkey), opcode=abi.WR_RDMA_WRITE_WITH_IMM, flags=0, imm=number % (1 << 32),
            remote_address=remote_address, rkey=rkey,
        )  # fmt: skip

    @classmethod
    def empty_write(cls) -> "Work":
        """A signalled write of nothing."""
        requests = np.zeros(1, dtype=abi.SEND_WR)
        return cls(_linked(requests, abi.SEND_SIGNALED), np.zeros(0, dtype=abi.SGE))

    @classmethod
    def _one(
        cls, near: tuple[int, int, int], *, opcode: int, flags: int, imm: int, remote_address: int, rkey: int
    ) -> "Work":
        """A request of one slice, which most batches come down to, at a sixth of what arrays cost to set up."""
        memory = np.zeros(1, dtype=_ONE)
        slice_address = memory.ctypes.data + _SLICE_AT
        memory[0] = ((0, 0, slice_address, 1, opcode, flags, imm, remote_address, rkey), near)
        return cls(memory["request"], memory["slice"])


def _firsts(rows: Rows, max_sge: int) -> npt.NDArray[np.int64]:
    """Where requests begin: at every row that does not follow its predecessor, and at every `max_sge`-th of a run."""
    index = np.arange(len(rows))
    breaks = np.ones(len(rows), dtype=bool)
    breaks[1:] = rows[1:, REMOTE] != rows[:-1, REMOTE] + rows[:-1, NBYTES]
    run_starts = np.maximum.accumulate(np.where(breaks, index, 0))
    return np.flatnonzero((index - run_starts) % max_sge == 0)


def _linked(requests: Requests, last_flags: int) -> Requests:
    addresses = requests.ctypes.data + abi.SEND_WR.itemsize * np.arange(1, len(requests))
    requests["next"][:-1] = addresses
    requests["send_flags"][-1] = last_flags
    return requests
