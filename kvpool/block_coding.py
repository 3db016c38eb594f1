"""Lossless coding of a block's bytes: byte planes, each compressed by zstd if that makes it shorter.

A coded block consists of the coded length of each plane of each group, in order (uint32, little-endian), then of the
planes. A plane whose coded length is its length is stored as it is; a shorter one is a zstd frame. The spec defines the
planes (`kvpool.plane_kernels`), so nothing is allocated by what a coded block claims.

zstd is set to find hardly any match: KV has few, and without them it is a fast Huffman coder that reaches the entropy
of a plane's bytes to 1 %.
"""

import functools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvpool.errors import CodedBlockInvalid
from kvpool.plane_kernels import kernels
from kvpool.spec import DTYPE_NBYTES, KvGroup, KvSpec

Bytes = NDArray[np.uint8]

_LENGTH_NBYTES = 4
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=8,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
    write_checksum=False,
    write_dict_id=False,
)


class _Planes(NamedTuple):
    """Planes of one group's slots: the shapes that the kernels take, and the length of each plane in bytes."""

    rows: tuple[int, int]
    values: tuple[int, int, int]
    scales: tuple[int, int, int]
    lengths: tuple[int, ...]

    def views(self, planes: Bytes) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return the planes uint8 [slot_nbytes] of the values and of the scales, shaped for the kernels."""
        items, rows, count = self.values
        end = items * rows * count
        return planes[:end].reshape(self.values), planes[end:].reshape(self.scales)


class _Coders(threading.local):
    """A thread's own contexts of zstd and memory for planes, which no two threads may share."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress
        self.decompress = zstandard.ZstdDecompressor().decompress
        self._planes = np.empty(0, np.uint8)

    def planes(self, nbytes: int) -> Bytes:
        """Return memory that the thread's next call returns again: fresh memory costs more than coding into it."""
        if len(self._planes) < nbytes:
            self._planes = np.empty(nbytes, np.uint8)
        return self._planes[:nbytes]


_coders = _Coders()


def warm_up() -> None:
    """Compile the kernels (about two seconds) or load them from the cache."""
    kernels()


def encode_block(slots: Sequence[Bytes], spec: KvSpec) -> bytes | None:
    """Return the coded bytes of a block whose slots are uint8 [slot_nbytes] per group; None if they are not shorter."""
    lengths: list[int] = []
    parts: list[bytes] = []
    for slot, group in zip(slots, _planes_of(spec), strict=True):
        planes = _coders.planes(len(slot))
        kernels().split(slot.reshape(group.rows), *group.views(planes))
        view, at = planes.data, 0
        for length in group.lengths:
            plane = view[at : at + length]
            coded = _coders.compress(plane)
            parts.append(coded if len(coded) < length else bytes(plane))
            lengths.append(len(parts[-1]))
            at += length
    nbytes = _LENGTH_NBYTES * len(lengths) + sum(lengths)
    if nbytes >= spec.block_nbytes:
        return None
    return b"".join([np.array(lengths, "<u4").tobytes(), *parts])


def decode_block(coded: Bytes, slots: Sequence[Bytes], spec: KvSpec) -> None:
    """Decode uint8 [nbytes] into the block's slots, uint8 [slot_nbytes] per group.

    Raises CodedBlockInvalid if the bytes are not the coded form of a block of this spec; the slots are then undefined.
    """
    groups = _planes_of(spec)
    at = _LENGTH_NBYTES * sum(len(group.lengths) for group in groups)
    if len(coded) < at:
        raise CodedBlockInvalid(f"a coded block must have at least {at} bytes, got {len(coded)}")
    lengths = iter(coded[:at].view("<u4").tolist())
    for slot, group in zip(slots, groups, strict=True):
        planes, start = _coders.planes(len(slot)), 0
        for length in group.lengths:
            end = at + next(lengths)
            if end > len(coded):
                raise CodedBlockInvalid(f"a plane must end within the coded block's {len(coded)} bytes, got {end}")
            part = coded[at:end]
            planes[start : start + length] = part if len(part) == length else _decompressed(part, length)
            at, start = end, start + length
        kernels().join(*group.views(planes), slot.reshape(group.rows))
    if at != len(coded):
        raise CodedBlockInvalid(f"a coded block must end with its last plane, at {at}, got {len(coded)} bytes")


def _decompressed(frame: Bytes, length: int) -> Bytes:
    data = frame.data
    try:
        # The decompressor allocates what the frame declares, so that is compared first.
        declared = zstandard.frame_content_size(data)
        if declared != length:
            raise CodedBlockInvalid(f"a plane must have {length} bytes, but its frame declares {declared}")
        plane = _coders.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodedBlockInvalid(f"a plane must be a valid zstd frame: {error}") from error
    if len(plane) != length:
        raise CodedBlockInvalid(f"a plane must have {length} bytes, but its frame has {len(plane)}")
    return np.frombuffer(plane, np.uint8)


@functools.lru_cache(maxsize=64)
def _planes_of(spec: KvSpec) -> tuple[_Planes, ...]:
    return tuple(_group_planes(group, spec.block_tokens) for group in spec.groups)


def _group_planes(group: KvGroup, block_tokens: int) -> _Planes:
    items = DTYPE_NBYTES[group.dtype]
    num_scales = group.head_dim // group.scale_group if group.scale_group else 0
    rows, head_dim = len(group.layers) * group.kv_heads * 2 * block_tokens, group.head_dim
    lengths = (rows * head_dim,) * items + (rows * num_scales,) * (2 if num_scales else 0)
    if not num_scales:
        rows, head_dim = 1, rows * head_dim  # rows without scales are contiguous: one long row is faster
    return _Planes((rows, head_dim * items + 2 * num_scales), (items, rows, head_dim), (2, rows, num_scales), lengths)
