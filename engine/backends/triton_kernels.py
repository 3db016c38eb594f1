"""Attention over the slots of a paged cache in Triton: one kernel for decode rows and prompts, and the merge of splits.

A program computes a tile: consecutive rows of one chunk, together with all query heads of one KV head, so that keys and
values are read once for all of them. It reads the slots in place, of an int8 cache the integers and their scales. With
SPLITS > 1, the visible keys of a tile are cut into parts that are computed in parallel and merged by a second kernel
(Dao et al. 2023, Flash-Decoding). The softmax is online (Dao 2022, FlashAttention, Algorithm 1), in float32.

With TRITON_INTERPRET=1 the kernels run on CPU tensors.
"""

import triton
import triton.language as tl

TILE_FIELDS = tl.constexpr(5)
"""Integers of a tile: its first row, number of rows, first position, first visible position and table. The output of a
tile without rows, at position 0, is 0 in its first row.
"""


@triton.jit
def _capped(scores, cap):  # type: ignore[no-untyped-def]
    """Return cap * tanh(scores / cap); 2 * sigmoid(2z) - 1 is tanh(z)."""
    return cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)


@triton.jit
def _read_rows(kv, source, column, mask, HEAD_DIM: tl.constexpr, SCALE_GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the values of cached rows, [keys, WIDTH]; of an int8 cache in float32."""
    if SCALE_GROUP > 0:
        steps = (kv + source[:, None] + column[None, :]).to(tl.pointer_type(tl.int8))
        unit = HEAD_DIM + column // SCALE_GROUP * 2
        scales = (kv + source[:, None] + unit[None, :]).to(tl.pointer_type(tl.float16))
        rows = tl.load(steps, mask=mask, other=0).to(tl.float32) * tl.load(scales, mask=mask, other=0).to(tl.float32)
    else:
        rows = tl.load(kv + source[:, None] + column[None, :], mask=mask, other=0.0)
    return rows


@triton.jit
def attend_tiles(  # type: ignore[no-untyped-def]
    q,  # [N, HEADS, HEAD_DIM]
    kv,  # slot 0 of the layer; slots slot_size and KV heads 2 * BLOCK_TOKENS * ROW apart, in elements
    tables,  # int32, all slot tables
    tiles,  # int32 [T, TILE_FIELDS]
    sinks,  # float32 [HEADS], if HAS_SINKS
    out,  # SPLITS == 1: as q; else float32 [SPLITS, N, HEADS, HEAD_DIM], not yet divided
    tops,  # float32 [SPLITS, N, HEADS]: the largest score of each part; with SPLITS > 1
    sums,  # float32 [SPLITS, N, HEADS]
    rows_in_step,
    slot_size,
    scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,  # HEAD_DIM as a power of two
    BLOCK_TOKENS: tl.constexpr,
    ROW: tl.constexpr,  # elements of a cached row; in an int8 cache, bytes
    SCALE_GROUP: tl.constexpr,  # 0 unless the cache is in int8
    QUERIES: tl.constexpr,  # rows * SHARED of a tile at most, as a power of two
    KEYS: tl.constexpr,  # keys that are multiplied at a time
    SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,  # 0 = none
    WIDEN: tl.constexpr,  # products of float32: the interpreter's of bfloat16 are wrong
):
    head, split = tl.program_id(1), tl.program_id(2)
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    first_row, count, position = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    first_seen, table = tl.load(tile + 3), tl.load(tile + 4)

    query = tl.arange(0, QUERIES)
    row, of_head = query // SHARED, head * SHARED + query % SHARED
    is_query = row < tl.maximum(count, 1)
    column = tl.arange(0, WIDTH)
    is_column = column < HEAD_DIM
    place = (first_row + row).to(tl.int64)
    own = ((place * KV_HEADS * SHARED + of_head) * HEAD_DIM)[:, None] + column[None, :]
    is_own = is_query[:, None] & is_column[None, :]
    asked = tl.load(q + own, mask=is_own, other=0.0)
    low = tl.full([QUERIES], 0, tl.int32) + first_seen
    lowest = first_seen
    if WINDOW > 0:
        low = tl.maximum(low, position + row - WINDOW + 1)
        lowest = tl.maximum(first_seen, position - WINDOW + 1)
    end = position + count
    begin = lowest // KEYS * KEYS
    part = (tl.cdiv(end - begin, KEYS) + SPLITS - 1) // SPLITS * KEYS
    begin += split * part
    end = tl.minimum(end, begin + part)

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if HAS_SINKS:  # they are scores of the first part
        top = tl.where(split == 0, tl.load(sinks + of_head, mask=is_query, other=0.0), top)
        total = tl.where(split == 0, 1.0, total)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    at = begin
    while at < end:  # the interpreter of some versions takes no loaded bounds in range()
        key = at + tl.arange(0, KEYS)
        is_key = (key >= lowest) & (key < end)
        slot = tl.load(tables + table + key // BLOCK_TOKENS, mask=is_key, other=0).to(tl.int64)
        source = slot * slot_size + (head * 2 * BLOCK_TOKENS + key % BLOCK_TOKENS) * ROW
        mask = is_key[:, None] & is_column[None, :]
        k = _read_rows(kv, source, column, mask, HEAD_DIM, SCALE_GROUP).to(asked.dtype)
        v = _read_rows(kv, source + BLOCK_TOKENS * ROW, column, mask, HEAD_DIM, SCALE_GROUP).to(asked.dtype)
        shares_type = v.dtype
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(asked.to(k.dtype), tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = _capped(scores, SOFTCAP)
        visible = is_key[None, :] & (key[None, :] >= low[:, None]) & (key[None, :] <= position + row[:, None])
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Rows that have seen nothing yet have a top of -inf, from which nothing may be subtracted.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shares = tl.exp(scores - base[:, None])
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(shares, 1)
        mixed = mixed * kept[:, None] + tl.dot(shares.to(shares_type).to(v.dtype), v, input_precision="ieee")
        top = new_top
        at += KEYS

    if SPLITS == 1:
        mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out + own, mixed.to(out.dtype.element_ty), mask=is_own)
    else:
        cell = (split.to(tl.int64) * rows_in_step + place) * KV_HEADS * SHARED + of_head
        tl.store(out + cell[:, None] * HEAD_DIM + column[None, :], mixed, mask=is_own)
        tl.store(tops + cell, top, mask=is_query)
        tl.store(sums + cell, total, mask=is_query)


@triton.jit
def merge_splits(  # type: ignore[no-untyped-def]
    parts,  # float32 [SPLITS, N, HEADS, HEAD_DIM]
    tops,  # float32 [SPLITS, N, HEADS]
    sums,
    tiles,  # int32 [T, TILE_FIELDS], of one row each
    out,  # [N, HEADS, HEAD_DIM]
    rows_in_step,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_WIDTH: tl.constexpr,  # SPLITS as a power of two
):
    row, head = tl.load(tiles + tl.program_id(0) * TILE_FIELDS).to(tl.int64), tl.program_id(1)
    split, column = tl.arange(0, SPLITS_WIDTH), tl.arange(0, WIDTH)
    is_split, is_column = split < SPLITS, column < HEAD_DIM
    cell = (split.to(tl.int64) * rows_in_step + row) * HEADS + head
    top = tl.load(tops + cell, mask=is_split, other=float("-inf"))
    base = tl.max(top, 0)
    kept = tl.exp(top - tl.where(base == float("-inf"), 0.0, base))
    total = tl.sum(tl.load(sums + cell, mask=is_split, other=0.0) * kept, 0)
    mask = is_split[:, None] & is_column[None, :]
    mixed = tl.load(parts + cell[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    mixed = tl.sum(mixed * kept[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + column, mixed.to(out.dtype.element_ty), mask=is_column)
