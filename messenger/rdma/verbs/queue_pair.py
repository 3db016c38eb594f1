"""One reliable connection of a rail: its states from INIT to its end, and the accounting of its send queue.

The connection's lock guards all state, except that `ring` and `fail` are safe at any time before `close`. A request:
built and numbered (`posted`) under the lock ── handed to the device (`ring`) ── completed (`done`), in order.
"""

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from messenger.errors import ProtocolError
from messenger.rdma.policy.facts import Rail
from messenger.rdma.verbs import abi
from messenger.rdma.verbs.completions import CompletionQueue
from messenger.rdma.verbs.device import Device
from messenger.rdma.verbs.doorbell import Doorbell
from messenger.rdma.verbs.functions import check_layout, post_send_of
from messenger.rdma.work import Singles, Work

DEPTH = 1024
_RETRIES = 6
"""Retransmissions of unanswered packets before the rail has failed; soft-RoCE interprets 7 as unlimited."""
_TIMEOUT_UNIT_S = 4.096e-6
_RNR_TIMER_CODE = 12
_RNR_RETRIES = 6
"""Retries if the peer has no receive request. Credits prevent that, so only a faulty peer uses them up."""


@dataclass(frozen=True)
class RemoteQueuePair:
    """Number and first packet sequence number of the peer's queue pair. Raises ProtocolError if out of range."""

    qp_num: int
    psn: int

    def __post_init__(self) -> None:
        if not (0 < self.qp_num < 1 << 24 and 0 <= self.psn < 1 << 24):
            raise ProtocolError(f"invalid queue pair: number {self.qp_num}, first packet {self.psn}")


