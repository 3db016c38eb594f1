"""Work requests from slice lists, as arrays; pure. A thousand slices cost as many nanoseconds each as one call does."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from messenger.rdma.verbs import abi
from messenger.slices import LOCAL, NBYTES, REMOTE, Rows

Requests = npt.NDArray[np.void]


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
        return cls(_linked(requests, signalled=signalled), slices)

    @classmethod
    def frame(cls, *, address: int, nbytes: int, lkey: int, remote_address: int, rkey: int, number: int) -> "Work":
        """A write that tells the peer of itself."""
        slices = np.array([(address, nbytes, lkey)], dtype=abi.SGE)
        requests = np.zeros(1, dtype=abi.SEND_WR)
        requests[0] = (
            0, 0, slices.ctypes.data, 1, abi.WR_RDMA_WRITE_WITH_IMM, 0, number % (1 << 32), remote_address, rkey,
        )  # fmt: skip
        return cls(requests, slices)

    @classmethod
    def empty_write(cls) -> "Work":
        """A signalled write of nothing."""
        requests = np.zeros(1, dtype=abi.SEND_WR)
        return cls(_linked(requests, signalled=True), np.zeros(0, dtype=abi.SGE))


def _firsts(rows: Rows, max_sge: int) -> npt.NDArray[np.int64]:
    """Where requests begin: at every row that does not follow its predecessor, and at every `max_sge`-th of a run."""
    if len(rows) == 1:
        return np.zeros(1, dtype=np.int64)
    index = np.arange(len(rows))
    breaks = np.ones(len(rows), dtype=bool)
    breaks[1:] = rows[1:, REMOTE] != rows[:-1, REMOTE] + rows[:-1, NBYTES]
    run_starts = np.maximum.accumulate(np.where(breaks, index, 0))
    return np.flatnonzero((index - run_starts) % max_sge == 0)


def _linked(requests: Requests, *, signalled: bool) -> Requests:
    addresses = requests.ctypes.data + abi.SEND_WR.itemsize * np.arange(1, len(requests))
    requests["next"][:-1] = addresses
    if signalled:
        requests["send_flags"][-1] = abi.SEND_SIGNALED
    return requests
