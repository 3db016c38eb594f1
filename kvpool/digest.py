"""Layer digests: 64 bits per (block, group, layer) that the producer sends and every reader verifies. No I/O.

Definition (frozen: other implementations must agree bit for bit). A layer of a slot is bytes
`[kv_head][k|v][token][head_dim]`. Each token row (one head, K or V, one token) has `row_nbytes = head_dim * itemsize`
bytes and is cut into `W = ceil(row_nbytes / 4)` little-endian uint32 words; if row_nbytes is not a multiple of 4, the
row's last word is padded with zero bytes at its upper end. Word `w` of token `t` of part `p` (0 = K, 1 = V) of head `h`
has the index

    index = ((h * 2 + p) * block_tokens + t) * W + w          (< 2**32)

which is its position among the uint32 words of the layer if row_nbytes is a multiple of 4. Then, modulo 2**64,

    mix(word, index):  x = (index << 32 | word) + 0x9E3779B97F4A7C15
                       x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9
                       x = (x ^ x >> 27) * 0x94D049BB133111EB
                       x = x ^ x >> 31
    digest = sum of mix(word, index) over all words of tokens 0 <= t < valid_tokens

mix is SplitMix64's output function (Steele, Lea, Flood, OOPSLA 2014), a bijection of 64 bits: one changed word always
changes the digest, and zeros count. Addition is commutative, so tokens, heads and words may be summed in any order, by
any number of threads, and the digest of tokens [0, b) is that of [0, a) plus that of [a, b). The digest of no tokens is
0. It detects corruption and reuse of memory, but not deliberate forgery.

A seal is a digest of digests: `seal_digest` hashes a block's layer digests in order, over all groups.
"""

from functools import cache, reduce
from operator import le, or_
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvpool.errors import SpecError
from kvpool.spec import TOKEN_RANGE, KvSpec

_FEW = 24
_SEAL_CONTEXT = "moonpool v1 2026 seal"


def layer_digests(
    slots: NDArray[np.uint8],
    spec: KvSpec,
    group: int,
    valid_tokens: NDArray[np.int32],
    layers: slice | None = None,
    *,
    first_tokens: NDArray[np.int32] | None = None,
) -> NDArray[np.uint64]:
    """Return the digests, uint64 [n_blocks, n_layers], of whole slots uint8 [n_blocks, slot_nbytes(group)].

    The rows of `slots` may be strided. `layers` selects layers of the group; other layers are not read. Of each block,
    the tokens from `first_tokens` [n_blocks] (default 0) up to `valid_tokens` [n_blocks] count. Releases the GIL.
    Raises SpecError if shapes, dtypes or token ranges do not fit the spec.
    """
    slot_nbytes = spec.slot_nbytes(group)
    if slots.ndim != 2 or slots.dtype != np.uint8 or slots.shape[1] != slot_nbytes:
        raise SpecError(f"slots is {slots.dtype} of shape {slots.shape}: expected uint8 [n, {slot_nbytes}]")
    if len(slots) == 0:
        memory, stride = np.empty(0, np.uint8), 0
    elif slots.strides[1] == 1 and slots.strides[0] >= slot_nbytes:
        stride = slots.strides[0]
        nbytes = stride * (len(slots) - 1) + slot_nbytes
        memory = np.lib.stride_tricks.as_strided(slots, (nbytes,), (1,), writeable=False)
    else:
        memory, stride = np.ascontiguousarray(slots).reshape(-1), slot_nbytes
    offsets = np.arange(len(slots), dtype=np.int64) * stride
    return layer_digests_at(memory, offsets, spec, group, valid_tokens, layers, first_tokens=first_tokens)