class QueuePair:
    """A queue pair for one thread at a time, except that `ring` and `fail` are safe at any time before `close`."""

    def __init__(self, device: Device, queue: CompletionQueue) -> None:
        """Create the queue pair. Raises OSError if the device has no more resources, RdmaUnavailable for an
        incompatible pyverbs.
        """
        from pyverbs.qp import QP, QPCap, QPInitAttr

        self.device = device
        self.depth = min(DEPTH, device.limits.max_qp_wr)
        cap = QPCap(
            max_send_wr=self.depth, max_recv_wr=0, max_send_sge=device.limits.max_sge, max_recv_sge=0, max_inline_data=0
        )
        with device.naming("a queue pair"):
            attributes = QPInitAttr(
                qp_type=abi.QPT_RC, scq=queue.cq, rcq=queue.cq, srq=device.srq, cap=cap, sq_sig_all=0
            )
            self._qp: Any = QP(device.pd, attributes)
        check_layout(self._qp, queue.cq)
        self._doorbell = Doorbell(post_send_of(self._qp), device.name)
        self.unrung = self._doorbell.made
        """Chains that `ring` will post."""
        self._singles = Singles(self.depth)
        self.local = RemoteQueuePair(self._qp.qp_num, secrets.randbits(24))
        self.posted = 0
        self.done = 0
        self.connected = False
        self.failed = False
        self._signalled = 0

    @property
    def is_usable(self) -> bool:
        """True if it is connected and has not failed."""
        return self.connected and not self.failed

    @property
    def asked(self) -> int:
        """Number of the last signalled request."""
        return self._signalled

    @property
    def room(self) -> int:
        """Number of work requests that may be posted now."""
        return self.depth - (self.posted - self.done)

    def connect(self, rail: Rail, remote_rail: Rail, remote: RemoteQueuePair, mtu: int) -> None:
        """Move through INIT, RTR and RTS. Raises OSError."""
        from pyverbs.addr import GID, AHAttr, GlobalRoute
        from pyverbs.qp import QPAttr

        with self.device.naming("a connection"):
            attributes = QPAttr(port_num=rail.port)
            attributes.qp_access_flags = abi.ACCESS_LOCAL_WRITE | abi.ACCESS_REMOTE_WRITE | abi.ACCESS_REMOTE_READ
            if rail.is_infiniband:
                attributes.ah_attr = AHAttr(dlid=remote_rail.lid, port_num=rail.port)
            else:
                route = GlobalRoute(dgid=GID(_gid_text(remote_rail.gid)), sgid_index=rail.gid_index, hop_limit=64)
                attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=rail.port)
            attributes.path_mtu = abi.MTU_CODES[mtu]
            attributes.dest_qp_num = remote.qp_num
            attributes.rq_psn, attributes.sq_psn = remote.psn, self.local.psn
            attributes.max_rd_atomic = attributes.max_dest_rd_atomic = self.device.limits.max_reads
            attributes.min_rnr_timer, attributes.rnr_retry = _RNR_TIMER_CODE, _RNR_RETRIES
            attributes.timeout, attributes.retry_cnt = timeout_code(self.device.silence_s), _RETRIES
            self._qp.to_rts(attributes)
        self.connected = True

    def post(self, work: Work) -> int:
        """Add requests, for which there must be room, for the next `ring`. Returns the number of the last one."""
        requests = work.requests
        count = len(requests)
        requests["wr_id"] = np.arange(self.posted + 1, self.posted + 1 + count)
        # Unsignalled requests leave the queue with the next signalled one, so one must come in time.
        if self.posted + count - self._signalled >= self.depth // 4:
            requests["send_flags"][-1] |= abi.SEND_SIGNALED
        if requests["send_flags"][-1] & abi.SEND_SIGNALED:
            self._signalled = self.posted + count
        first = int(requests.ctypes.data)
        self._doorbell.add(first, first + (count - 1) * abi.SEND_WR.itemsize, work)
        self.posted += count
        return self.posted

    def post_one(
        self,
        slice_: tuple[int, int, int] | None,
        *,
        opcode: int,
        signalled: bool = False,
        solicited: bool = False,
        imm: int = 0,
        remote_address: int = 0,
        rkey: int = 0,
    ) -> int:
        """Add a request of one slice (address, bytes, lkey), or of none, for the next `ring`. Returns its number.

        `solicited` wakes a peer that sleeps for solicited completions only.
        """
        number = self.posted + 1
        flags = abi.SEND_SOLICITED if solicited else 0
        if signalled or number - self._signalled >= self.depth // 4:
            flags |= abi.SEND_SIGNALED
            self._signalled = number
        address = self._singles.fill(
            number, slice_, opcode=opcode, flags=flags, imm=imm, remote_address=remote_address, rkey=rkey
        )
        self._doorbell.add(address, address, None)
        self.posted = number
        return number

    def ring(self) -> bool:
        """Hand posted requests to the device, as `Doorbell.ring`. Returns True if requests are left. Raises OSError."""
        return self._doorbell.ring()

    def bind(self, window: Any, registration: Any, address: int, nbytes: int, access: int) -> tuple[int, int]:
        """Post the binding of a memory window. Returns (its key, the number of the request). Raises OSError."""
        from pyverbs.mr import MWBindInfo
        from pyverbs.wr import SendWR

        request = SendWR(wr_id=self.posted + 1, opcode=abi.WR_BIND_MW, num_sge=0, send_flags=abi.SEND_SIGNALED)
        try:
            request.set_bind_wr(window, MWBindInfo(registration, address, nbytes, access))
            with self.device.naming("a bound memory window"):
                self._doorbell.alone(lambda: self._qp.post_send(request))
            key = int(request.rkey)
        finally:
            request.close()
        self.posted += 1
        self._signalled = self.posted
        return key, self.posted

    def drain_mark(self) -> int:
        """Post an empty signalled request, which completes after all earlier ones, and return its number."""
        number = self.post_one(None, opcode=abi.WR_RDMA_WRITE, signalled=True)
        self.ring()
        return number

    def fail(self) -> None:
        """Move to ERR: the hardware neither sends nor receives for it any more, and posted requests are flushed.

        Raises OSError if the device fails to do so.
        """
        from pyverbs.pyverbs_error import PyverbsError
        from pyverbs.qp import QPAttr

        if self.failed:
            return
        self.failed = True
        self._doorbell.clear()
        try:
            self._qp.modify(QPAttr(qp_state=abi.QPS_ERR), abi.QP_STATE)
        except PyverbsError as error:
            if not self._is_at_rest():
                raise OSError(f"a queue pair of {self.device.name} cannot be stopped: {error}") from error

    def _is_at_rest(self) -> bool:
        """Return True if it is in RESET, as created: then it moves nothing, and cannot be moved to ERR."""
        from pyverbs.pyverbs_error import PyverbsError

        try:
            attributes, _ = self._qp.query(abi.QP_STATE)
        except PyverbsError:
            return False
        return int(attributes.qp_state) == abi.QPS_RESET

    def close(self) -> None:
        """Destroy the queue pair; it does not touch memory afterwards."""
        self._doorbell.close()
        self._qp.close()


def timeout_code(silence_s: float) -> int:
    """Return the longest timeout, as the code of 4.096 us * 2^code, with which all retries take at most `silence_s`."""
    tries = silence_s / (_RETRIES + 1) / _TIMEOUT_UNIT_S
    return min(max(int(tries).bit_length() - 1, 1), 31)


def _gid_text(gid: bytes) -> str:
    digits = gid.hex()
    return ":".join(digits[first : first + 4] for first in range(0, 32, 4))


Requests = npt.NDArray[np.void]
