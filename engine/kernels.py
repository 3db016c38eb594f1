"""CPU kernels in float32, compiled by numba: all of a step.

All kernels are in one file because numba's on-disk cache notices changes of a kernel's own file only, not of the
functions that it calls. They release the GIL, allocate nothing, and compute each row by the same operations in the same
order for any batch. Only dot products and sums may be reassociated (`_SUM`), in a pattern fixed at compile time.

The first part is explicit vector code for loops that numba vectorises poorly: vectors of 16 float32, which LLVM lowers
to the machine's vectors. Indices and counts are in floats and are not checked.

Within a layer of a slot the order is [kv_head][k|v][token][head_dim]; kernels read and write it in place. Of an int8
cache, rows are written as `engine.int8_rows` defines, and the slots of one layer are decoded before attention reads
them: int8 arithmetic is emulated in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils as untyped_cgutils
from numba.extending import intrinsic

Floats = npt.NDArray[np.float32]
Stored = npt.NDArray[np.float32] | npt.NDArray[np.int8] | npt.NDArray[np.int16] | npt.NDArray[np.uint16]
"""Weights as they are stored: floats, integers, or the bits of float16 (int16) and bfloat16 (uint16)."""

cgutils: Any = untyped_cgutils  # numba ships no types for it
LANES = 16
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_CONTRACT_FLAG = ("contract",)
CHAINS = 8  # sums of products that do not wait for each other


def _emit_prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.bitcast(_address(context, builder, signature, arguments, 0), ir.IntType(8).as_pointer())
        flags = [ir.Constant(ir.IntType(32), flag) for flag in (0, 3, 1)]  # read access, high locality, data cache
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, *(flag.type for flag in flags)])
        builder.call(builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], kind), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(array, types.intp), generate


def _emit_dots(queries: int, keys: int) -> Callable[..., Any]:
    """Return the emitter of `dots` for so many queries and keys, together 8 or 16."""

    def emit(
        typing_context: Any,
        out: Any,
        o: Any,
        out_row: Any,
        q: Any,
        i: Any,
        q_row: Any,
        stored: Any,
        m: Any,
        count: Any,
        used: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, query, key = (_address(context, builder, signature, arguments, at) for at in (0, 3, 6))
            out_row, q_row, count, element = arguments[2], arguments[5], arguments[8], signature.args[6].dtype
            last = builder.sub(arguments[9], ir.Constant(arguments[9].type, 1))
            starts = [builder.gep(query, [builder.mul(q_row, ir.Constant(count.type, n))]) for n in range(queries)]
            rows = []
            for t in range(keys):
                at = ir.Constant(last.type, t)
                row = builder.select(builder.icmp_signed("<", at, last), at, last)  # keys beyond the last repeat it
                rows.append(builder.gep(key, [builder.mul(row, count)]))
            zero = ir.Constant(_VECTOR, [0.0] * LANES)
            totals = [[cgutils.alloca_once_value(builder, zero) for _ in rows] for _ in starts]
            with cgutils.for_range(builder, _vectors(builder, count)) as loop:
                xs = [_load(builder, start, loop.index) for start in starts]
                for t, row in enumerate(rows):
                    factor = _widened(builder, element, row, loop.index)
                    for x, sums in zip(xs, totals, strict=True):
                        builder.store(_fused(builder, builder.load(sums[t]), x, factor), sums[t])
            # Neighbouring lanes are added until one is left per product, in the same order for all of them.
            parts = [builder.load(total) for sums in totals for total in sums]
            while len(parts) > 1:
                parts = [_pair_sums(builder, parts[n], parts[n + 1]) for n in range(0, len(parts), 2)]
            for _ in range(LANES // (queries * keys) - 1):
                parts = [_pair_sums(builder, parts[0], parts[0])]
            some = ir.VectorType(_FLOAT, keys)
            for n in range(queries):
                lanes = ir.Constant(ir.VectorType(ir.IntType(32), keys), list(range(n * keys, (n + 1) * keys)))
                found = builder.shuffle_vector(parts[0], ir.Constant(_VECTOR, ir.Undefined), lanes)
                place = builder.gep(target, [builder.mul(out_row, ir.Constant(count.type, n))])
                builder.store(found, builder.bitcast(place, some.as_pointer()), align=4)
            return context.get_dummy_value()

        numbers = (types.intp, types.intp)
        return types.void(out, *numbers, q, *numbers, stored, types.intp, *numbers), generate

    return emit


def _pair_sums(builder: Any, x: Any, y: Any) -> Any:
    """Return the sums of neighbouring lanes of x, then those of y."""
    even, odd = (
        builder.shuffle_vector(
            x, y, ir.Constant(ir.VectorType(ir.IntType(32), LANES), list(range(first, 2 * LANES, 2)))
        )
        for first in (0, 1)
    )
    return builder.fadd(even, odd)


def _fused(builder: Any, total: Any, x: Any, y: Any) -> Any:
    return builder.fadd(total, builder.fmul(x, y, flags=_CONTRACT_FLAG), flags=_CONTRACT_FLAG)


def _emit_mix(
    typing_context: Any, sums: Any, count: Any, weights: Any, w: Any, values: Any, v: Any, rows: Any, place: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        out = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        weight, value = (_address(context, builder, signature, arguments, at) for at in (2, 4))
        count, rows, place = arguments[1], arguments[6], arguments[7]
        vectors, begin = _vectors(builder, count), ir.Constant(count.type, 0)

        def number(of: int) -> Any:
            return ir.Constant(count.type, of)

        def spread_weight(row: Any) -> Any:
            return _spread(builder, builder.load(builder.gep(weight, [row])))

        def add_rows(columns: list[Any], apart: int, start: Any, stop: Any) -> None:
            with cgutils.for_range_slice(builder, start, stop, number(1)) as (row, _):
                to = builder.gep(out, [builder.mul(builder.srem(builder.add(place, row), number(apart)), count)])
                here, spread = builder.gep(value, [builder.mul(row, count)]), spread_weight(row)
                for column in columns:
                    total = _fused(builder, _load(builder, to, column), spread, _load(builder, here, column))
                    builder.store(total, _vector_at(builder, to, column), align=4)

        for together in (4, 2, 1):
            apart = CHAINS // together  # sums of a column, which do not wait for each other
            units = builder.sdiv(builder.sub(vectors, begin), number(together))
            end = builder.add(begin, builder.mul(units, number(together)))
            # Row r belongs to sum (place + r) % apart; those that come in whole turns are added in registers.
            late = builder.srem(builder.sub(number(apart), builder.srem(place, number(apart))), number(apart))
            first_whole = builder.select(builder.icmp_signed("<", late, rows), late, rows)
            turns = builder.sdiv(builder.sub(rows, first_whole), number(apart))
            end_whole = builder.add(first_whole, builder.mul(turns, number(apart)))
            with cgutils.for_range(builder, units) as unit:
                first = builder.add(begin, builder.mul(unit.index, number(together)))
                columns = [builder.add(first, number(n)) for n in range(together)]
                add_rows(columns, apart, number(0), first_whole)
                places = [builder.gep(out, [builder.mul(number(n), count)]) for n in range(apart)]
                totals = [
                    [cgutils.alloca_once_value(builder, _load(builder, to, column)) for column in columns]
                    for to in places
                ]
                with cgutils.for_range_slice(builder, first_whole, end_whole, number(apart)) as (turn, _):
                    for n, sums_of_row in enumerate(totals):
                        row = builder.add(turn, number(n))
                        here, spread = builder.gep(value, [builder.mul(row, count)]), spread_weight(row)
                        for column, total in zip(columns, sums_of_row, strict=True):
                            there = _load(builder, here, column)
                            builder.store(_fused(builder, builder.load(total), spread, there), total)
                for to, sums_of_row in zip(places, totals, strict=True):
                    for column, total in zip(columns, sums_of_row, strict=True):
                        builder.store(builder.load(total), _vector_at(builder, to, column), align=4)
                add_rows(columns, apart, end_whole, rows)
            begin = end
        return context.get_dummy_value()

    numbers = (types.intp, types.intp)
    return types.void(sums, types.intp, weights, types.intp, values, *numbers, types.intp), generate


def _emit_panel(rows: int, vectors: int) -> Callable[..., Any]:
    """Return the emitter of `panel` for so many rows and vectors of columns."""

    def emit(
        typing_context: Any,
        out: Any,
        o: Any,
        out_row: Any,
        a: Any,
        i: Any,
        a_row: Any,
        weight: Any,
        w: Any,
        w_row: Any,
        depth: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            target, source, matrix = (_address(context, builder, signature, arguments, at) for at in (0, 3, 6))
            element = signature.args[6].dtype
            out_row, a_row, w_row, depth = arguments[2], arguments[5], arguments[8], arguments[9]
            columns = [ir.Constant(depth.type, n) for n in range(vectors)]
            targets = [builder.gep(target, [builder.mul(out_row, ir.Constant(depth.type, r))]) for r in range(rows)]
            sources = [builder.gep(source, [builder.mul(a_row, ir.Constant(depth.type, r))]) for r in range(rows)]
            totals = [[cgutils.alloca_once_value(builder, _load(builder, row, n)) for n in columns] for row in targets]
            with cgutils.for_range(builder, depth) as loop:
                here = builder.gep(matrix, [builder.mul(loop.index, w_row)])
                factors = [_widened(builder, element, here, n) for n in columns]
                for row, sums in zip(sources, totals, strict=True):
                    x = _spread(builder, builder.load(builder.gep(row, [loop.index])))
                    for factor, total in zip(factors, sums, strict=True):
                        builder.store(_fused(builder, builder.load(total), x, factor), total)
            for row, sums in zip(targets, totals, strict=True):
                for n, total in zip(columns, sums, strict=True):
                    builder.store(builder.load(total), _vector_at(builder, row, n), align=4)
            return context.get_dummy_value()

        numbers = (types.intp, types.intp)
        return types.void(out, *numbers, a, *numbers, weight, *numbers, types.intp), generate

    return emit


def _emit_value(typing_context: Any, weight: Any, at: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored = builder.load(_address(context, builder, signature, arguments, 0))
        return _as_floats(builder, signature.args[0].dtype, stored)

    return types.float32(weight, types.intp), generate


def _widened(builder: Any, element: Any, pointer: Any, index: Any) -> Any:
    """Return 16 stored weights as floats."""
    if element == types.float32:
        return _load(builder, pointer, index)
    moved = builder.gep(pointer, [builder.mul(index, ir.Constant(index.type, LANES))])
    kind = ir.VectorType(ir.IntType(element.bitwidth), LANES)
    return _as_floats(builder, element, builder.load(builder.bitcast(moved, kind.as_pointer()), align=1))


def _as_floats(builder: Any, element: Any, stored: Any) -> Any:
    """Return one stored weight, or a vector of them, as float32; exact for all types (`KernelWeights`)."""

    def of(kind: Any) -> Any:
        return ir.VectorType(kind, LANES) if isinstance(stored.type, ir.VectorType) else kind

    if element == types.float32:
        return stored
    if element == types.int8:
        return builder.sitofp(builder.sext(stored, of(ir.IntType(32))), of(_FLOAT))
    if element == types.int16:
        return builder.fpext(builder.bitcast(stored, of(ir.HalfType())), of(_FLOAT))
    assert element == types.uint16
    bits = ir.Constant(of(ir.IntType(32)), [16] * LANES if isinstance(stored.type, ir.VectorType) else 16)
    return builder.bitcast(builder.shl(builder.zext(stored, bits.type), bits), of(_FLOAT))


def _emit_widen(typing_context: Any, y: Any, k: Any, bytes_: Any, b: Any, count: Any, scale: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target, source = (_address(context, builder, signature, arguments, at) for at in (0, 2))
        spread = _spread(builder, arguments[5])
        with cgutils.for_range(builder, _vectors(builder, arguments[4])) as loop:
            values = _widened(builder, types.int8, source, loop.index)
            builder.store(builder.fmul(values, spread), _vector_at(builder, target, loop.index), align=4)
        return context.get_dummy_value()

    return types.void(y, types.intp, bytes_, types.intp, types.intp, types.float32), generate


def _spread(builder: Any, value: Any) -> Any:
    """Return a vector with `value` in all lanes."""
    lone = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(lone, ir.Constant(_VECTOR, ir.Undefined), lanes)


def _address(context: Any, builder: Any, signature: Any, arguments: Any, at: int) -> Any:
    """Return a pointer to element arguments[at + 1] of the array arguments[at]."""
    data = context.make_array(signature.args[at])(context, builder, arguments[at]).data
    return builder.gep(data, [arguments[at + 1]])


def _vectors(builder: Any, count: Any) -> Any:
    return builder.sdiv(count, ir.Constant(count.type, LANES))


def _vector_at(builder: Any, pointer: Any, index: Any) -> Any:
    moved = builder.gep(pointer, [builder.mul(index, ir.Constant(index.type, LANES))])
    return builder.bitcast(moved, _VECTOR.as_pointer())


def _load(builder: Any, pointer: Any, index: Any) -> Any:
    return builder.load(_vector_at(builder, pointer, index), align=4)


prefetch = cast("Callable[[Floats, int], None]", intrinsic(_emit_prefetch))
"""prefetch(array, i): request the cache line of array[i] early; never faults."""

_Dots = Callable[[Floats, int, int, Floats, int, int, Stored, int, int, int], None]
dots_4x4, dots_2x8, dots_1x16, dots_1x8 = (
    cast("_Dots", intrinsic(_emit_dots(queries, keys))) for queries, keys in ((4, 4), (2, 8), (1, 16), (1, 8))
)
"""dots_QxK(out, o, out_row, q, i, q_row, stored, m, count, n): for r < Q and t < n <= K,
out[o + r * out_row + t] = sum over k < count of q[i + r * q_row + k] * stored[m + t * count + k]; count must be a
multiple of 16. Also overwrites what follows, up to t = K - 1. All forms give the same bits."""

mix = cast("Callable[[Floats, int, Floats, int, Floats, int, int, int], None]", intrinsic(_emit_mix))
"""mix(sums, count, weights, w, values, v, n, place): for k < count, the sum over rows r < n of
weights[w + r] * values[v + r * count + k] is added to sums[c * count + k], c < CHAINS, which together are the result:
which row is added to which depends on place + r alone. count must be a multiple of 16."""

_Panel = Callable[[Floats, int, int, Floats, int, int, Stored, int, int, int], None]
panel_8x2, panel_8x1, panel_4x4, panel_4x1, panel_2x8, panel_2x1, panel_1x16, panel_1x8, panel_1x2, panel_1x1 = (
    cast("_Panel", intrinsic(_emit_panel(rows, vectors)))
    for rows, vectors in ((8, 2), (8, 1), (4, 4), (4, 1), (2, 8), (2, 1), (1, 16), (1, 8), (1, 2), (1, 1))
)
"""panel_RxV(out, o, out_row, a, i, a_row, weight, w, w_row, depth): for r < R and c < 16 * V,
out[o + r * out_row + c] += sum of a[i + r * a_row + k] * weight[w + k * w_row + c] over k < depth, in order."""

value_of = cast("Callable[[Stored, int], np.float32]", intrinsic(_emit_value))
"""value_of(weight, i): element i of stored weights, as a float."""

widen = cast("Callable[[Floats, int, Bytes, int, int, np.float32], None]", intrinsic(_emit_widen))
"""widen(y, k, bytes, b, count, scale): y[k + i] = int8(bytes[b + i]) * scale for i < count; count must be a multiple of
16."""


Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

_F = TypeVar("_F", bound=Callable[..., Any])
_CONTRACT = {"contract"}
_SUM = {"contract", "reassoc", "nsz"}
_LOG2_E = np.float32(1.4426950408889634)
_LN2_HI, _LN2_LO = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it rounds to an integer, left in the low bits
_NO_SINK = np.float32(-np.inf)
_GELU_SLOPE, _GELU_CUBE = np.float32(2 * 0.7978845608028654), np.float32(0.044715)  # 2 * sqrt(2 / pi)
_EXP_LEAST = np.float32(-87.0)
_EXP_POLY = tuple(
    np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
)
_BELOW_SIGN = np.int32(0x7FFFFFFF)
_HALF_OVERFLOWS = np.float32(65520.0)  # rounds to infinity in float16
_HALF_LEAST_NORMAL = np.float32(2.0**-14)
_HALF_STEPS = np.float32(2.0**24)  # per 1, below the least normal value
_HALF_EXPONENT = np.int32(112 << 23)  # difference of the exponents' biases
_LINE = 16  # floats per cache line
_DEPTH_AT_ONCE = 256  # inputs of a product for which a part of the matrix is read
_COLUMNS_AT_ONCE = 256
_STRIP = 32  # columns of a matrix that are packed into consecutive floats, if there are so many rows:
_PACKED_ROWS = 64
PACKED = _DEPTH_AT_ONCE * _STRIP


class DecoderDims(NamedTuple):
    """Dimensions that are the same in every step, in numba's types."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: np.float32
    scale: np.float32  # of the products of queries and keys
    softcap: np.float32  # of the scores; 0 = none
    gelu: bool  # the gate's activation is GELU's tanh form, not SiLU
    expert_size: int  # intermediate size of an expert; 0 = the model has none
    experts_scaled: bool  # the shares of a token's experts are divided by their sum


