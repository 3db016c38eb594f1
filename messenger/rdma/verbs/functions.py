"""Addresses of libibverbs objects, and the calls that its headers inline: post_send, poll_cq, req_notify_cq.

A pyverbs object stores the pointer to its C structure as its first field, right after its base class. It is read from
there and compared with what pyverbs reports about the object, without dereferencing it, so that an incompatible pyverbs
is detected before anything is called.
"""

import ctypes
import os
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from messenger.errors import RdmaUnavailable
from messenger.rdma.verbs import abi

_Call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)  # releases the GIL
# These keep the GIL: releasing it costs more than the call, and getting it back may take long.
_Poll = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_Notify = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def address_of(thing: Any) -> int:
    """Return the address of the C structure of a pyverbs object."""
    from pyverbs.base import PyverbsCM

    return int(ctypes.c_uint64.from_address(id(thing) + PyverbsCM.__basicsize__).value)


def check_layout(qp: Any, cq: Any) -> None:
    """Raise RdmaUnavailable unless the addresses found belong to these objects."""
    found = _peek(address_of(qp) + abi.QP_NUM), _peek(address_of(cq) + abi.CQ_CQE)
    if found != (qp.qp_num, cq.cqe):
        raise RdmaUnavailable(
            "the installed pyverbs has an unknown object layout: install the distribution's python3-pyverbs (44 or "
            "later), or use tcp"
        )


def channel_fd(channel: Any) -> int:
    """Return the descriptor of a completion channel, which the channel owns."""
    return int(ctypes.c_int.from_address(address_of(channel) + abi.CHANNEL_FD).value)


def post_send_of(qp: Any) -> Callable[[int], int]:
    """Return `post(address of the first work request)` for the queue pair; it returns an errno."""
    address = address_of(qp)
    call = _Call(_operation(_pointer(address + abi.QP_CONTEXT), abi.OP_POST_SEND))
    bad = ctypes.c_void_p()
    bad_address = ctypes.addressof(bad)

    def post(first: int, _bad: ctypes.c_void_p = bad) -> int:
        return int(call(address, first, bad_address))

    return post


def polling_of(cq: Any) -> tuple[Callable[[int, int], int], Callable[[bool], int]]:
    """Return `poll(count, address of WCs)` and `arm(solicited_only)` of a completion queue."""
    address = ctypes.c_void_p(address_of(cq))
    context = _pointer(address_of(cq))
    poll, notify = _Poll(_operation(context, abi.OP_POLL_CQ)), _Notify(_operation(context, abi.OP_REQ_NOTIFY_CQ))
    return partial(poll, address), partial(notify, address)


def _operation(context: int, index: int) -> int:
    return _pointer(context + abi.CONTEXT_OPS + 8 * index)


def _pointer(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _peek(address: int) -> int:
    """Return the 32 bits at an address that may be invalid; -1 then."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            read = os.pread(memory.fileno(), 4, address)
    except OSError:
        return -1
    return int(struct.unpack("<I", read)[0]) if len(read) == 4 else -1
