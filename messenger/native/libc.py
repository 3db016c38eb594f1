"""The system's calls and the plain loads and stores that compiled loops use; addresses are int64 of this process.

The calls are bound by name, so what is compiled with them can be cached on disk.
"""

from typing import Any

from numba import types
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
    "clock_gettime",
    "errno_location",
    "getsockopt",
    "load_i32",
    "load_i64",
    "load_u32",
    "load_u64",
    "memmove",
    "pointer_f64",
    "pointer_i64",
    "pointer_u8",
    "pointer_u64",
    "poll",
    "recv",
    "recvmsg",
    "send",
    "sendmsg",
    "setsockopt",
    "store_i32",
    "store_i64",
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

# Numba wants of an intrinsic a function of the arguments' types that returns its signature and a generator of code.


def _load(of: Any, llvm_type: Any) -> Any:
    def typed(_typing: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()), align=1)

        return of(_i64), generate

    return intrinsic(typed)


def _store(of: Any, llvm_type: Any) -> Any:
    def typed(_typing: Any, _address: Any, _value: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(_i64, of), generate

    return intrinsic(typed)


def _pointer(of: Any) -> Any:
    def typed(_typing: Any, _address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(of)(_i64), generate  # type: ignore[no-untyped-call]

    return intrinsic(typed)


load_i32, load_u32 = _load(types.int32, cgutils.int32_t), _load(types.uint32, cgutils.int32_t)
load_i64, load_u64 = _load(types.int64, cgutils.intp_t), _load(types.uint64, cgutils.intp_t)
store_i32, store_i64 = _store(types.int32, cgutils.int32_t), _store(types.int64, cgutils.intp_t)
# For numba.carray, which makes an array of what is at an address.
pointer_u8, pointer_i64, pointer_u64, pointer_f64 = (
    _pointer(of) for of in (types.uint8, types.int64, types.uint64, types.float64)
)