class KernelWeights(NamedTuple):
    """Stacked weights as numpy arrays; shapes as in `engine.weights.DecoderWeights`. Matrices are read as stored."""

    attention_norm: Floats
    attention_post_norm: Floats
    qkv: Stored
    qkv_scale: Floats
    qkv_bias: Floats
    q_norm: Floats
    k_norm: Floats
    sinks: Floats
    out: Stored
    out_scale: Floats
    out_bias: Floats
    mlp_norm: Floats
    mlp_post_norm: Floats
    gate_up: Stored
    gate_up_scale: Floats
    gate_up_bias: Floats
    down: Stored
    down_scale: Floats
    down_bias: Floats
    router: Stored
    experts_gate_up: Stored
    experts_gate_up_scale: Floats
    experts_down: Stored
    experts_down_scale: Floats


class StepArrays(NamedTuple):
    """The rows of one step and the location of their KV: N rows, G groups, L layers; sizes and offsets in floats.

    The groups and bases of a layer are those of the layer whose KV it uses.
    """

    positions: Ints  # [N]
    row_tables: Ints  # [G, N]: where the table of the row's sequence begins in `tables`
    tables: Ints  # slot tables, concatenated
    row_firsts: Ints  # [G, N]: first position that is visible to the row, apart from the group's window
    angles: Ints  # [N]: rows in `cos` and `sin`
    cos: Floats  # [ropes, angles, head_dim // 2]
    sin: Floats
    layer_ropes: Ints  # [L]
    layer_owns: npt.NDArray[np.bool_]  # [L]: whether the layer computes the KV that it uses
    layer_sparse: npt.NDArray[np.bool_]  # [L]: whether the layer has experts instead of an MLP
    mlp_places: Ints  # [L]: the layer's number among those
    memory: Floats  # the whole cache; of an int8 cache, decoded slots of one layer: of all chunks, or of one at a time
    coded: Bytes  # the whole int8 cache; otherwise empty
    scale_group: int
    read_tables: Ints  # as `tables`, of slots in `memory`
    read_sizes: npt.NDArray[np.int64]  # as `slot_sizes` and `layer_bases`, in `memory`
    read_bases: npt.NDArray[np.int64]
    decoded: Ints  # entries of `tables` whose slots the step reads, by group and chunk; only of an int8 cache
    decoded_ends: Ints  # [G, C + 1]
    chunk_rows: Ints  # [C + 1]: chunk c is rows chunk_rows[c]..chunk_rows[c + 1] - 1
    block_tokens: int
    windows: Ints  # [G]
    slot_sizes: npt.NDArray[np.int64]  # [G]
    layer_groups: Ints  # [L]
    layer_bases: npt.NDArray[np.int64]  # [L]: offset of the layer in slot 0 of its group


