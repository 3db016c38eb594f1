"""System calls and access to memory by its address, for compiled loops; addresses are int64 of this process.

The calls are bound by name, so that functions compiled with them can be cached on disk.
"""

from typing import Any

import numpy as np
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "EAGAIN",
    "EINTR",
    "MSG_CMSG_CLOEXEC",
    "MSG_DONTWAIT",
    "MSG_NOSIGNAL",
    "MSG_WAITALL",
    "POLLIN",
    "POLLRDHUP",
    "SOL_SOCKET",
    "SO_RCVBUF",
    "SO_RCVLOWAT",
    "address_of",
    "clock_gettime",
    "errno_location",
    "getsockopt",
    "load_i32",
    "memmove",
    "pointer_i64",
    "pointer_u32",
    "pointer_u64",
    "poll",
    "record_at",
    "recv",
    "recvmsg",
    "send",
    "sendmsg",
    "setsockopt",
]

EINTR, EAGAIN = 4, 11
MSG_DONTWAIT, MSG_WAITALL, MSG_NOSIGNAL, MSG_CMSG_CLOEXEC = 0x40, 0x100, 0x4000, 0x40000000
POLLIN, POLLRDHUP = 0x1, 0x2000
SOL_SOCKET, SO_RCVBUF, SO_RCVLOWAT = 1, 8, 18

_i32, _i64 = types.int32, types.int64
recv: Any = types.ExternalFunction("recv", _i64(_i32, _i64, _i64, _i32))
send: Any = types.ExternalFunction("send", _i64(_i32, _i64, _i64, _i32))
recvmsg: Any = types.ExternalFunction("recvmsg", _i64(_i32, _i64, _i32))
sendmsg: Any = types.ExternalFunction("sendmsg", _i64(_i32, _i64, _i32))
getsockopt: Any = types.ExternalFunction("getsockopt", _i32(_i32, _i32, _i32, _i64, _i64))
setsockopt: Any = types.ExternalFunction("setsockopt", _i32(_i32, _i32, _i32, _i64, _i32))
poll: Any = types.ExternalFunction("poll", _i32(_i64, _i64, _i32))
memmove: Any = types.ExternalFunction("memmove", _i64(_i64, _i64, _i64))
clock_gettime: Any = types.ExternalFunction("clock_gettime", _i32(_i32, _i64))
errno_location: Any = types.ExternalFunction("__errno_location", _i64())

# An intrinsic of Numba is a function of the arguments' types that returns the signature and a code generator.


def _pointer(of: Any) -> Any:
    def typed(_typing: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(of)(_i64), generate  # type: ignore[no-untyped-call]

    return intrinsic(typed)


def record_at(dtype: "np.dtype[np.void]") -> Any:
    """Return a function `(address) -> record` for compiled code: the record of this type at the address, in place.

    Loads and stores of a packed type's fields need no alignment; an aligned type must lie at an aligned address.
    """
    record = from_dtype(dtype)

    def typed(_typing: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(record))

        return record(_i64), generate

    return intrinsic(typed)


def _load_i32(_typing: Any, _address: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load(builder.inttoptr(args[0], cgutils.int32_t.as_pointer()), align=4)

    return types.int32(_i64), generate


def _address_of(_typing: Any, record: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.ptrtoint(args[0], cgutils.intp_t)

    return _i64(record), generate


load_i32: Any = intrinsic(_load_i32)
"""`(address)`: the int32 at an address."""
address_of: Any = intrinsic(_address_of)
"""`(record)`: the address of a record."""
# For numba.carray, which makes an array of the memory at an address.
pointer_i64, pointer_u64, pointer_u32 = _pointer(types.int64), _pointer(types.uint64), _pointer(types.uint32)
