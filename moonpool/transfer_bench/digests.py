"""Digests of slices as the cluster makes them of a block's layers, and how they go with a notification."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from kvpool import KvGroup, KvSpec, layer_digests_at
from kvpool.digest import warm_up
from moonpool.transfer_bench.plan import Shape

LAYER_NBYTES = 64 << 10

_HEAD = struct.Struct("<QQQ")  # base, bytes of a slice, slices


class SliceDigests:
    """Each slice counts as a block whose layers are of 64 KiB; as one layer, if it is no multiple of that."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        warm_up()  # else the first batch would wait for the kernels
        self._memory = memory
        self._specs: dict[int, KvSpec] = {}

    def of(self, shape: Shape, base: int) -> NDArray[np.uint64]:
        """uint64 [slices, layers]; `shape.slice_nbytes` is a multiple of 256."""
        spec = self._spec(shape.slice_nbytes)
        valid = np.full(shape.slices, spec.block_tokens, np.int32)
        return layer_digests_at(self._memory, shape.offsets(base), spec, 0, valid)

    def message(self, shape: Shape, base: int) -> bytes:
        """What a writer sends with the batch."""
        return _HEAD.pack(base, shape.slice_nbytes, shape.slices) + self.of(shape, base).tobytes()

    def agrees(self, message: bytes) -> bool:
        """Whether the batch that a message is of has these digests here. False for what is no such message."""
        try:
            base, slice_nbytes, slices = _HEAD.unpack_from(message)
            shape = Shape(slice_nbytes, slices)
            if not slices or not slice_nbytes or base + shape.span > len(self._memory):
                return False
            expected = np.frombuffer(message, "<u8", offset=_HEAD.size)
            return bool(np.array_equal(self.of(shape, base).reshape(-1), expected))
        except (struct.error, ValueError):
            return False

    def _spec(self, nbytes: int) -> KvSpec:
        spec = self._specs.get(nbytes)
        if spec is None:
            layer_nbytes = LAYER_NBYTES if nbytes % LAYER_NBYTES == 0 else nbytes
            layers = tuple(range(nbytes // layer_nbytes))
            group = KvGroup("full", 0, layers, kv_heads=1, head_dim=32, dtype="float32")
            spec = self._specs[nbytes] = KvSpec((group,), layer_nbytes // 256)
        return spec
