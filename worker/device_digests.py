"""Layer digests of slots in a GPU's memory, computed on the GPU: the digests of `kvpool.digest`, bit for bit.

Used where adapters access the GPU's memory and there is no copy in host memory. torch has no unsigned 64-bit
arithmetic; its int64 wraps in the same way, and a logical shift is an arithmetic one whose upper bits are cleared.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool import KvSpec

_SUM_NBYTES = 8 << 20  # bytes of KV per pass, which bounds the temporary memory to about ten times as much


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_ADDEND, _FIRST, _SECOND = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class DeviceDigests:
    """Digests of slots in `memory`, uint8 [nbytes] on a device, on a stream of their own."""

    def __init__(self, memory: torch.Tensor, spec: KvSpec) -> None:
        self._memory = memory
        self._spec = spec
        self._stream: torch.cuda.Stream | None = None
        if memory.device.type == "cuda":
            self._stream = torch.cuda.Stream(memory.device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def of(
        self,
        group: int,
        offsets: NDArray[np.int64],
        valid_tokens: NDArray[np.int32],
        layers: slice | None = None,
    ) -> NDArray[np.uint64]:
        """Return the digests, uint64 [n, layers], of the slots at byte `offsets` [n]. Blocks the calling thread.

        The slots' content must be complete, and no other work of the device may write it.
        """
        first, last, _ = (layers or slice(None)).indices(self._spec.num_layers(group))
        size = self._spec.layer_nbytes(group)
        step = max(1, _SUM_NBYTES // max(1, (last - first) * size))
        found = [np.zeros((0, last - first), np.uint64)]
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            for begin in range(0, len(offsets), step):
                part = offsets[begin : begin + step].tolist()
                rows = torch.stack([self._memory[at + first * size : at + last * size] for at in part])
                valid = torch.from_numpy(valid_tokens[begin : begin + step].astype(np.int64)).to(rows.device)
                digests = self._of_rows(group, rows.view(len(part), last - first, -1), valid)
                found.append(digests.cpu().numpy().view(np.uint64))
        return np.concatenate(found)

    def _of_rows(self, group: int, rows: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Return int64 [n, layers] of uint8 [n, layers, layer_nbytes]."""
        spec, tokens = self._spec.groups[group], self._spec.block_tokens
        count, layers, _ = rows.shape
        values = rows.view(count, layers, spec.kv_heads * 2, tokens, spec.token_row_nbytes)
        padding = -spec.token_row_nbytes % 4
        if padding:
            values = torch.nn.functional.pad(values, (0, padding))
        words = values.contiguous().view(torch.int32)
        index = torch.arange(words[0, 0].numel(), device=rows.device).view(words.shape[2:])
        x = (words.long() & 0xFFFFFFFF) | (index << 32)
        x = _mixed(x)
        counts = torch.arange(tokens, device=rows.device) < valid[:, None]
        return torch.where(counts[:, None, None, :, None], x, 0).sum(dim=(2, 3, 4))


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return SplitMix64's output function of each value."""
    x = x + _ADDEND
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
