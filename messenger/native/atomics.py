"""Ordered loads and stores of single words, for compiled loops over memory that another process writes meanwhile."""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["fence_acquire", "fence_all", "fence_release", "load_acquire", "store_release"]

# Numba wants of an intrinsic a function of the arguments' types that returns its signature and a generator of code.


def _load_acquire(typingctx: Any, words: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "acquire", 8)

    return types.uint64(words, types.int64), generate


def _store_release(typingctx: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.uint64), generate


def _fence_acquire(typingctx: Any) -> Any:
    return types.void(), _fence("acquire")


def _fence_release(typingctx: Any) -> Any:
    return types.void(), _fence("release")


def _fence_all(typingctx: Any) -> Any:
    return types.void(), _fence("seq_cst")


def _fence(ordering: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence(ordering)
        return context.get_dummy_value()

    return generate


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    array = context.make_array(signature.args[0])(context, builder, args[0])
    return cgutils.gep_inbounds(builder, array.data, args[1])  # type: ignore[no-untyped-call]


load_acquire: Any = intrinsic(_load_acquire)
"""`(words, index)`: words[index] of a uint64 array; nothing after it is read before it."""
store_release: Any = intrinsic(_store_release)
"""`(words, index, value)`: words[index] = value; nothing before it is written after it."""
fence_acquire: Any = intrinsic(_fence_acquire)
"""`()`: what was read before is read before anything after it."""
fence_release: Any = intrinsic(_fence_release)
"""`()`: what is written after is written after anything before it."""
fence_all: Any = intrinsic(_fence_all)
"""`()`: what was written before is seen by everyone before anything after it is read."""
