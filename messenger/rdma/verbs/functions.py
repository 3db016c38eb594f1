"""Where libibverbs keeps an object, and the calls that its headers inline: post_send, poll_cq, req_notify_cq.

A pyverbs object keeps the pointer to its C structure as its first field, right behind its base class. It is read from
there and checked against what pyverbs itself tells of the object, without following it, so that a pyverbs of another
make is found out before anything is called.
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
# Too short to let go of the GIL: it costs more than the call, and may be long in coming back.
_Poll = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
_Notify = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)


def address_of(thing: Any) -> int:
    """The address of the C structure behind a pyverbs object."""
    from pyverbs.base import PyverbsCM

    return int(ctypes.c_uint64.from_address(id(thing) + PyverbsCM.__basicsize__).value)


def check_layout(qp: Any, cq: Any) -> None:
    """Raises RdmaUnavailable unless the addresses found are those of these objects."""
    found = _peek(address_of(qp) + abi.QP_NUM), _peek(address_of(cq) + abi.CQ_CQE)
    if found != (qp.qp_num, cq.cqe):
        raise RdmaUnavailable(
            "the installed pyverbs lays its objects out in a way that is not known here: install the "
            "distribution's python3-pyverbs (44 or later), or use tcp"
        )


def channel_fd(channel: Any) -> int:
    """The descriptor of a completion channel; it stays the channel's."""
    return int(ctypes.c_int.from_address(address_of(channel) + abi.CHANNEL_FD).value)


def post_send_of(qp: Any) -> Callable[[int], int]:
    """`post(address of the first work request)` for this queue pair; returns an errno."""
    address = address_of(qp)
    call = _Call(_operation(_pointer(address + abi.QP_CONTEXT), abi.OP_POST_SEND))
    bad = ctypes.c_void_p()
    bad_address = ctypes.addressof(bad)

    def post(first: int, _bad: ctypes.c_void_p = bad) -> int:
        return int(call(address, first, bad_address))

    return post


def polling_of(cq: Any) -> tuple[Callable[[int, int], int], Callable[[bool], int]]:
    """(`poll(how many, address of WCs)`, `arm(for solicited ones alone)`) of a completion queue."""
    address = ctypes.c_void_p(address_of(cq))
    context = _pointer(address_of(cq))
    poll, notify = _Poll(_operation(context, abi.OP_POLL_CQ)), _Notify(_operation(context, abi.OP_REQ_NOTIFY_CQ))
    return partial(poll, address), partial(notify, address)


def _operation(context: int, index: int) -> int:
    return _pointer(context + abi.CONTEXT_OPS + 8 * index)


def _pointer(address: int) -> int:
    return int(ctypes.c_uint64.from_address(address).value)


def _peek(address: int) -> int:
    """The 32 bits at an address that may be none; -1 then."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            read = os.pread(memory.fileno(), 4, address)
    except OSError:
        return -1
    return int(struct.unpack("<I", read)[0]) if len(read) == 4 else -1
