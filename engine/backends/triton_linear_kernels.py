"""Linear layers in Triton: activations quantised row by row, and products of matrices in int8 or packed integers.

Kernels that quantise compute whole rows: a row alone, the RMS norm of a row, or the gated halves of a row, so that the
values between are not written to memory. Products are computed in tiles of rows and outputs (`tile_product`): in int8
exactly (int32); of packed integers, which are unpacked in registers, in float32.

With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

import triton
import triton.language as tl

FLOATS, INT8, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Forms of matrices: floats, `engine.int8_linear` and `engine.packed_weights`."""
LARGEST = tl.constexpr(127.0)
TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it to a small float32 rounds to integers, half to even
_TANH_SLOPE = tl.constexpr(1.5957691216057308)  # 2 * sqrt(2 / pi)


@triton.jit
def _activated(gate, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
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
    whole = (tl.div_rn(values, tl.zeros_like(values) + unit) + TO_WHOLE) - TO_WHOLE
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
def gated(gate, up, KIND: tl.constexpr, GELU: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return activation(gate) * up of values in float32, rounded to KIND after each operation as torch does."""
    gate, up = gate.to(KIND).to(tl.float32), up.to(KIND).to(tl.float32)
    return (_activated(gate, GELU).to(KIND).to(tl.float32) * up).to(KIND)


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
    """Multiply by activated gates."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = column < INPUTS
    source = gate_up + row * 2 * INPUTS + column
    gate = tl.load(source, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(source + INPUTS, mask=is_column, other=0.0).to(tl.float32)
    values = gated(gate, up, gate_up.dtype.element_ty, GELU)
    if QUANTISE:
        _store_quantised(values.to(tl.float32), out, scales, row, column, is_column, INPUTS)
    else:
        tl.store(out + row * INPUTS + column, values, mask=is_column)


@triton.jit
def tile_product(  # type: ignore[no-untyped-def]
    x,  # [rows, INPUTS]; in the form INT8 integers, int8
    token_scales,  # float32 [rows], in the form INT8
    row,  # int64 [ROWS]
    is_row,
    weight,  # [INPUTS, outputs] with these strides; in the form PACKED int32 [words of INPUTS, outputs]
    input_stride,
    output_stride,
    scales,  # [groups, outputs] with these strides, unless in the form FLOATS
    group_stride,
    scale_stride,
    column,  # int32 [OUTPUTS]
    is_column,
    INPUTS: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,  # of a packed integer
    GROUP: tl.constexpr,  # inputs that share a scale; 0: all
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs that are multiplied at a time
    WIDEN: tl.constexpr,  # products of float32: the interpreter's of bfloat16 are wrong
):
    """Return a tile of x @ weight, float32 [ROWS, OUTPUTS], of matrices in one of the forms."""
    total = tl.zeros([ROWS, OUTPUTS], tl.int32 if FORM == INT8 else tl.float32)
    of_output = scales + column * scale_stride
    for at in range(0, INPUTS, DEPTH):
        inner = at + tl.arange(0, DEPTH)
        is_inner = inner < INPUTS
        a = tl.load(x + row[:, None] * INPUTS + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0)
        if WIDEN and FORM != INT8:
            a = a.to(tl.float32)
        if FORM == PACKED:
            PER_WORD: tl.constexpr = 32 // BITS
            word = at // PER_WORD + tl.arange(0, DEPTH // PER_WORD)
            source = weight + word[:, None] * input_stride + column[None, :] * output_stride
            held = tl.load(source, mask=(word * PER_WORD < INPUTS)[:, None] & is_column[None, :], other=0)
            shift = (tl.arange(0, PER_WORD) * BITS)[None, :, None]
            steps = ((held[:, None, :] >> shift) & ((1 << BITS) - 1)) - (1 << (BITS - 1))
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
        else:
            source = weight + inner[:, None] * input_stride + column[None, :] * output_stride
            b = tl.load(source, mask=is_inner[:, None] & is_column[None, :], other=0)
            if FORM == INT8:
                total = tl.dot(a, b, total, out_dtype=tl.int32)
            else:
                total = tl.dot(a, b.to(a.dtype), total, input_precision="ieee")
    if FORM == INT8:
        total = total.to(tl.float32) * tl.load(token_scales + row, mask=is_row, other=0.0)[:, None]
        total = total * tl.load(of_output, mask=is_column, other=0.0)[None, :]
    elif FORM == PACKED and GROUP == 0:
        total = total * tl.load(of_output, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def multiply(  # type: ignore[no-untyped-def]
    x,  # as `tile_product`, as the arguments that are not explained
    token_scales,
    weight,
    input_stride,
    output_stride,
    scales,
    group_stride,
    scale_stride,
    bias,  # [outputs], if HAS_BIAS
    out,  # [rows, outputs]
    rows,
    outputs,
    INPUTS: tl.constexpr,
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_row, is_column = row < rows, column < outputs
    total = tile_product(
        x,
        token_scales,
        row,
        is_row,
        weight,
        input_stride,
        output_stride,
        scales,
        group_stride,
        scale_stride,
        column,
        is_column,
        INPUTS,
        FORM,
        BITS,
        GROUP,
        ROWS,
        OUTPUTS,
        DEPTH,
        WIDEN,
    )
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out + row[:, None] * outputs + column[None, :], total.to(out.dtype.element_ty), mask=mask)
