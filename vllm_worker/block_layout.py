"""Layout of a worker's slots, and vLLM's blocks seen in the order of slots. No I/O.

A slot keeps a block as [layer][head][k|v][token][head_dim]. On a GPU vLLM's tensor of a layer is [blocks, heads,
tokens, content], where a token's content is its key and then its value in one head. The order of the axes in memory is
up to vLLM's backend (its `KVCacheLayout`: LBNHC, LBHNC, BLHNC, ...) and shows in the strides only. A backend whose
kernels take smaller blocks than vLLM's scheduler gets each block as several consecutive ones (*pieces*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from kvpool import KvSpec
from kvpool.spec import DTYPE_NBYTES


class LayoutMismatch(Exception):
    """vLLM's KV tensors do not have the shape of the worker's slots."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Shape of the slots, all in one group: [num_slots, layers, kv_heads, 2, block_tokens, head_dim]."""

    num_slots: int
    num_layers: int
    kv_heads: int
    block_tokens: int
    head_dim: int
    value_nbytes: int

    @classmethod
    def of(cls, spec: KvSpec, num_slots: int) -> SlotLayout:
        """Return the layout of the slots of `spec`, which has one group."""
        (group,) = spec.groups
        return cls(
            num_slots,
            len(group.layers),
            group.kv_heads,
            spec.block_tokens,
            group.head_dim,
            DTYPE_NBYTES[group.dtype],
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all slots."""
        return self.num_slots, self.num_layers, self.kv_heads, 2, self.block_tokens, self.head_dim

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one layer of a slot: its keys and its values."""
        return 2 * self.block_tokens * self.head_dim * self.value_nbytes

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer of a slot."""
        return self.kv_heads * self.head_nbytes

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot."""
        return self.num_layers * self.layer_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.slot_nbytes


def require_layers(layout: SlotLayout, slots_nbytes: int, layers: Sequence[torch.Tensor]) -> None:
    """Raise LayoutMismatch unless memory of `slots_nbytes` can hold the slots of vLLM's layers."""
    if len(layers) != layout.num_layers:
        raise LayoutMismatch(f"vLLM has KV of {len(layers)} layers, the slots have {layout.num_layers}")
    for layer in layers:
        if layer.element_size() != layout.value_nbytes:
            raise LayoutMismatch(
                f"vLLM's KV has values of {layer.element_size()} bytes ({layer.dtype}), "
                f"the slots have values of {layout.value_nbytes} bytes"
            )
    if layout.nbytes > slots_nbytes:
        raise LayoutMismatch(f"the slots have {slots_nbytes} bytes, and vLLM's KV takes {layout.nbytes}")


def require_plain_blocks(groups: Sequence[Any]) -> None:
    """Raise LayoutMismatch if a backend packs blocks otherwise than [heads, tokens, key and value].

    A packed block can have the shape of a plain one, so its shape alone is not sufficient. `groups` is the
    `kv_cache_groups` of vLLM's KVCacheConfig.
    """
    if len(groups) != 1:
        raise LayoutMismatch(f"vLLM divides its layers into {len(groups)} groups with blocks of their own, expected 1")
    whole = groups[0].kv_cache_spec
    for spec in getattr(whole, "kv_cache_specs", {"": whole}).values():
        content = getattr(spec, "state_content_bytes", None)
        heads = getattr(spec, "num_head_slots", None)
        if content is not None or heads is not None or getattr(spec, "tokens_per_state", 1) != 1:
            raise LayoutMismatch(
                f"vLLM's backend packs a block as ({heads or spec.num_kv_heads} heads, {spec.num_states} tokens, "
                f"{content} bytes) in an order of its own, expected ({spec.num_kv_heads} heads, {spec.block_size} "
                f"tokens, key and value): select another one with --attention-backend or --kv-cache-dtype"
            )


_WORDS: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


def in_slot_order(layer: torch.Tensor, layout: SlotLayout, num_heads: int) -> torch.Tensor:
    """Return a view of vLLM's tensor of one layer, which has `num_heads`, whose blocks are in the order of slots.

    The view is [blocks, heads, 2, pieces, tokens of a piece, words of a row]; `pieces` of vLLM's consecutive blocks
    make a block. Its values are integers of the widest type that divides all rows, whatever the dtype of the KV.
    Raises LayoutMismatch.
    """
    tokens, width = layout.block_tokens, 2 * layout.head_dim
    piece = layer.shape[2] if layer.dim() == 4 else 0
    pieces = tokens // piece if piece else 0
    if not pieces or (pieces * piece, len(layer) % pieces, *layer.shape[1::2]) != (tokens, 0, num_heads, width):
        raise LayoutMismatch(
            f"a layer of vLLM's KV has shape {tuple(layer.shape)}, expected (blocks, {num_heads}, {tokens}, {width}), "
            f"or a multiple of the blocks with a part of their tokens"
        )
    if layer.stride(3) != 1:
        raise LayoutMismatch(f"a layer of vLLM's KV has strides {layer.stride()}, expected adjacent keys and values")
    words = layer.view(_widest_word(layer, layout.head_dim))
    apart = words.view(len(layer) // pieces, pieces, num_heads, piece, 2, words.shape[3] // 2)
    return apart.permute(0, 2, 4, 1, 3, 5)


def _widest_word(layer: torch.Tensor, head_dim: int) -> torch.dtype:
    """Return the widest integer type in which every row of `head_dim` values starts and ends at a whole word."""
    size = layer.element_size()
    offsets = [head_dim * size, layer.data_ptr(), *(stride * size for stride in layer.stride()[:3])]
    return next(word for word in _WORDS if not any(offset % word.itemsize for offset in offsets))
