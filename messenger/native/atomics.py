"""Ordered loads and stores of single 64-bit words, for compiled code over memory that others write concurrently.

The names state the ordering of C11 (acquire, release, seq_cst). Words are elements of uint64 arrays, or uint64 fields
of records (aligned to 8 bytes).
"""

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = [
    "add_to_field",
    "fence_acquire",
    "fence_all",
    "fence_release",
    "load_acquire",
    "load_field_acquire",
    "store_field_release",
    "store_release",
]

# An intrinsic of Numba is a function of the arguments' types that returns the signature and a code generator.


def _load_acquire(typingctx: Any, words: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_pointer(context, builder, signature, args), "acquire", 8)

    return types.uint64(words, types.int64), generate


def _store_release(typingctx: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _pointer(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.int64, types.uint64), generate


def _load_field_acquire(typingctx: Any, record: Any, name: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_field(builder, record, name, args), "acquire", 8)

    return _if_word_field(record, name, types.uint64(record, name)), generate


def _store_field_release(typingctx: Any, record: Any, name: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[2], _field(builder, record, name, args), "release", 8)
        return context.get_dummy_value()

    return _if_word_field(record, name, types.void(record, name, types.uint64)), generate


def _add_to_field(typingctx: Any, record: Any, name: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _field(builder, record, name, args), cgutils.intp_t(1), "seq_cst")

    return _if_word_field(record, name, types.uint64(record, name)), generate


def _if_word_field(record: Any, name: Any, signature: Any) -> Any:
    """Return the signature if `name` is a literal that names an aligned uint64 field of the record, else None."""
    if not isinstance(record, types.Record) or not isinstance(name, types.StringLiteral):
        return None
    field = name.literal_value
    is_word = record.typeof(field) == types.uint64 and record.offset(field) % 8 == 0
    return signature if is_word else None


def _field(builder: Any, record: Any, name: Any, args: Any) -> Any:
    offset = record.offset(name.literal_value)
    return cgutils.get_record_member(builder, args[0], offset, cgutils.intp_t)  # type: ignore[no-untyped-call]


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
"""`(words, index)`: load words[index] of a uint64 array; later reads happen after it."""
store_release: Any = intrinsic(_store_release)
"""`(words, index, value)`: store words[index] = value; earlier writes happen before it."""
load_field_acquire: Any = intrinsic(prefer_literal=True)(_load_field_acquire)
"""`(record, "name")`: load a uint64 field of a record, as `load_acquire`."""
store_field_release: Any = intrinsic(prefer_literal=True)(_store_field_release)
"""`(record, "name", value)`: store a uint64 field of a record, as `store_release`."""
add_to_field: Any = intrinsic(prefer_literal=True)(_add_to_field)
"""`(record, "name")`: increment a uint64 field of a record; a full fence. Returns its value before."""
fence_acquire: Any = intrinsic(_fence_acquire)
"""`()`: earlier reads happen before any later read or write."""
fence_release: Any = intrinsic(_fence_release)
"""`()`: later writes happen after any earlier read or write."""
fence_all: Any = intrinsic(_fence_all)
"""`()`: earlier writes are visible to all threads before any later read (sequentially consistent)."""
