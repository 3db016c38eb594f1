"""Integer arrays of a step on the backend's device, copied there at once: each copy costs a launch."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch


def on_device(
    arrays: Mapping[str, npt.NDArray[np.int32]], device: torch.device, dtype: torch.dtype = torch.int32
) -> dict[str, torch.Tensor]:
    """Return the arrays as tensors on `device`, of the same shapes. On CUDA, the copy is queued."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays.values()])).to(dtype)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    parts = torch.split(flat, [array.size for array in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}
