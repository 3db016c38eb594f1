"""KV at rest in int8: what a slot looks like in the pool where `kv_storage` is int8, and the way there and back.

Each row (a token's K, or V, in one head of one layer) is cut into groups of `scale_group` values; a group is stored as
round(x / s) in int8 with s = max|x| / 127 as float16, behind the row's values (PPL.LLM's group-wise int8 KV). So a
value is off by at most half a step, s / 2, and a row takes head_dim + 2 head_dim / scale_group bytes.

Such KV is an approximation, and so is all that is computed from it: it has a namespace of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvpool import KvGroup, KvPoolError, KvSpec
from messenger import Messenger
from worker.kv_memory import KvMemory
from worker.slot_memory import SlotMemory

_LARGEST = 127
_LONGEST_GROUP = 64


def quantised_spec(spec: KvSpec) -> KvSpec:
    """The same KV in int8. Rows stay multiples of 4 bytes where head_dim is one of 4, which digests are quick on."""
    groups = [replace(group, dtype="int8", scale_group=_scale_group(group)) for group in spec.groups]
    return KvSpec(tuple(groups), spec.block_tokens)


class QuantisedMemory(SlotMemory):
    """For each of the engine's slots one in int8, which the messenger and the pool see in its place."""

    def __init__(self, exact: KvMemory, messenger: Messenger, *, num_slots: int) -> None:
        super().__init__(quantised_spec(exact.spec), num_slots, messenger, name="moonpool-kv-int8")
        self._exact = exact
        self._bytes = torch.from_numpy(self._memory.array)

    def close(self) -> None:
        super().close()
        del self._bytes

    def to_host(self, slots: Sequence[int]) -> None:
        """Quantise what the engine has in these slots. Raises KvPoolError for values that int8 cannot stand for."""
        self._exact.to_host(slots)
        index = torch.tensor(list(slots), dtype=torch.long)
        for g, group in enumerate(self.spec.groups):
            values = _grouped(self._exact.slot_values(g)[index].float(), group.scale_group)
            scales = (values.abs().amax(dim=-1, keepdim=True) / _LARGEST).half()
            if not torch.isfinite(scales).all():
                raise KvPoolError("KV with values that are no numbers, or too large for float16 scales, is not stored")
            # A scale of 0 stands for values that float16 takes for 0.
            steps = (values / torch.where(scales > 0, scales.float(), 1.0)).round().clamp_(-_LARGEST, _LARGEST)
            rows = self._rows(g)
            rows[index, ..., : group.head_dim] = steps.to(torch.int8).flatten(-2).view(torch.uint8)
            rows[index, ..., group.head_dim :] = scales.squeeze(-1).contiguous().view(torch.uint8)

    def to_device(self, slots: Sequence[int]) -> None:
        """Give the engine, in the same slots, what these stand for."""
        index = torch.tensor(list(slots), dtype=torch.long)
        for g, group in enumerate(self.spec.groups):
            rows = self._rows(g)[index]
            steps = _grouped(rows[..., : group.head_dim].view(torch.int8).float(), group.scale_group)
            scales = rows[..., group.head_dim :].contiguous().view(torch.float16).float().unsqueeze(-1)
            exact = self._exact.slot_values(g)
            exact[index] = (steps * scales).flatten(-2).to(exact.dtype)
        self._exact.to_device(slots)

    def _rows(self, group: int) -> torch.Tensor:
        """uint8 [num_slots, layers, kv_heads, 2, block_tokens, bytes of a row]."""
        g, start = self.spec.groups[group], self._base[group]
        end = self._base[group + 1] if group + 1 < self.num_groups else self.nbytes
        shape = (-1, len(g.layers), g.kv_heads, 2, self.block_tokens, g.token_row_nbytes)
        return self._bytes[start:end].view(shape)


def _grouped(values: torch.Tensor, size: int) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _scale_group(group: KvGroup) -> int:
    """At most 64 values to a scale, and an even number of scales where head_dim allows it."""
    for num_scales in range(1, group.head_dim + 1):
        size, rest = divmod(group.head_dim, num_scales)
        if not rest and size <= _LONGEST_GROUP and (num_scales % 2 == 0 or group.head_dim % 2):
            return size
    return 1
