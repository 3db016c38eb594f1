"""Which arrays will do as a block's memory, and where in memory they lie."""

import ctypes
from collections.abc import Sequence

import numpy as np

from kvpool.spec import KvSpec
from kvpool.ssd.records import Bytes

__all__ = ["BlockMemory", "Run"]

Run = tuple[int, int]
"""Address and bytes."""

_UINT8 = np.dtype(np.uint8)


class BlockMemory:
    """Remembers the slots' sizes of the specs it has met."""

    def __init__(self) -> None:
        self._slots: dict[KvSpec, tuple[int, ...]] = {}
        self._last: tuple[KvSpec | None, tuple[int, ...]] = (None, ())

    def runs(self, arrays: Sequence[Bytes], spec: KvSpec, *, writable: bool) -> list[Run] | str:
        """Where the arrays lie, or what is wrong with them as memory for a block, in words."""
        slots = self._sizes(spec)
        if len(arrays) != len(slots):
            return f"{len(arrays)} arrays, one for each of {len(slots)} groups expected"
        runs = []
        for array, nbytes in zip(arrays, slots, strict=True):
            if array.nbytes != nbytes or array.dtype != _UINT8:
                return f"{array.dtype} of shape {array.shape}: contiguous uint8 [{nbytes}] expected"
            try:
                # Twice as quick as asking the array itself, and refuses what is not contiguous or not writable.
                runs.append((ctypes.addressof(ctypes.c_char.from_buffer(array)), nbytes))  # type: ignore[arg-type]
            except TypeError:
                if writable or not array.flags.c_contiguous:
                    return "an array that is not contiguous, or cannot be written"
                runs.append((array.__array_interface__["data"][0], nbytes))
        return runs

    def _sizes(self, spec: KvSpec) -> tuple[int, ...]:
        # Hashing a spec takes longer than all else here, and the blocks of a request nearly always share one.
        last, slots = self._last
        if spec is not last:
            found = self._slots.get(spec)
            if found is None:
                found = self._slots[spec] = tuple(spec.slot_nbytes(g) for g in range(spec.num_groups))
            slots = found
            self._last = (spec, slots)
        return slots