class WorkBuffers(NamedTuple):
    """Work buffers of N rows; `scores` has one value per position. `steps`, `products` and `token_scales` are for
    linear layers in int8; what follows is for experts, of which each row uses T.
    """

    x: Floats
    hidden: Floats
    qkv: Floats
    mixed: Floats
    gate_up: Floats
    gated: Floats
    scores: Floats
    steps: Floats  # [N * the most inputs]
    products: Floats  # [N * the most outputs]
    token_scales: Floats  # [N]
    packed: Floats  # [PACKED]
    router: Floats  # [N, experts]
    chosen: Ints  # [N, T]: each row's experts, in the order of their shares
    shares: Floats  # [N, T]
    taken: Ints  # [N]: entries of `chosen` that are those of one expert
    expert_in: Floats  # [N, d]: the rows of one expert
    expert_gate_up: Floats  # [N, 2G]
    expert_gated: Floats  # [N, G]
    expert_out: Floats  # [N, d]
    made: Floats  # [N * T, d]: what each entry of `chosen` makes of its row


def _kernel(fastmath: set[str]) -> Callable[[_F], _F]:
    return cast("Callable[[_F], _F]", numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=fastmath))


@_kernel(_CONTRACT)
def _exp(x: np.float32) -> np.float32:
    """Return exp of one float32 x <= 0 within 2 ulp (Cephes' expf), in a form that vectorises in loops."""
    x = max(x, _EXP_LEAST)
    shifted = x * _LOG2_E + _ROUND
    k = shifted - _ROUND
    r = (x - k * _LN2_HI) - k * _LN2_LO
    poly = _EXP_POLY[0]
    for i in range(1, 6):
        poly = poly * r + _EXP_POLY[i]
    exponent = np.float32(shifted).view(np.int32) + np.int32(127)
    scale = np.int32(exponent << np.int32(23)).view(np.float32)
    return (poly * r * r + r + np.float32(1.0)) * scale