def layer_digests_at(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    spec: KvSpec,
    group: int,
    valid_tokens: NDArray[np.int32],
    layers: slice | None = None,
    *,
    first_tokens: NDArray[np.int32] | None = None,
) -> NDArray[np.uint64]:
    """Return the digests of the slots at byte `offsets` [n_blocks] of `memory` uint8 [nbytes], as `layer_digests`.

    Copies nothing. Fastest if slots start at multiples of 4 bytes and token rows are multiples of 4 bytes long.
    """
    whole, runs = spec.groups[group], spec.groups[group].kv_heads * 2
    row_nbytes = whole.token_row_nbytes
    layer_nbytes = runs * spec.block_tokens * row_nbytes
    slots = _checked(memory, offsets, first_tokens, valid_tokens, layer_nbytes * len(whole.layers), spec.block_tokens)
    aligned = row_nbytes % 4 == 0 and slots.alignment % 4 == 0 and memory.ctypes.data % 4 == 0
    unit = 4 if aligned else 1
    layer_units = layer_nbytes // unit
    first, last, step = (layers or slice(None)).indices(len(whole.layers))
    chosen = np.arange(first * layer_units, last * layer_units, step * layer_units, dtype=np.int64)
    digests = np.zeros((len(slots.offsets), len(chosen)), np.uint64)
    digest_words, digest_bytes = _kernels()
    if aligned:
        words = memory[: len(memory) // 4 * 4].view(np.uint32)
        digest_words(words, slots.offsets // 4, chosen, runs, spec.block_tokens, row_nbytes // 4, slots.tokens, digests)
    else:
        digest_bytes(memory, slots.offsets, chosen, runs, spec.block_tokens, row_nbytes, slots.tokens, digests)
    return digests


def seal_digest(digests: NDArray[np.uint64] | list[NDArray[np.uint64]]) -> int:
    """Return a 64-bit hash of a block's layer digests uint64 [n_layers]; for several groups, a list in group order."""
    parts = digests if isinstance(digests, list) else [digests]
    data = b"".join(np.ascontiguousarray(part, "<u8").tobytes() for part in parts)
    return int.from_bytes(blake3(data, derive_key_context=_SEAL_CONTEXT).digest(length=8), "little")


def warm_up() -> None:
    """Compile the kernels of `layer_digests` (about a second) or load them from the cache."""
    _kernels()


class _Slots(NamedTuple):
    """Slots that were checked; `alignment` has the bits of all offsets."""

    offsets: NDArray[np.int64]
    tokens: NDArray[np.void]  # TOKEN_RANGE
    alignment: int


def _checked(
    memory: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    first_tokens: NDArray[np.int32] | None,
    valid_tokens: NDArray[np.int32],
    slot_nbytes: int,
    block_tokens: int,
) -> _Slots:
    """Return the slots for the kernels. Raises SpecError."""
    if memory.ndim != 1 or memory.dtype != np.uint8 or (len(memory) and memory.strides != (1,)):
        raise SpecError(f"memory is {memory.dtype} of shape {memory.shape}: expected contiguous uint8 [nbytes]")
    offsets, stop = np.ascontiguousarray(offsets, np.int64), np.asarray(valid_tokens)
    start = None if first_tokens is None else np.asarray(first_tokens)
    if offsets.ndim != 1 or len(stop) != len(offsets) or (start is not None and len(start) != len(offsets)):
        raise SpecError(
            f"{len(offsets)} slots, but {len(stop)} valid_tokens and {len(offsets if start is None else start)} "
            "first_tokens"
        )
    if len(offsets) == 0:
        return _Slots(offsets, np.empty(0, TOKEN_RANGE), 0)
    if len(offsets) <= _FEW:  # without numpy, whose calls would take as long as the digests of a small block
        places, stops = offsets.tolist(), stop.tolist()
        starts = [0] * len(stops) if start is None else start.tolist()
        first, last, alignment = min(places), max(places), reduce(or_, places)
        in_block = min(starts) >= 0 and max(stops) <= block_tokens and all(map(le, starts, stops))
        numbers = [number for pair in zip(starts, stops, strict=True) for number in pair]
        tokens = np.array(numbers, np.int64).view(TOKEN_RANGE)
    else:
        tokens = np.zeros(len(stop), TOKEN_RANGE)
        tokens["stop"] = stop
        if start is not None:
            tokens["start"] = start
        first, last, alignment = int(offsets.min()), int(offsets.max()), int(np.bitwise_or.reduce(offsets))
        in_block = bool(tokens["start"].min() >= 0 and tokens["stop"].max() <= block_tokens)
        in_block = in_block and bool((tokens["start"] <= tokens["stop"]).all())
    if first < 0 or last + slot_nbytes > len(memory):
        raise SpecError(f"slots reach from {first} to {last + slot_nbytes}, outside of {len(memory)} bytes of memory")
    if not in_block:
        raise SpecError(f"token ranges must lie in 0..{block_tokens}, first_tokens <= valid_tokens")
    return _Slots(offsets, tokens, alignment)


@cache
def _kernels() -> tuple[Any, Any]:
    # Imported late: numba takes half a second to import, and processes that only compute addresses never need it.
    from kvpool.digest_kernels import digest_kernels

    return digest_kernels()
