"""Operations on the rows of a step between its matrix products in Triton: norms with the sum before them, and queries,
keys and values on their way into attention and the cache.

Each kernel computes in float32 and rounds where the operations of torch that it replaces round. With TRITON_INTERPRET=1
the kernels run on CPU tensors.
"""

import triton
import triton.language as tl

from engine.backends.triton_linear_kernels import LARGEST, TO_WHOLE


@triton.jit
def add_and_norm(  # type: ignore[no-untyped-def]
    x,  # [N, SIZE]
    h,  # as x, with ADDS
    post_weight,  # [SIZE], with POST_NORM
    weight,  # [SIZE]
    total,  # as x, with ADDS
    normed,  # as x
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE as a power of two
    ADDS: tl.constexpr,
    POST_NORM: tl.constexpr,
):
    """Compute total = x + h, or x + norm(h) * post_weight, and normed = norm(total) * weight; one row per program."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    is_column = column < SIZE
    at = row * SIZE + column
    kind: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
    if ADDS:
        added = tl.load(h + at, mask=is_column, other=0.0).to(tl.float32)
        if POST_NORM:
            added = added * tl.rsqrt(tl.sum(added * added, 0) / SIZE + eps)
            added = added * tl.load(post_weight + column, mask=is_column, other=0.0).to(tl.float32)
            added = added.to(kind).to(tl.float32)
        values = (values + added).to(kind)
        tl.store(total + at, values, mask=is_column)
        values = values.to(tl.float32)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    values = values * tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + at, values.to(kind), mask=is_column)


@triton.jit
def _store_int8_row(values, target, column, is_column, HEAD_DIM: tl.constexpr, UNIT: tl.constexpr, UNITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a row, float32 [UNITS, values], as `engine.int8_rows.encode_rows` does; what is masked must be 0."""
    scale = tl.div_rn(tl.max(tl.abs(values), 1), tl.zeros([UNITS], tl.float32) + LARGEST)
    broken = tl.max((values != values).to(tl.int32), 1)  # maxima do not propagate NaN
    scale = tl.where(broken > 0, float("nan"), scale).to(tl.float16)
    unit = tl.where(scale == 0, 1.0, scale.to(tl.float32))
    whole = (tl.div_rn(values, tl.zeros_like(values) + unit[:, None]) + TO_WHOLE) - TO_WHOLE
    whole = tl.where(scale[:, None] == 0, 0.0, tl.minimum(tl.maximum(whole, -LARGEST), LARGEST))
    is_number = (values == values) & (unit == unit)[:, None] & (tl.abs(values) < float("inf"))
    whole = tl.where(is_number, whole, 0.0)
    tl.store((target + column).to(tl.pointer_type(tl.int8)), whole.to(tl.int8), mask=is_column)
    group = tl.arange(0, UNITS)
    scales = (target + HEAD_DIM + group * 2).to(tl.pointer_type(tl.float16))
    tl.store(scales, scale, mask=group < HEAD_DIM // UNIT)


@triton.jit
def place_heads(  # type: ignore[no-untyped-def]
    qkv,  # [N, query heads, then key heads and value heads if there are any, HEAD_DIM]
    q_weight,  # [HEAD_DIM], with NORM
    k_weight,
    cos,  # float32 [N, HEAD_DIM // 2]
    sin,
    slots,  # int32 [N]; -1: the row's keys and values are not written
    offsets,  # int32 [N]: position in the slot
    q,  # [N, HEADS, HEAD_DIM]
    kv,  # slot 0 of the layer; slots slot_size and KV heads 2 * BLOCK_TOKENS * ROW apart, in elements
    slot_size,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    UNIT: tl.constexpr,  # values that share a scale; HEAD_DIM unless the cache is in int8
    UNITS: tl.constexpr,  # HEAD_DIM // UNIT as a power of two
    UNIT_WIDTH: tl.constexpr,  # UNIT as a power of two
    BLOCK_TOKENS: tl.constexpr,
    ROW: tl.constexpr,  # elements of a cached row; in an int8 cache, bytes
    INT8: tl.constexpr,
    NORM: tl.constexpr,
):
    """Normalise and rotate queries and keys, write the queries to `q` and the keys and values into the cache; one head
    of one row per program.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, UNITS)[:, None] * UNIT + tl.arange(0, UNIT_WIDTH)[None, :]
    is_column = (tl.arange(0, UNIT_WIDTH)[None, :] < UNIT) & (column < HEAD_DIM)
    half: tl.constexpr = HEAD_DIM // 2
    kind: tl.constexpr = qkv.dtype.element_ty
    source = qkv + (row * tl.num_programs(1) + head) * HEAD_DIM
    values = tl.load(source + column, mask=is_column, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        # A rotation needs the value half a row away, too. It is read and normalised a second time, which needs no
        # exchange between threads.
        partner = (column + half) % HEAD_DIM
        others = tl.load(source + partner, mask=is_column, other=0.0).to(tl.float32)
        if NORM:
            is_q, is_k = is_column & (head < HEADS), is_column & (head >= HEADS)
            root = tl.rsqrt(tl.sum(tl.sum(values * values, 1), 0) / HEAD_DIM + eps)
            own = tl.load(q_weight + column, mask=is_q, other=0.0) + tl.load(k_weight + column, mask=is_k, other=0.0)
            far = tl.load(q_weight + partner, mask=is_q, other=0.0) + tl.load(k_weight + partner, mask=is_k, other=0.0)
            values = (values * root * own.to(tl.float32)).to(kind).to(tl.float32)
            others = (others * root * far.to(tl.float32)).to(kind).to(tl.float32)
        angle = row * half + column % half
        cosine = tl.load(cos + angle, mask=is_column, other=0.0).to(kind).to(tl.float32)
        sine = tl.load(sin + angle, mask=is_column, other=0.0).to(kind).to(tl.float32)
        turned = (others * sine).to(kind).to(tl.float32)
        values = (values * cosine).to(kind).to(tl.float32) + tl.where(column < half, -turned, turned)
    if head < HEADS:
        tl.store(q + (row * HEADS + head) * HEAD_DIM + column, values.to(kind), mask=is_column)
    else:
        slot, offset = tl.load(slots + row).to(tl.int64), tl.load(offsets + row)
        of_kind, kv_head = (head - HEADS) // KV_HEADS, (head - HEADS) % KV_HEADS
        if slot >= 0:
            target = kv + slot * slot_size + ((kv_head * 2 + of_kind) * BLOCK_TOKENS + offset) * ROW
            if INT8:
                _store_int8_row(values.to(kind).to(tl.float32), target, column, is_column, HEAD_DIM, UNIT, UNITS)
            else:
                tl.store(target + column, values.to(kind), mask=is_column)