class _Submatrix(NamedTuple):
    """Where a matrix lies in an array, in elements."""

    begin: int
    row: int  # distance of its rows
    width: int  # a multiple of 16


@_kernel(_CONTRACT)
def multiply(
    a: Floats, weight: Stored, bias: Floats, out: Floats, accumulate: bool, width: int, packed: Floats
) -> None:
    """Compute out [N, M] (+)= a [N, K] @ weight [K, M] + bias [M | 0], of it the first `width` columns.

    Each row is summed over k in order. `packed` is a buffer of PACKED floats.
    """
    rows, depth = a.shape
    row = weight.shape[1]
    for i in range(rows):
        if not accumulate:
            out[i, :width] = np.float32(0.0)
        if bias.size:
            for j in range(width):
                out[i, j] += bias[j]
    whole = width - width % LANES
    for k in range(0, depth, _DEPTH_AT_ONCE):
        count = min(_DEPTH_AT_ONCE, depth - k)
        if rows < _PACKED_ROWS:
            for j in range(0, whole, _COLUMNS_AT_ONCE):
                _add_products(
                    a, k, count, weight, _Submatrix(k * row + j, row, min(_COLUMNS_AT_ONCE, whole - j)), out, j
                )
            continue
        for j in range(0, whole, _STRIP):
            columns = min(_STRIP, whole - j)
            for n in range(count):
                for c in range(columns):
                    packed[n * _STRIP + c] = value_of(weight, (k + n) * row + j + c)
            _add_products(a, k, count, packed, _Submatrix(0, _STRIP, columns), out, j)
    for i in range(rows if whole < width else 0):
        for k in range(depth):
            x = a[i, k]
            for j in range(whole, width):
                out[i, j] += x * value_of(weight, k * row + j)


@_kernel(_CONTRACT)
def _add_products(a: Floats, k: int, depth: int, weight: Stored, part: _Submatrix, out: Floats, column: int) -> None:
    """Add a[:, k : k + depth] times a matrix [depth, width] to out from `column` on.

    The matrix is a part of `weight`.
    """
    w, w_row, width = part
    rows, a_row, row = a.shape[0], a.shape[1], out.shape[1]
    i = rows - rows % 8
    pairs = width - width % 32
    for j in range(0, pairs, 32):
        for n in range(0, i, 8):
            panel_8x2(out, n * row + column + j, row, a, n * a_row + k, a_row, weight, w + j, w_row, depth)
    if pairs < width:
        for n in range(0, i, 8):
            panel_8x1(out, n * row + column + pairs, row, a, n * a_row + k, a_row, weight, w + pairs, w_row, depth)
    if rows - i >= 4:
        o, at, j = i * row + column, i * a_row + k, 0
        while width - j >= 64:
            panel_4x4(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)
            j += 64
        while j < width:
            panel_4x1(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)
            j += LANES
        i += 4
    if rows - i >= 2:
        o, at, j = i * row + column, i * a_row + k, 0
        while width - j >= 128:
            panel_2x8(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)
            j += 128
        while j < width:
            panel_2x1(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)
            j += LANES
        i += 2
    if i < rows:
        o, at, j = i * row + column, i * a_row + k, 0
        while width - j >= 256:
            panel_1x16(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)
            j += 256
        if width - j >= 128:
            panel_1x8(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)
            j += 128
        while width - j >= 32:
            panel_1x2(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)
            j += 32
        if j < width:
            panel_1x1(out, o + j, row, a, at, a_row, weight, w + j, w_row, depth)


@_kernel(set())
def _largest_magnitude(x: Floats) -> np.float32:
    """Return max |x|; not a number if one of x is not."""
    top = np.float32(0.0)
    for i in range(x.size):
        value = abs(x[i])
        if value > top or value != value:
            top = value
    return top


@_kernel(set())
def quantise_tokens(a: Floats, steps: Floats, token_scales: Floats) -> None:
    """Write the integers of a [N, K] and the scale of each row, as `engine.int8_linear.quantised`."""
    for i in range(a.shape[0]):
        x, y = a[i], steps[i]
        scale = np.float32(_largest_magnitude(x) / np.float32(127.0))
        token_scales[i] = scale
        divisor = scale if scale != 0 else np.float32(1.0)
        for j in range(x.size):
            y[j] = np.rint(min(max(x[j] / divisor, np.float32(-127.0)), np.float32(127.0)))


@_kernel(_CONTRACT)
def scale_products(
    products: Floats, token_scales: Floats, scale: Floats, bias: Floats, out: Floats, accumulate: bool
) -> None:
    """Compute out (+)= products [N, M] * token_scales [N] * scale [M] + bias [M | 0], of it the first M columns."""
    width = products.shape[1]
    for i in range(products.shape[0]):
        x, y, token_scale = products[i], out[i], token_scales[i]
        if not accumulate:
            y[:width] = np.float32(0.0)
        for j in range(width):
            y[j] += x[j] * token_scale * scale[j]
        if bias.size:
            for j in range(width):
                y[j] += bias[j]


