"""Mixtures of experts in Triton: rows sorted by expert are multiplied by all experts' matrices in one launch.

Each expert's rows are cut into tiles. The host does not wait to learn how many: it launches as many programs as any
choice of experts may need (`most_tiles`), and a program finds its expert in the ends of the experts' rows, or has
nothing to do. The first kernel reads the rows where they are and gates them; the second writes each row's product,
times its share, to where the row's outputs are summed.

With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

import triton
import triton.language as tl

from engine.backends.triton_linear_kernels import gated, tile_product


def most_tiles(choices: int, experts: int, rows: int) -> int:
    """Return how many tiles of `rows` rows the choices of any experts fill at most."""
    return (choices + min(experts, choices) * (rows - 1)) // rows


@triton.jit
def _tile(ends, tile, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (expert, its tile's first row, the end of its rows) of a tile; EXPERTS: there is no such tile.

    ends: int32 [EXPERTS], for each expert the number of rows of it and of those before it. WIDTH: EXPERTS as a power of
    two.
    """
    expert = tl.arange(0, WIDTH)
    is_expert = expert < EXPERTS
    end = tl.load(ends + expert, mask=is_expert, other=0)
    begin = tl.load(ends + expert - 1, mask=is_expert & (expert > 0), other=0)
    tiles = tl.where(is_expert, (end - begin + ROWS - 1) // ROWS, 0)
    before = is_expert & (tl.cumsum(tiles, 0) <= tile)
    chosen = tl.sum(before.to(tl.int32), 0)
    is_chosen = expert == chosen
    first = tile - tl.sum(tl.where(before, tiles, 0), 0)
    begin = tl.sum(tl.where(is_chosen, begin, 0), 0) + first * ROWS
    return chosen, begin, tl.sum(tl.where(is_chosen, end, 0), 0)


@triton.jit
def gate_by_experts(  # type: ignore[no-untyped-def]
    x,  # as `tile_product`, as the arguments that are not explained: a row is that of PER_TOKEN choices
    token_scales,
    order,  # int64 [choices]: the choices, sorted by expert; choice c is of row c // PER_TOKEN
    ends,  # int32 [EXPERTS]
    weight,  # of each expert [INPUTS, 2 * SIZE]: gates, then what they multiply
    expert_stride,
    input_stride,
    output_stride,
    scales,
    expert_scale_stride,
    group_stride,
    scale_stride,
    out,  # [choices, SIZE], sorted by expert
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS as a power of two
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of both halves together
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    expert, begin, end = _tile(ends, tl.program_id(0), EXPERTS, WIDTH, ROWS)
    if expert >= EXPERTS:
        return
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    HALF: tl.constexpr = OUTPUTS // 2
    column, first = tl.arange(0, OUTPUTS), tl.program_id(1) * HALF
    is_column = first + column % HALF < SIZE
    total = tile_product(
        x,
        token_scales,
        tl.load(order + row, mask=is_row, other=0) // PER_TOKEN,
        is_row,
        weight + expert.to(tl.int64) * expert_stride,
        input_stride,
        output_stride,
        scales + expert.to(tl.int64) * expert_scale_stride,
        group_stride,
        scale_stride,
        first + column // HALF * SIZE + column % HALF,
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
    gate, up = tl.split(tl.permute(tl.reshape(total, [ROWS, 2, HALF]), (0, 2, 1)))
    column = first + tl.arange(0, HALF)
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    values = gated(gate, up, out.dtype.element_ty, GELU)
    tl.store(out + place, values, mask=is_row[:, None] & (column < SIZE)[None, :])


@triton.jit
def weigh_by_experts(  # type: ignore[no-untyped-def]
    x,  # as `tile_product`, as the arguments that are not explained: a row is a choice, sorted by expert
    token_scales,
    order,  # int64 [choices]
    ends,  # int32 [EXPERTS]
    shares,  # float32 [choices], by choice
    weight,  # of each expert [INPUTS, OUT]
    expert_stride,
    input_stride,
    output_stride,
    scales,
    expert_scale_stride,
    group_stride,
    scale_stride,
    out,  # float32 [choices, OUT], by choice
    INPUTS: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS as a power of two
    FORM: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDEN: tl.constexpr,
):
    expert, begin, end = _tile(ends, tl.program_id(0), EXPERTS, WIDTH, ROWS)
    if expert >= EXPERTS:
        return
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = column < OUT
    total = tile_product(
        x,
        token_scales,
        row.to(tl.int64),
        is_row,
        weight + expert.to(tl.int64) * expert_stride,
        input_stride,
        output_stride,
        scales + expert.to(tl.int64) * expert_scale_stride,
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
    choice = tl.load(order + row, mask=is_row, other=0)
    weighted = total * tl.load(shares + choice, mask=is_row, other=0.0)[:, None]
    tl.store(out + choice[:, None] * OUT + column[None, :], weighted, mask=is_row[:, None] & is_column[None, :])
