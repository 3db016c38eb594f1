"""Which arrays will do as a block's memory."""

from collections.abc import Sequence

import numpy as np

from kvpool.spec import KvSpec
from kvpool.ssd.records import Bytes

__all__ = ["SlotSizes"]

_UINT8 = np.dtype(np.uint8)


class SlotSizes:
    """Remembers the slots' sizes of the specs it has met."""

    def __init__(self) -> None:
        self._slots: dict[KvSpec, tuple[int, ...]] = {}

    def unfit(self, arrays: Sequence[Bytes], spec: KvSpec, *, writable: bool) -> str:
        """What is wrong with these as memory for a block, in words; empty when nothing is."""
        slots = self._slots.get(spec)
        if slots is None:
            slots = self._slots[spec] = tuple(spec.slot_nbytes(g) for g in range(spec.num_groups))
        if len(arrays) != len(slots):
            return f"{len(arrays)} arrays, one for each of {len(slots)} groups expected"
        for array, nbytes in zip(arrays, slots, strict=True):
            flags = array.flags
            if array.nbytes != nbytes or array.dtype != _UINT8 or not flags.c_contiguous:
                return f"{array.dtype} of shape {array.shape}: contiguous uint8 [{nbytes}] expected"
            if writable and not flags.writeable:
                return "an array that cannot be written"
        return ""