@_kernel(_CONTRACT)
def project(
    a: Floats, weight: Stored, scale: Floats, bias: Floats, out: Floats, accumulate: bool, width: int, work: WorkBuffers
) -> None:
    """Compute a linear layer as `multiply` does; in int8 if `scale` [M | 0] is not empty."""
    if not scale.size:
        multiply(a, weight, bias, out, accumulate, width, work.packed)
        return
    rows, depth = a.shape
    steps = work.steps[: rows * depth].reshape(rows, depth)
    products = work.products[: rows * width].reshape(rows, width)
    quantise_tokens(a, steps, work.token_scales)
    multiply(steps, weight, bias[:0], products, False, width, work.packed)
    scale_products(products, work.token_scales, scale, bias, out, accumulate)


@_kernel(_SUM)
def multiply_head(a: Floats, weight: Stored, out: Floats) -> None:
    """Compute out [N, V] = a [N, d] @ weight [V, d] transposed."""
    rows, depth = a.shape
    ids = weight.shape[0]
    whole = ids - ids % LANES if depth % LANES == 0 else 0
    for j in range(0, whole, LANES):
        i = 0
        while rows - i >= 4:
            for c in range(j, j + LANES, 4):
                dots_4x4(out, i * ids + c, ids, a, i * depth, depth, weight, c * depth, depth, 4)
            i += 4
        if rows - i >= 2:
            for c in range(j, j + LANES, 8):
                dots_2x8(out, i * ids + c, ids, a, i * depth, depth, weight, c * depth, depth, 8)
            i += 2
        if i < rows:
            dots_1x16(out, i * ids + j, ids, a, i * depth, depth, weight, j * depth, depth, LANES)
    for j in range(whole, ids):
        for i in range(rows):
            x = a[i]
            total = np.float32(0.0)
            for k in range(depth):
                total += x[k] * value_of(weight, j * depth + k)
            out[i, j] = total


@_kernel(_SUM)
def _square_sum(x: Floats) -> np.float32:
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i] * x[i]
    return total


@_kernel(_SUM)
def _dot(x: Floats, y: Floats) -> np.float32:
    total = np.float32(0.0)
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@_kernel(_SUM)
def _exp_sum(x: Floats, top: np.float32, scale: np.float32) -> np.float32:
    """Compute x = exp((x - top) * scale) in place; return its sum."""
    total = np.float32(0.0)
    for i in range(x.size):
        value = _exp((x[i] - top) * scale)
        x[i] = value
        total += value
    return total


