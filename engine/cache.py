"""The paged KV cache: slots of `block_tokens` tokens in the canonical layout, in one contiguous buffer.

The buffer holds group 0's slots, then group 1's, and so on. A slot is [layer_in_group][kv_head][k|v][token][row],
contiguous; a row has head_dim values, in int8 followed by its scales (`engine.int8_rows`). This module only computes
positions; the caller decides what a slot holds.
"""

from collections.abc import Sequence

import numpy as np
import torch

from engine.config import KvGroupShape
from engine.errors import CacheMismatch
from engine.int8_rows import row_nbytes

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types of computation, and of a cache."""
CACHE_DTYPES = {**DTYPES, "int8": torch.uint8}
"""Types as which a cache is read; int8 rows are bytes."""


class PagedCache:
    """View of `memory` (uint8 [nbytes], allocated if not given) as slots per KV group. Raises `CacheMismatch`."""

    def __init__(
        self,
        groups: Sequence[KvGroupShape],
        num_slots: Sequence[int],
        block_tokens: int = 16,
        memory: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        needed = self.required_nbytes(groups, num_slots, block_tokens)
        if memory is None:
            memory = torch.zeros(needed, dtype=torch.uint8, device=device)
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            found = f"{memory.dtype} {list(memory.shape)}"
            raise CacheMismatch(f"cache memory must be a contiguous uint8 vector, got {found}")
        if memory.numel() < needed:
            raise CacheMismatch(f"cache memory must hold {needed} bytes for {list(num_slots)} slots, got {len(memory)}")
        self.groups = tuple(groups)
        self.num_slots = tuple(num_slots)
        self.block_tokens = block_tokens
        self.memory = memory
        dtype = CACHE_DTYPES[self.groups[0].dtype]
        if memory.data_ptr() % dtype.itemsize:
            raise CacheMismatch(f"cache memory must be aligned to the {dtype.itemsize} bytes of a {dtype} value")
        self.flat = memory[:needed].view(dtype)
        self._starts: list[int] = []
        self.windows = np.array([group.window for group in self.groups], np.int32)
        self.slot_sizes = np.zeros(len(self.groups), np.int64)  # in values of the dtype, as is layer_base
        self.layer_group = np.zeros(1 + max(max(group.layers) for group in self.groups), np.int32)
        self.layer_base = np.zeros(len(self.layer_group), np.int64)  # offset of each layer in slot 0 of its group
        self.scale_group = self.groups[0].scale_group  # 0 unless the cache is in int8
        self.views: list[
            torch.Tensor
        ] = []  # per group [slots, layers, kv_heads, 2, block_tokens, row], row in the dtype
        offset = 0
        for index, (group, slots) in enumerate(zip(self.groups, self.num_slots, strict=True)):
            nbytes = slots * _slot_nbytes(group, block_tokens)
            row = _row_nbytes(group) // dtype.itemsize
            shape = (slots, len(group.layers), group.kv_heads, 2, block_tokens, row)
            self.views.append(memory[offset : offset + nbytes].view(dtype).view(shape))
            self._starts.append(offset)
            layers = list(group.layers)
            self.slot_sizes[index] = self.slot_nbytes(index) // dtype.itemsize
            self.layer_group[layers] = index
            self.layer_base[layers] = offset // dtype.itemsize
            self.layer_base[layers] += np.arange(len(layers)) * (self.slot_sizes[index] // len(layers))
            offset += nbytes

    @staticmethod
    def required_nbytes(groups: Sequence[KvGroupShape], num_slots: Sequence[int], block_tokens: int) -> int:
        """Return the number of bytes needed for `num_slots` slots per group. Raises `CacheMismatch`."""
        if len(groups) != len(num_slots):
            raise CacheMismatch(f"num_slots must have one count per group ({len(groups)}), got {len(num_slots)}")
        if block_tokens <= 0 or any(slots < 0 for slots in num_slots):
            raise CacheMismatch(
                f"block_tokens must be positive and num_slots not negative, got {block_tokens} and {list(num_slots)}"
            )
        if len({(group.dtype, group.scale_group) for group in groups}) != 1:
            raise CacheMismatch(
                "the groups of a cache must share one dtype and scale_group, got "
                f"{[(group.dtype, group.scale_group) for group in groups]}"
            )
        if unknown := [group.dtype for group in groups if group.dtype not in CACHE_DTYPES]:
            raise CacheMismatch(f"cache dtype must be one of {', '.join(CACHE_DTYPES)}, got {unknown[0]!r}")
        for group in groups:
            if bool(group.scale_group) != (group.dtype == "int8") or (
                group.scale_group and group.head_dim % group.scale_group
            ):
                raise CacheMismatch(
                    f"scale_group must divide head_dim ({group.head_dim}) for dtype int8, and be 0 for others, got "
                    f"{group.scale_group} for {group.dtype}"
                )
        return sum(n * _slot_nbytes(group, block_tokens) for group, n in zip(groups, num_slots, strict=True))

    def slot_offset(self, group: int, slot: int) -> int:
        """Return the byte offset of the slot in `memory`. Raises `CacheMismatch` if the slot does not exist."""
        if not 0 <= slot < self.num_slots[group]:
            raise CacheMismatch(f"slot of group {group} must be in 0..{self.num_slots[group] - 1}, got {slot}")
        return self._starts[group] + slot * self.slot_nbytes(group)

    def layer_view(self, layer: int) -> tuple[int, torch.Tensor]:
        """Return a KV layer's group and its part of the slots, [slots, kv_heads, 2, block_tokens, row]."""
        group = int(self.layer_group[layer])
        return group, self.views[group][:, self.groups[group].layers.index(layer)]

    def slot_nbytes(self, group: int) -> int:
        """Return the size of one slot in bytes: all layers of the group."""
        return _slot_nbytes(self.groups[group], self.block_tokens)

    def layer_nbytes(self, group: int) -> int:
        """Return the size of one layer within a slot, in bytes."""
        return self.slot_nbytes(group) // len(self.groups[group].layers)


def _slot_nbytes(group: KvGroupShape, block_tokens: int) -> int:
    return len(group.layers) * group.kv_heads * 2 * block_tokens * _row_nbytes(group)


def _row_nbytes(group: KvGroupShape) -> int:
    if group.scale_group:
        return row_nbytes(group.head_dim, group.scale_group)
    return group.head_dim * DTYPES[group.dtype].itemsize
