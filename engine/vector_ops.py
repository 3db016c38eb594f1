"""Loops that numba's vectoriser does poorly, as explicit vector code: whole vectors of 16 float32, nothing else.

LLVM lowers the vectors to what the machine has. Indices and counts are in floats and are not checked. numba's on-disk
cache does not notice changes of this file: touch `kernels.py` after one.
"""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic

Floats = npt.NDArray[np.float32]

cgutils: Any = untyped_cgutils  # numba ships no types for it
LANES = 16
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_CONTRACT = ("contract",)


def _emit_prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, signature, arguments, 0), ir.IntType(8).as_pointer())
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1)]  # to read, keep close, data
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *(flag.type for flag in flags)])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _emit_dot(typing_context: Any, x: Any, i: Any, y: Any, j: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second = (_address(context, builder, signature, arguments, at) for at in (0, 2))
        total = cgutils.alloca_once_value(builder, ir.Constant(_VECTOR, [0.0] * LANES))
        with cgutils.for_range(builder, _vectors(builder, arguments[4])) as loop:
            product = builder.fmul(
                _load(builder, first, loop.index), _load(builder, second, loop.index), flags=_CONTRACT
            )
            builder.store(builder.fadd(builder.load(total), product, flags=_CONTRACT), total)
        kind = ir.FunctionType(_FLOAT, [_FLOAT, _VECTOR])
        reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.vector.reduce.fadd.v16f32")
        return builder.call(reduce, [ir.Constant(_FLOAT, 0.0), builder.load(total)], fastmath=("reassoc",))

    return types.float32(x, types.intp, y, types.intp, types.intp), generate


def _emit_mix(
    typing_context: Any, y: Any, i: Any, count: Any, weights: Any, w: Any, values: Any, v: Any, rows: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out, weight, value = (_address(context, builder, signature, arguments, at) for at in (0, 3, 5))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        with cgutils.for_range(builder, _vectors(builder, arguments[2])) as column:
            total = cgutils.alloca_once_value(builder, _load(builder, out, column.index))
            builder.store(_load(builder, out, column.index), total)
            with cgutils.for_range(builder, arguments[7]) as row:
                share = builder.load(builder.gep(weight, [row.index]))
                lone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), share, ir.Constant(ir.IntType(32), 0))
                spread = builder.shuffle_vector(lone, ir.Constant(_VECTOR, ir.Undefined), lanes)
                here = builder.gep(value, [builder.mul(row.index, arguments[2])])
                product = builder.fmul(spread, _load(builder, here, column.index), flags=_CONTRACT)
                builder.store(builder.fadd(builder.load(total), product, flags=_CONTRACT), total)
            target = _vector_at(builder, out, column.index)
            builder.store(builder.load(total), target, align=4)
        return context.get_dummy_value()

    return types.void(y, types.intp, types.intp, weights, types.intp, values, types.intp, types.intp), generate


def _address(context: Any, builder: Any, signature: Any, arguments: Any, at: int) -> Any:
    """Pointer to element arguments[at + 1] of the array arguments[at]."""
    data = context.make_array(signature.args[at])(context, builder, arguments[at]).data
    return builder.gep(data, [arguments[at + 1]])


def _vectors(builder: Any, count: Any) -> Any:
    return builder.sdiv(count, ir.Constant(count.type, LANES))


def _vector_at(builder: Any, pointer: Any, index: Any) -> Any:
    moved = builder.gep(pointer, [builder.mul(index, ir.Constant(index.type, LANES))])
    return builder.bitcast(moved, _VECTOR.as_pointer())


def _load(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.load(_vector_at(builder, pointer, index), align=4)


prefetch = cast(Callable[[Floats, int], None], intrinsic(_emit_prefetch))
"""prefetch(array, i): asks for the cache line of array[i] early; never faults."""

dot = cast(Callable[[Floats, int, Floats, int, int], np.float32], intrinsic(_emit_dot))
"""dot(x, i, y, j, count): sum of x[i + k] * y[j + k] for k < count; count a multiple of 16."""

mix = cast(Callable[[Floats, int, int, Floats, int, Floats, int, int], None], intrinsic(_emit_mix))
"""mix(y, i, count, weights, w, values, v, n): y[i + k] += sum over rows r < n of
weights[w + r] * values[v + r * count + k]; count a multiple of 16."""