@_kernel(_CONTRACT)
def _norm_row(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    scale = np.float32(1.0) / np.sqrt(_square_sum(x) / np.float32(x.size) + eps)
    for i in range(x.size):
        out[i] = x[i] * scale * weight[i]


@_kernel(_CONTRACT)
def rms_norm(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """Compute out [N, d] = x / rms(x) * weight, row by row."""
    for i in range(x.shape[0]):
        _norm_row(x[i], weight, eps, out[i])


@_kernel(_CONTRACT)
def add_normed(x: Floats, weight: Floats, eps: np.float32, out: Floats) -> None:
    """Compute out [N, d] += x / rms(x) * weight, row by row."""
    for i in range(x.shape[0]):
        row, y = x[i], out[i]
        scale = np.float32(1.0) / np.sqrt(_square_sum(row) / np.float32(row.size) + eps)
        for j in range(row.size):
            y[j] += row[j] * scale * weight[j]


@_kernel(_CONTRACT)
def gate(gate_up: Floats, gelu: bool, out: Floats) -> None:
    """Compute out [N, F] = act(gate) * up of gate_up [N, 2F]; act is SiLU or GELU's tanh form.

    Both are the gate times a sigmoid: (1 + tanh(z)) / 2 is the sigmoid of 2z.
    """
    width = out.shape[1]
    one = np.float32(1.0)
    for i in range(out.shape[0]):
        g, u, y = gate_up[i, :width], gate_up[i, width:], out[i]
        if gelu:
            for j in range(width):
                z = _GELU_SLOPE * (g[j] + _GELU_CUBE * g[j] * g[j] * g[j])
                small = _exp(-abs(z))
                share = one / (one + small)
                y[j] = g[j] * u[j] * (share if z >= 0 else small * share)
            continue
        for j in range(width):
            # exp of -|g| only: it cannot overflow, and covers both signs
            small = _exp(-abs(g[j]))
            share = one / (one + small)
            y[j] = g[j] * u[j] * (share if g[j] >= 0 else small * share)


@_kernel(set())
def _half(x: np.float32) -> tuple[np.int32, np.float32]:
    """Return the bits of x >= 0 rounded to float16, and its value."""
    if not x < _HALF_OVERFLOWS:
        return (np.int32(0x7E00), np.float32(np.nan)) if x != x else (np.int32(0x7C00), np.float32(np.inf))
    if x < _HALF_LEAST_NORMAL:
        steps = np.rint(x * _HALF_STEPS)
        return np.int32(steps), np.float32(steps / _HALF_STEPS)
    bits = np.float32(x).view(np.int32)
    bits = np.int32((bits + np.int32(0xFFF) + ((bits >> np.int32(13)) & np.int32(1))) & ~np.int32(0x1FFF))
    return np.int32((bits - _HALF_EXPONENT) >> np.int32(13)), bits.view(np.float32)


@_kernel(set())
def _from_half(bits: np.int32) -> np.float32:
    """Return the value of a float16 that is not negative."""
    if bits < 0x400:
        return np.float32(np.float32(bits) / _HALF_STEPS)
    if bits >= 0x7C00:
        return np.float32(np.nan) if bits > 0x7C00 else np.float32(np.inf)
    return np.int32((bits << np.int32(13)) + _HALF_EXPONENT).view(np.float32)


@_kernel(set())
def encode_row(x: Floats, scale_group: int, out: Bytes) -> None:
    """Write values and scales of one row, as `engine.int8_rows.encode_rows`."""
    for g in range(x.size // scale_group):
        first = g * scale_group
        top = _largest_magnitude(x[first : first + scale_group])
        bits, scale = _half(np.float32(top / np.float32(127.0)))
        for i in range(first, first + scale_group):
            value = x[i] / scale if scale > 0 else np.float32(0.0)
            value = np.rint(min(max(value, np.float32(-127.0)), np.float32(127.0)))
            out[i] = np.uint8(np.int32(value if value == value else np.float32(0.0)) & np.int32(0xFF))
        out[x.size + 2 * g] = np.uint8(bits & np.int32(0xFF))
        out[x.size + 2 * g + 1] = np.uint8(bits >> np.int32(8))


@_kernel(set())
def decode_rows(coded: Bytes, at: int, scale_group: int, out: Floats, first: int, head_dim: int, rows: int) -> None:
    """Write the values of `rows` rows that begin at coded[at] to out[first : first + rows * head_dim]."""
    groups, are_vectors = head_dim // scale_group, scale_group % LANES == 0
    for _ in range(rows):
        place = at + head_dim
        for _ in range(groups):
            scale = _from_half(np.int32(np.int32(coded[place]) | np.int32(coded[place + 1]) << np.int32(8)))
            if are_vectors:
                widen(out, first, coded, at, scale_group, scale)
            else:
                for i in range(scale_group):
                    out[first + i] = np.float32(np.int8(coded[at + i])) * scale
            first += scale_group
            at += scale_group
            place += 2
        at = place


@_kernel(set())
def decode_chunk(layer: int, chunk: int, shape: DecoderDims, step: StepArrays) -> None:
    """Decode one layer of the slots of an int8 cache that a chunk reads to `step.memory`."""
    group, rows = step.layer_groups[layer], 2 * shape.kv_heads * step.block_tokens
    for n in range(step.decoded_ends[group, chunk], step.decoded_ends[group, chunk + 1]):
        entry = step.decoded[n]
        source = step.layer_bases[layer] + step.tables[entry] * step.slot_sizes[group]
        target = step.read_bases[layer] + step.read_tables[entry] * step.read_sizes[group]
        decode_rows(step.coded, source, step.scale_group, step.memory, target, shape.head_dim, rows)


@_kernel(set())
def _reads_the_same(layer: int, step: StepArrays) -> bool:
    """Return True if the preceding layer uses the same KV, so that what it has decoded is still there."""
    before = max(layer - 1, 0)
    same_place = step.layer_bases[layer] == step.layer_bases[before]
    return not step.layer_owns[layer] and same_place and step.layer_groups[layer] == step.layer_groups[before]


@_kernel(set())
def decode_slots(layer: int, shape: DecoderDims, step: StepArrays) -> None:
    """Decode one layer of the slots of an int8 cache that all chunks read to `step.memory`."""
    if not _reads_the_same(layer, step):
        for chunk in range(step.chunk_rows.size - 1):
            decode_chunk(layer, chunk, shape, step)


@_kernel(_CONTRACT)
def place_rows(layer: int, shape: DecoderDims, weights: KernelWeights, step: StepArrays, qkv: Floats) -> None:
    """Rotate the queries and keys of qkv [N, Q + 2K] in place, after normalising them if the model has QK-norms, and
    write keys and values to the cache. Only the queries, if the layer does not own its KV.
    """
    heads, kv_heads, head_dim, eps = shape.heads, shape.kv_heads, shape.head_dim, shape.eps
    group, owns = step.layer_groups[layer], step.layer_owns[layer]
    q_norm, k_norm = weights.q_norm[layer], weights.k_norm[layer]
    half, run, memory = head_dim // 2, step.block_tokens * head_dim, step.memory
    cos, sin = step.cos[step.layer_ropes[layer]], step.sin[step.layer_ropes[layer]]
    for i in range(qkv.shape[0]):
        position = int(step.positions[i])
        c, s = cos[step.angles[i]], sin[step.angles[i]]
        for h in range(heads + kv_heads if owns else heads):
            x = qkv[i, h * head_dim : (h + 1) * head_dim]
            if q_norm.size:
                _norm_row(x, q_norm if h < heads else k_norm, eps, x)
            a, b = x[:half], x[half:]
            for d in range(half):
                first, second = a[d], b[d]
                a[d] = first * c[d] - second * s[d]
                b[d] = second * c[d] + first * s[d]
        if not owns:
            continue
        slot = step.tables[step.row_tables[group, i] + position // step.block_tokens]
        base = step.layer_bases[layer] + slot * step.slot_sizes[group]
        if step.coded.size:
            row = head_dim + 2 * (head_dim // step.scale_group)
            for h in range(kv_heads):
                at = base + (2 * h * step.block_tokens + position % step.block_tokens) * row
                k = (heads + h) * head_dim
                v = k + kv_heads * head_dim
                encode_row(qkv[i, k : k + head_dim], step.scale_group, step.coded[at : at + row])
                at += step.block_tokens * row
                encode_row(qkv[i, v : v + head_dim], step.scale_group, step.coded[at : at + row])
            continue
        base += position % step.block_tokens * head_dim
        for h in range(kv_heads):
            at = base + 2 * h * run
            k = (heads + h) * head_dim
            v = k + kv_heads * head_dim
            memory[at : at + head_dim] = qkv[i, k : k + head_dim]
            memory[at + run : at + run + head_dim] = qkv[i, v : v + head_dim]


@_kernel(_CONTRACT)
def attend_rows(
    layer: int,
    rows: Ints,
    shape: DecoderDims,
    sinks: Floats,
    step: StepArrays,
    qkv: Floats,
    scores: Floats,
    out: Floats,
) -> None:
    """Compute attention of the given rows of qkv, each over its sequence up to its own position, into out [N, Q].

    `sinks` are those of the layer, [heads | 0]. All heads of a block are scored together, so that a slot is read once
    and as a whole.
    """
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    shared, group, memory = heads // kv_heads, step.layer_groups[layer], step.memory
    window, block_tokens = step.windows[group], step.block_tokens
    layer_base, slot_size, run = step.read_bases[layer], step.read_sizes[group], step.block_tokens * head_dim
    sums, scores = scores[: CHAINS * head_dim], scores[CHAINS * head_dim :]
    for r in range(rows.size):
        i = rows[r]
        position = int(step.positions[i])
        first = int(step.row_firsts[group, i])
        first = max(position - window + 1, first) if window else first
        table = step.read_tables[step.row_tables[group, i] :]
        seen = position + 1 - first
        row = seen + LANES  # the last vector of scores may be written as a whole
        first_block, last_block = first // block_tokens, position // block_tokens
        for block in range(first_block, last_block + 1):
            begin, end = max(first - block * block_tokens, 0), min(position + 1 - block * block_tokens, block_tokens)
            slot = layer_base + table[block] * slot_size
            # The slots are scattered, so the hardware prefetcher cannot follow them: fetch the next one meanwhile.
            following = layer_base + table[min(block + 1, last_block)] * slot_size
            part = 2 * run // shared
            for h in range(heads):
                for line in range(h * part, (h + 1) * part, _LINE):  # a few at a time
                    prefetch(memory, following + line)
                keys = slot + 2 * (h // shared) * run + begin * head_dim
                q = qkv[i, h * head_dim : (h + 1) * head_dim]
                _score_keys(q, keys, end - begin, memory, scores, h * row + block * block_tokens + begin - first)
        for h in range(heads):
            share, y = scores[h * row : h * row + seen], out[i, h * head_dim : (h + 1) * head_dim]
            norm = _soften_row(share, 0, seen, shape, sinks[h] if sinks.size else _NO_SINK)
            sums[:] = np.float32(0.0)
            for block in range(first_block, last_block + 1):
                start = block * block_tokens
                begin, end = max(first - start, 0), min(position + 1 - start, block_tokens)
                values = layer_base + table[block] * slot_size + (2 * (h // shared) + 1) * run + begin * head_dim
                _mix_values(share, start + begin - first, end - begin, memory, values, start + begin, sums)
            for d in range(head_dim):
                total = np.float32(0.0)
                for c in range(CHAINS):
                    total += sums[c * head_dim + d]
                y[d] = total * norm


@_kernel(_CONTRACT)
def _score_keys(q: Floats, keys: int, count: int, memory: Floats, scores: Floats, at: int) -> None:
    """Write the products of q and `count` keys, which begin at memory[keys], to scores[at:]."""
    head_dim = q.size
    if head_dim % LANES:
        for t in range(count):
            key = keys + t * head_dim
            scores[at + t] = _dot(q, memory[key : key + head_dim])
        return
    for t in range(0, count, LANES):
        key, few = keys + t * head_dim, min(count - t, LANES)
        if few > 8:
            dots_1x16(scores, at + t, 0, q, 0, 0, memory, key, head_dim, few)
        else:
            dots_1x8(scores, at + t, 0, q, 0, 0, memory, key, head_dim, few)


@_kernel(_CONTRACT)
def _mix_values(
    share: Floats, first: int, count: int, memory: Floats, values: int, position: int, sums: Floats
) -> None:
    """Add `count` values, which begin at memory[values] and are those of `position` and later, times share[first:].

    `sums` [CHAINS * head_dim] are those of `mix`: the result depends on positions, not on how they lie in blocks.
    """
    head_dim = sums.size // CHAINS
    if head_dim % LANES == 0:
        mix(sums, head_dim, share, first, memory, values, count, position)
        return
    for t in range(count):
        weight, value = share[first + t], memory[values + t * head_dim : values + (t + 1) * head_dim]
        for d in range(head_dim):
            sums[d] += weight * value[d]


class TileBuffers(NamedTuple):
    """KV of one head that a chunk's tiles read, gathered from its slots, and what belongs to one tile."""

    keys: Floats  # [head_dim * the most positions]: transposed
    values: Floats  # [the most positions * head_dim, rounded up to whole vectors]
    queries: Floats  # [the most rows * head_dim]
    scores: Floats  # [the most rows * the most positions]
    mixed: Floats  # as `queries`, of rows rounded up to whole vectors
    norms: Floats  # [the most rows]


@_kernel(_CONTRACT)
def attend_tiles(
    layer: int,
    table: Ints,
    tiles: Ints,
    shape: DecoderDims,
    sinks: Floats,
    step: StepArrays,
    work: WorkBuffers,
    buffers: TileBuffers,
) -> None:
    """Compute attention of a chunk's tiles of work.qkv over the slots in `table` into work.mixed.

    A tile [5] is its first row, its number of rows, the index of its first key, its number of keys, and the position of
    its first query minus that of its first key. `sinks` are those of the layer, [heads | 0].
    """
    heads, kv_heads, head_dim, qkv, out = shape.heads, shape.kv_heads, shape.head_dim, work.qkv, work.mixed
    shared, window = heads // kv_heads, step.windows[step.layer_groups[layer]]
    row = table.size * step.block_tokens + LANES  # keys are multiplied by whole vectors
    width = (head_dim + LANES - 1) // LANES * LANES
    buffers.values[: row * width] = np.float32(0.0)
    for h in range(kv_heads):
        _gather_head(layer, h, head_dim, step, table, row, width, buffers)
        for n in range(tiles.shape[0]):
            first, count, key, keys, offset = tiles[n, 0], tiles[n, 1], tiles[n, 2], tiles[n, 3], tiles[n, 4]
            rows, scored = count * shared, (keys + LANES - 1) // LANES * LANES
            queries = buffers.queries[: rows * head_dim].reshape(rows, head_dim)
            scores = buffers.scores[: rows * scored].reshape(rows, scored)
            mixed = buffers.mixed[: rows * width].reshape(rows, width)
            for r in range(rows):
                column = (h * shared + r % shared) * head_dim
                queries[r] = qkv[first + r // shared, column : column + head_dim]
            scores[:] = np.float32(0.0)
            _add_products(queries, 0, head_dim, buffers.keys, _Submatrix(key, row, scored), scores, 0)
            for r in range(rows):
                end = offset + r // shared + 1
                sink = sinks[h * shared + r % shared] if sinks.size else _NO_SINK
                buffers.norms[r] = _soften_row(scores[r], max(end - window, 0) if window else 0, end, shape, sink)
            mixed[:] = np.float32(0.0)
            for k in range(0, keys, _DEPTH_AT_ONCE):
                at, depth = (key + k) * width, min(_DEPTH_AT_ONCE, keys - k)
                _add_products(scores, k, depth, buffers.values, _Submatrix(at, width, width), mixed, 0)
            for r in range(rows):
                column = (h * shared + r % shared) * head_dim
                y, norm = out[first + r // shared, column : column + head_dim], buffers.norms[r]
                for d in range(head_dim):
                    y[d] = mixed[r, d] * norm


@_kernel(_CONTRACT)
def _gather_head(
    layer: int, head: int, head_dim: int, step: StepArrays, table: Ints, row: int, width: int, buffers: TileBuffers
) -> None:
    """Copy one head of the slots in `table` to the buffers: rows of `row` keys, and values `width` apart."""
    group, block_tokens, memory = step.layer_groups[layer], step.block_tokens, step.memory
    keys, values, run = buffers.keys, buffers.values, block_tokens * head_dim
    for b in range(table.size):
        at = step.read_bases[layer] + table[b] * step.read_sizes[group] + 2 * head * run
        first = b * block_tokens
        for d in range(head_dim):
            for t in range(block_tokens):
                keys[d * row + first + t] = memory[at + t * head_dim + d]
        for t in range(block_tokens):
            to, here = (first + t) * width, at + run + t * head_dim
            values[to : to + head_dim] = memory[here : here + head_dim]


@_kernel(_CONTRACT)
def _soften_row(row: Floats, begin: int, end: int, shape: DecoderDims, sink: np.float32) -> np.float32:
    """Compute exp of a row of products row[begin:end] relative to the largest, in place; the others become 0.

    Returns 1 / their sum with the sink's.
    """
    seen, scale = row[begin:end], shape.scale
    if shape.softcap > 0:
        for j in range(seen.size):
            seen[j] = shape.softcap * np.tanh(scale * seen[j] / shape.softcap)
        scale = np.float32(1.0)
    row[:begin] = np.float32(0.0)
    row[end:] = np.float32(0.0)
    if sink > _NO_SINK:
        top = max(_max(seen), sink / scale)
        return np.float32(1.0) / (_exp_sum(seen, top, scale) + _exp((sink / scale - top) * scale))
    return np.float32(1.0) / _exp_sum(seen, _max(seen), scale)


@_kernel(_CONTRACT)
def _max(x: Floats) -> np.float32:
    """Return the largest of x by comparing the floats' bits as integers: only an integer maximum vectorises."""
    bits = x.view(np.int32)
    top = np.int32(-(1 << 31))
    for i in range(bits.size):
        top = max(top, np.int32(bits[i] ^ ((bits[i] >> np.int32(31)) & _BELOW_SIGN)))
    return np.int32(top ^ ((top >> np.int32(31)) & _BELOW_SIGN)).view(np.float32)


@_kernel(_CONTRACT)
def choose_experts(logits: Floats, scaled: bool, chosen: Ints, shares: Floats) -> None:
    """Write the experts of each row of logits [N, E] to chosen [N, T], in the order of their shares, and the shares.

    Of equal shares the lower expert's is first. Overwrites the logits.
    """
    for i in range(logits.shape[0]):
        row = logits[i]
        total = _exp_sum(row, _max(row), np.float32(1.0))
        kept = np.float32(0.0)
        for r in range(chosen.shape[1]):
            best = 0
            for e in range(1, row.size):
                if row[e] > row[best]:
                    best = e
            chosen[i, r], shares[i, r] = best, row[best] / total
            kept += shares[i, r]
            row[best] = np.float32(-1.0)
        if scaled:
            for r in range(chosen.shape[1]):
                shares[i, r] /= kept


@_kernel(_CONTRACT)
def take_rows(expert: int, hidden: Floats, work: WorkBuffers) -> int:
    """Copy the rows of hidden [N, d] that use an expert to `work.expert_in`; return how many they are."""
    count, per_token = 0, work.chosen.shape[1]
    for i in range(hidden.shape[0]):
        for r in range(per_token):
            if work.chosen[i, r] == expert:
                work.expert_in[count] = hidden[i]
                work.taken[count] = i * per_token + r
                count += 1
    return count


@_kernel(_CONTRACT)
def put_made(count: int, work: WorkBuffers) -> None:
    """Write what an expert made of its rows to `work.made`."""
    for n in range(count):
        work.made[work.taken[n]] = work.expert_out[n]


@_kernel(_CONTRACT)
def add_made(work: WorkBuffers, out: Floats) -> None:
    """Add what its experts made of each row to out [N, d], by their shares."""
    per_token = work.chosen.shape[1]
    for i in range(out.shape[0]):
        y = out[i]
        for r in range(per_token):
            share, made = work.shares[i, r], work.made[i * per_token + r]
            for j in range(y.size):
                y[j] += share * made[j]


@_kernel(_CONTRACT)
def add_experts(place: int, shape: DecoderDims, weights: KernelWeights, work: WorkBuffers) -> None:
    """Add what the experts of a layer make of work.hidden [N, d] to work.x."""
    none = work.scores[:0]
    depth, experts, size = work.hidden.shape[1], work.router.shape[1], shape.expert_size
    multiply(work.hidden, weights.router[place], none, work.router, False, experts, work.packed)
    choose_experts(work.router, shape.experts_scaled, work.chosen, work.shares)
    for expert in range(experts):
        count = take_rows(expert, work.hidden, work)
        if count:
            rows, gate_up = work.expert_in[:count], work.expert_gate_up[:count]
            gated, out = work.expert_gated[:count], work.expert_out[:count]
            scale = weights.experts_gate_up_scale[place, expert]
            project(rows, weights.experts_gate_up[place, expert], scale, none, gate_up, False, 2 * size, work)
            gate(gate_up, shape.gelu, gated)
            scale = weights.experts_down_scale[place, expert]
            project(gated, weights.experts_down[place, expert], scale, none, out, False, depth, work)
            put_made(count, work)
    add_made(work, work.x)


@_kernel(_CONTRACT)
def begin_layer(layer: int, shape: DecoderDims, weights: KernelWeights, step: StepArrays, work: WorkBuffers) -> None:
    """Compute the queries of work.x [N, d] and write its keys and values to the cache."""
    rms_norm(work.x, weights.attention_norm[layer], shape.eps, work.hidden)
    width = work.qkv.shape[1] if step.layer_owns[layer] else shape.heads * shape.head_dim
    scale, bias = weights.qkv_scale[layer], weights.qkv_bias[layer]
    project(work.hidden, weights.qkv[layer], scale, bias, work.qkv, False, width, work)
    place_rows(layer, shape, weights, step, work.qkv)


@_kernel(_CONTRACT)
def finish_layer(layer: int, shape: DecoderDims, weights: KernelWeights, step: StepArrays, work: WorkBuffers) -> None:
    """Add to work.x [N, d] what the layer makes of its attention, work.mixed, and then its MLP or experts."""
    x, hidden = work.x, work.hidden
    post_norm, scale, bias = weights.attention_post_norm[layer], weights.out_scale[layer], weights.out_bias[layer]
    _add_linear(work.mixed, weights.out[layer], scale, bias, post_norm, shape.eps, work)
    rms_norm(x, weights.mlp_norm[layer], shape.eps, hidden)
    place = step.mlp_places[layer]
    if step.layer_sparse[layer]:
        add_experts(place, shape, weights, work)
        return
    gates = weights.gate_up.shape[2]
    scale, bias = weights.gate_up_scale[place], weights.gate_up_bias[place]
    project(hidden, weights.gate_up[place], scale, bias, work.gate_up, False, gates, work)
    gate(work.gate_up, shape.gelu, work.gated)
    post_norm, scale, bias = weights.mlp_post_norm[layer], weights.down_scale[place], weights.down_bias[place]
    _add_linear(work.gated, weights.down[place], scale, bias, post_norm, shape.eps, work)


@_kernel(_CONTRACT)
def _add_linear(
    a: Floats, weight: Stored, scale: Floats, bias: Floats, post_norm: Floats, eps: np.float32, work: WorkBuffers
) -> None:
    """Add a linear layer's output to work.x, normalised if `post_norm` [d | 0] is not empty; overwrites work.hidden."""
    width = work.x.shape[1]
    if post_norm.size:
        project(a, weight, scale, bias, work.hidden, False, width, work)
        add_normed(work.hidden, post_norm, eps, work.x)
    else:
        project(a, weight, scale, bias, work.x, True, width, work)


@_kernel(_CONTRACT)
def run_layers(
    first: int, last: int, shape: DecoderDims, weights: KernelWeights, step: StepArrays, work: WorkBuffers, rows: Ints
) -> None:
    """Run decoder layers first..last-1 on work.x [N, d] in place, in one call: for steps of few rows."""
    chunks = step.chunk_rows.size - 1
    for layer in range(first, last):
        begin_layer(layer, shape, weights, step, work)
        sinks = weights.sinks[layer]
        if step.coded.size:
            for chunk in range(chunks):  # what one chunk reads stays in the cache of the processor
                if chunks > 1 or not _reads_the_same(layer, step):
                    decode_chunk(layer, chunk, shape, step)
                chunk_rows = rows[step.chunk_rows[chunk] : step.chunk_rows[chunk + 1]]
                attend_rows(layer, chunk_rows, shape, sinks, step, work.qkv, work.scores, work.mixed)
        else:
            attend_rows(layer, rows, shape, sinks, step, work.qkv, work.scores, work.mixed)
        finish_layer(layer, shape, weights, step, work)
