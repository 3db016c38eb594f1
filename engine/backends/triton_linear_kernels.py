"""Linear layers in Triton: activations quantised row by row, and products of matrices in int8 or packed integers.

Kernels that quantise compute whole rows: a row alone, the RMS norm of a row, or the gated halves of a row, so that the
values between are not written to memory. Products are computed in tiles of rows and outputs, in int8 exactly (int32),
with packed integers in float32: these are unpacked in registers.

With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(127.0)
_TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small float32 rounds to integers, half to even
_TANH_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)


@triton.jit
def activated(gate, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return silu(gate), or gelu by tanh, in float32: z * (1 + tanh(u)) / 2 is z * sigmoid(2u)."""
    slope = gate
    if GELU:
        slope = (gate + 0.044715 * gate * gate * gate) * _TANH_SLOPE
    return gate * tl.sigmoid(tl.maximum(slope, -87.0))  # exp(87) is the largest that does not overflow


@triton.jit
def _store_quantised(values, steps, scales, row, column, is_column, INPUTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a row, float32, as `engine.int8_linear.quantised` rounds it; what is not of the row must be 0."""
    scale = tl.div_rn(tl.max(tl.abs(values), 0), LARGEST)
    broken = tl.max((values != values).to(tl.int32), 0)  # maxima do not propagate NaN
    scale = tl.where(broken > 0, float("nan"), scale)
    # A scale of 0 represents values that underflow; with one that is not finite, no integer matters.
    unit = tl.where((scale > 0) & (scale < float("inf")), scale, 1.0)
    whole = (tl.div_rn(values, tl.zeros_like(values) + unit) + _TO_WHOLE) - _TO_WHOLE
    whole = tl.minimum(tl.maximum(whole, -LARGEST), LARGEST)
    whole = tl.where(whole == whole, whole, 0.0)
    tl.store(steps + row * INPUTS + column, whole.to(tl.int8), mask=is_column)
    tl.store(scales + row, scale)


@triton.jit
def quantise_rows(x, steps, scales, INPUTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantise x [N, INPUTS]: steps int8 [N, INPUTS], scales float32 [N]. WIDTH: INPUTS as a power of two."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = column < INPUTS
    values = tl.load(x + row * INPUTS + column, mask=is_column, other=0.0).to(tl.float32)
    _store_quantised(values, steps, scales, row, column, is_column, INPUTS)


@triton.jit
def quantise_norms(x, weight, steps, scales, eps, INPUTS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantise the RMS norms of x [N, INPUTS], in x's dtype, times weight [INPUTS]; as `quantise_rows`."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = column < INPUTS
    values = tl.load(x + row * INPUTS + column, mask=is_column, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / INPUTS + eps)
    values = values * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    values = values.to(x.dtype.element_ty).to(tl.float32)
    _store_quantised(values, steps, scales, row, column, is_column, INPUTS)


@triton.jit
def gate_rows(  # type: ignore[no-untyped-def]
    gate_up,  # [N, 2 * INPUTS]: gates, then what they multiply
    out,  # as gate_up [N, INPUTS]; with QUANTISE int8
    scales,  # float32 [N], with QUANTISE
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,  # INPUTS as a power of two
    GELU: tl.constexpr,
    QUANTISE: tl.constexpr,
):
    """Multiply by activated gates, rounded to the rows' dtype after each operation as torch does."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = column < INPUTS
    source = gate_up + row * 2 * INPUTS + column
    kind: tl.constexpr = gate_up.dtype.element_ty
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + INPUTS, mask=is_column, other=0.0).to(tl.float32)
    values = (activated(gate, GELU).to(kind).to(tl.float32) * up).to(kind)
    if QUANTISE:
        _store_quantised(values.to(tl.float32), out, scales, row, column, is_column, INPUTS)
    else:
        tl.store(out + row * INPUTS + column, values, mask=is_column)


@triton.jit
def _store_tile(total, bias, out, row, column, rows, outputs, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a tile, float32, of out [rows, outputs], with the bias added."""
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def multiply_int8(  # type: ignore[no-untyped-def]
    steps,  # int8 [rows, INPUTS]
    token_scales,  # float32 [rows]
    weight,  # int8 [INPUTS, outputs], with these strides
    scales,  # float32 [outputs]
    bias,  # [outputs], if HAS_BIAS
    out,  # [rows, outputs]
    rows,
    outputs,
    input_stride,
    output_stride,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs that are multiplied at a time
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_column = row < rows, column < outputs
    total = tl.zeros([ROWS, OUTPUTS], tl.int32)
    for at in range(0, INPUTS, DEPTH):
        inner = at + tl.arange(0, DEPTH)
        is_inner = inner < INPUTS
        a = tl.load(steps + row[:, None] * INPUTS + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0)
        source = weight + inner[:, None] * input_stride + column[None, :] * output_stride
        b = tl.load(source, mask=is_inner[:, None] & is_column[None, :], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
    scaled = total.to(tl.float32) * tl.load(token_scales + row, mask=is_row, other=0.0)[:, None]
    scaled = scaled * tl.load(scales + column, mask=is_column, other=0.0)[None, :]
    _store_tile(scaled, bias, out, row, column, rows, outputs, HAS_BIAS)


@triton.jit
def multiply_packed(  # type: ignore[no-untyped-def]
    x,  # [rows, INPUTS]
    words,  # int32 [words of INPUTS, outputs], with these strides: `engine.packed_weights`
    scales,  # [groups, outputs], with these strides
    bias,  # [outputs], if HAS_BIAS
    out,  # [rows, outputs]
    rows,
    outputs,
    word_stride,
    word_output_stride,
    group_stride,
    scale_output_stride,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs that are multiplied at a time
    WIDEN: tl.constexpr,  # products of float32: the interpreter's of bfloat16 are wrong
):
    PER_WORD: tl.constexpr = 32 // BITS
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_column = row < rows, column < outputs
    shift = tl.arange(0, PER_WORD) * BITS
    of_output = scales + column * scale_output_stride
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, INPUTS, DEPTH):
        inner = at + tl.arange(0, DEPTH)
        is_inner = inner < INPUTS
        a = tl.load(x + row[:, None] * INPUTS + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        if WIDEN:
            a = a.to(tl.float32)
        word = at // PER_WORD + tl.arange(0, DEPTH // PER_WORD)
        source = words + word[:, None] * word_stride + column[None, :] * word_output_stride
        mask = (word * PER_WORD < INPUTS)[:, None] & is_column[None, :]
        held = tl.load(source, mask=mask, other=0)
        steps = ((held[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
        b = tl.reshape(steps, [DEPTH, OUTPUTS])
        if GROUP == 0:
            total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
        elif GROUP % DEPTH == 0:
            scale = tl.load(of_output + at // GROUP * group_stride, mask=is_column, other=0.0).to(tl.float32)
            total += tl.dot(a, b.to(a.dtype), input_precision="ieee") * scale[None, :]
        else:
            of_group = of_output[None, :] + (inner // GROUP)[:, None] * group_stride
            scale = tl.load(of_group, mask=is_inner[:, None] & is_column[None, :], other=0.0).to(tl.float32)
            total = tl.dot(a, (b.to(tl.float32) * scale).to(a.dtype), total, input_precision="ieee")
    if GROUP == 0:
        total = total * tl.load(of_output, mask=is_column, other=0.0).to(tl.float32)[None, :]
    _store_tile(total, bias, out, row, column, rows, outputs, HAS_BIAS)
