"""Mixtures of experts in Triton: rows sorted by expert are multiplied by all experts' matrices in one launch.

Each expert's rows are cut into tiles. The host does not wait to learn how many: it launches as many programs as any
choice of experts may need (`most_tiles`), and a program finds its expert in the ends of the experts' rows, or has
nothing to do. The first kernel reads the rows where they are and gates them; the second writes each row's product,
times its share, to where the row's outputs are summed.

With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

import triton
import triton.language as tl

from engine.backends.triton_linear_kernels import activated


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
    h,  # [N, INPUTS]
    order,  # int64 [N * PER_TOKEN]: the choices, sorted by expert; choice c is of row c // PER_TOKEN
    ends,  # int32 [EXPERTS]
    weight,  # [EXPERTS, INPUTS, 2 * SIZE]: gates, then what they multiply
    out,  # as h [N * PER_TOKEN, SIZE], sorted by expert
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    GELU: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS as a power of two
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs that are multiplied at a time
    WIDEN: tl.constexpr,  # products of float32: the interpreter's of bfloat16 are wrong
):
    expert, begin, end = _tile(ends, tl.program_id(0), EXPERTS, WIDTH, ROWS)
    if expert >= EXPERTS:
        return
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    source = tl.load(order + row, mask=is_row, other=0) // PER_TOKEN
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = column < SIZE
    matrix = weight + expert.to(tl.int64) * INPUTS * 2 * SIZE
    gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
    up = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, INPUTS, DEPTH):
        inner = at + tl.arange(0, DEPTH)
        is_inner = inner < INPUTS
        a = tl.load(h + source[:, None] * INPUTS + inner[None, :], mask=is_row[:, None] & is_inner[None, :], other=0.0)
        cell = matrix + inner[:, None] * 2 * SIZE + column[None, :]
        mask = is_inner[:, None] & is_column[None, :]
        b, c = tl.load(cell, mask=mask, other=0.0), tl.load(cell + SIZE, mask=mask, other=0.0)
        if WIDEN:
            a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        gate = tl.dot(a, b, gate, input_precision="ieee")
        up = tl.dot(a, c, up, input_precision="ieee")
    gated = (activated(gate, GELU) * up).to(out.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(out + place, gated, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def weigh_by_experts(  # type: ignore[no-untyped-def]
    gated,  # [N * PER_TOKEN, SIZE], sorted by expert
    order,  # int64 [N * PER_TOKEN]
    ends,  # int32 [EXPERTS]
    shares,  # float32 [N * PER_TOKEN], by choice
    weight,  # [EXPERTS, SIZE, OUT]
    out,  # float32 [N * PER_TOKEN, OUT], by choice
    SIZE: tl.constexpr,
    OUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,  # EXPERTS as a power of two
    ROWS: tl.constexpr,  # of a tile
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,  # inputs that are multiplied at a time
    WIDEN: tl.constexpr,  # products of float32: the interpreter's of bfloat16 are wrong
):
    expert, begin, end = _tile(ends, tl.program_id(0), EXPERTS, WIDTH, ROWS)
    if expert >= EXPERTS:
        return
    row = begin + tl.arange(0, ROWS)
    is_row = row < end
    choice = tl.load(order + row, mask=is_row, other=0)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_column = column < OUT
    matrix = weight + expert.to(tl.int64) * SIZE * OUT
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for at in range(0, SIZE, DEPTH):
        inner = at + tl.arange(0, DEPTH)
        is_inner = inner < SIZE
        source = gated + row.to(tl.int64)[:, None] * SIZE + inner[None, :]
        a = tl.load(source, mask=is_row[:, None] & is_inner[None, :], other=0.0)
        cell = matrix + inner[:, None] * OUT + column[None, :]
        b = tl.load(cell, mask=is_inner[:, None] & is_column[None, :], other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    weighted = total * tl.load(shares + choice, mask=is_row, other=0.0)[:, None]
    tl.store(out + choice[:, None] * OUT + column[None, :], weighted, mask=is_row[:, None] & is_column[None, :])
