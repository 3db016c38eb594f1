"""Structures and constants of libibverbs for work requests and completions, which are a stable ABI.

pyverbs creates and destroys the long-lived objects. Work requests and completions, of which there are many, are built
and read as arrays: one call posts thousands of slices at a few nanoseconds each, whereas pyverbs creates two objects
per slice (and, in the versions that distributions ship, never frees their lists). Source: infiniband/verbs.h,
IBVERBS_1.1.
"""

import struct
from typing import Final

import numpy as np

SEND_WR: Final = np.dtype(
    {
        "names": ["wr_id", "next", "sg_list", "num_sge", "opcode", "send_flags", "imm_data", "remote_addr", "rkey"],
        "formats": ["<u8", "<u8", "<u8", "<i4", "<i4", "<u4", ">u4", "<u8", "<u4"],
        "offsets": [0, 8, 16, 24, 28, 32, 36, 40, 48],
        "itemsize": 128,
    }
)
SGE: Final = np.dtype([("addr", "<u8"), ("length", "<u4"), ("lkey", "<u4")])
WC: Final = struct.Struct("<Qi8xI24x")
"""(wr_id, status, byte_len)"""

WR_RDMA_WRITE: Final = 0
WR_RDMA_WRITE_WITH_IMM: Final = 1
WR_RDMA_READ: Final = 4
WR_BIND_MW: Final = 8

SEND_SIGNALED: Final = 2
SEND_SOLICITED: Final = 4

ACCESS_LOCAL_WRITE: Final = 1
ACCESS_REMOTE_WRITE: Final = 2
ACCESS_REMOTE_READ: Final = 4
ACCESS_MW_BIND: Final = 16

RECEIVE_ID: Final = 1 << 63
"""The wr_id of all receive requests; send requests are numbered from 1."""

WC_SUCCESS: Final = 0
WC_REM_ACCESS_ERR: Final = 10
WC_FLUSHED: Final = 5
WC_RECV_RDMA_WITH_IMM: Final = 129

MW_TYPE_2: Final = 2
CAN_WINDOW_2: Final = 1 << 23 | 1 << 24
"""Device capabilities: memory windows of type 2A or 2B."""

QPT_RC: Final = 2
QPS_RESET: Final = 0
QPS_ERR: Final = 6
QP_STATE: Final = 1

MTU_CODES: Final = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}

# Offsets of fields that pyverbs does not expose.
CONTEXT_OPS: Final = 8
OP_POLL_CQ, OP_REQ_NOTIFY_CQ, OP_POST_SEND = 11, 12, 25
QP_CONTEXT, QP_NUM = 0, 52
CQ_CQE: Final = 28
CHANNEL_FD: Final = 8

_STATUS_NAMES: Final = (
    "success", "local length error", "local queue pair error", "local context error", "local protection error",
    "flushed", "memory window not bound", "bad response", "local access error", "invalid request at the peer",
    "access denied by the peer's hardware", "operation failed at the peer", "no answer from the peer's port",
    "the peer's receive queue is empty",
)  # fmt: skip


def status_name(status: int) -> str:
    """Return the name of a completion's status."""
    return _STATUS_NAMES[status] if status < len(_STATUS_NAMES) else f"status {status}"
