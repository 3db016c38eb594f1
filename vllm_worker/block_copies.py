"""Copies of KV between a worker's slots and the blocks of one vLLM rank: their interface, and which of them to use.

vLLM's engine thread only queues copies: on a CPU a thread carries them out, on a GPU streams do, and threads await
them. Slots are host memory that the worker shares with vLLM's processes. Each rank copies its own heads of every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from messenger.staging import StagingError
from vllm_worker.block_layout import SlotLayout
from vllm_worker.device_copies import DeviceBlockCopies
from vllm_worker.host_copies import HostBlockCopies
from vllm_worker.kv_jobs import BlocksToCopy, LayerToCopy

BUFFER_NBYTES: Final = 64 << 20
"""Device memory through which a rank's copies pass: large enough for the copies to take far longer than their calls."""


class BlockCopies(Protocol):
    """The copies of one rank. All methods are called on vLLM's engine thread; callbacks run on threads of their own.

    The blocks and slots of a copy must not be used otherwise until its callback has been called.
    """

    def load(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        """Copy slots to vLLM's blocks, which nothing uses yet; then call `ended` with the error, if there was one."""
        ...

    def save(self, copy: BlocksToCopy, ended: Callable[[BlocksToCopy, Exception | None], None]) -> None:
        """Copy vLLM's blocks to slots, after what is computed now; then call `ended`.

        A copy that does not keep its blocks is one without blocks: its request was aborted while it was loaded, and
        its end follows that of the load.
        """
        ...

    def save_layer(
        self, layer: int, copies: Sequence[LayerToCopy], ended: Callable[[int, Exception | None], None]
    ) -> None:
        """Copy one layer of vLLM's blocks to slots, after what is computed now; then call `ended` with the layer.

        All layers of a step are given the same `copies`.
        """
        ...

    def order_compute(self) -> None:
        """Let what is computed from now on begin after the copies queued so far: on a CPU by waiting for them."""
        ...

    def close(self) -> None:
        """Wait for the queued copies."""
        ...


def new_block_copies(
    slots: NDArray[np.uint8],
    layout: SlotLayout,
    layers: Sequence[torch.Tensor],
    heads: range,
    positions: torch.Tensor | None,
) -> BlockCopies:
    """Return the copies of a rank that holds `heads` of each of vLLM's `layers`.

    `slots` is the shared memory. `positions` is vLLM's order of values on a CPU (`HostLayer`), otherwise None.
    Raises LayoutMismatch, and StagingError if the device is none that KV can be copied to or its driver cannot be used.
    """
    device = layers[0].device
    if positions is not None:
        return HostBlockCopies(slots, layout, layers, heads, positions)
    if device.type != "cuda" or torch.version.cuda is None:
        kind = "an AMD GPU" if device.type == "cuda" else f"a device of type {device.type!r}"
        raise StagingError(f"vLLM keeps its KV on {kind}; it can be copied from and to CPUs and NVIDIA GPUs only")
    from messenger.staging.cuda import CudaRuntime

    buffer = torch.empty(max(BUFFER_NBYTES, 2 * layout.layer_nbytes), dtype=torch.uint8, device=device)
    runtime = CudaRuntime(buffer, lambda: torch.cuda.current_stream(device))
    return DeviceBlockCopies(slots, layout, layers, heads, runtime, buffer)
