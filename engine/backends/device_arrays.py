"""Integer arrays of a step on the backend's device, copied there at once: each copy costs a launch."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import FlatBatch, IntArray

_ALIGNED = 16  # integers: kernels read more at a time from addresses of multiples of 16 bytes

Arrays = Mapping[str, npt.NDArray[np.int32]]


def on_device(arrays: Arrays, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the arrays as int32 tensors on `device`, of the same shapes. On CUDA, the copy is queued."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()]).astype(np.int32, copy=False))
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = torch.split(flat, [array.size for array in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}


def row_arrays(plan: FlatBatch, angles: IntArray, block_tokens: int) -> dict[str, IntArray]:
    """Return tokens, rotations and places in the cache of a step's rows: slots [KV groups, N], the others [N]."""
    blocks, offsets = np.divmod(plan.positions, block_tokens)
    slots = plan.tables[plan.table_begin[:, plan.row_chunk] + blocks]
    return {"angles": angles, "tokens": plan.token_ids, "offsets": offsets, "slots": slots}


class StaticArrays:
    """Room for the arrays of a step at a fixed address on a device, which every step overwrites.

    Arrays lie one after another, so that where they begin depends on the sizes of those before them.
    """

    def __init__(self, integers: int, device: torch.device) -> None:
        self._room = torch.empty(integers, dtype=torch.int32, device=device)

    def write(self, arrays: Arrays) -> bool:
        """Copy the arrays into the room; on CUDA, the copy is queued. Return False if they do not fit."""
        begins = _begins(arrays)
        flat = np.zeros(begins[-1], np.int32)
        if len(flat) > len(self._room):
            return False
        for begin, array in zip(begins, arrays.values(), strict=False):
            flat[begin : begin + array.size] = array.ravel()
        source = torch.from_numpy(flat)
        if self._room.is_cuda:
            source = source.pin_memory()
        self._room[: len(flat)].copy_(source, non_blocking=True)
        return True

    def views(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """Return where the arrays are, in their shapes; for the last one, all of the room after its begin."""
        found = {
            name: self._room[begin : begin + array.size].view(array.shape)
            for begin, (name, array) in zip(_begins(arrays), arrays.items(), strict=False)
        }
        last = next(reversed(found))
        found[last] = self._room[found[last].storage_offset() :]
        return found


def _begins(arrays: Arrays) -> list[int]:
    """Return where each array begins, and the end."""
    sizes = [-(-array.size // _ALIGNED) * _ALIGNED for array in arrays.values()]
    return [0, *np.cumsum(sizes).tolist()]
