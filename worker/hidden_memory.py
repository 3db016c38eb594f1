"""Hidden states that enter some of a model's layers, for the slots of its KV cache (the E cache of DroidSpeak).

They are in host memory that the messenger can read, whatever the engine's device, with one slot for each slot of the
cache. A sender's engine writes them as it computes; a receiver loads those of another model into the same place.

`put` and `rows` are called on the engine thread, everything else on the event loop or its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvpool import KvGroup, KvSpec
from messenger import Messenger
from messenger.staging import READY, Ticket
from worker.prefix_blocks import StoredParts
from worker.slot_memory import SlotMemory

Numbers = NDArray[np.int64]


def hidden_spec(layers: Sequence[int], hidden_size: int, dtype: str, block_tokens: int) -> KvSpec:
    """Return the pool's specification of the states that enter `layers`, a group each. `hidden_size` must be even."""
    return KvSpec(tuple(KvGroup("hidden", 0, (layer,), 1, hidden_size // 2, dtype) for layer in layers), block_tokens)


def hidden_parts(identity: str, spec: KvSpec, layer: int) -> StoredParts:
    """Return what is stored of the states that enter `layer` of the model named `identity`."""
    group = next(g for g, each in enumerate(spec.groups) if each.layers == (layer,))
    return StoredParts.of_hidden(identity, spec, group)


class HiddenMemory(SlotMemory):
    """One slot of every layer's states for each slot of the KV cache, [2 halves][token][hidden_size / 2] each."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger) -> None:
        """`spec`: of `hidden_spec`. Raises OSError if there is not enough memory."""
        super().__init__(spec, num_slots, messenger, name="moonpool-hidden")
        self.layers = tuple(layer for group in spec.groups for layer in group.layers)
        self._bytes = torch.from_numpy(self._array)
        self._filled = np.zeros((len(self.layers), num_slots), np.int32)  # leading tokens that were put

    def close(self) -> None:
        super().close()
        del self._bytes

    def _values(self, layer: int) -> torch.Tensor:
        """Return a layer's slots, [num_slots, 2, block_tokens, hidden_size / 2]."""
        g = self.layers.index(layer)
        group, begin = self.spec.groups[g], self._base[g]
        end = begin + self.num_slots * self._slot_nbytes[g]
        return self._bytes[begin:end].view(getattr(torch, group.dtype)).view(-1, 2, self.block_tokens, group.head_dim)

    def lend(self, slots: Sequence[int]) -> list[Callable[[], None]]:
        self._filled[:, list(slots)] = 0
        return super().lend(slots)

    def put(self, layer: int, rows: torch.Tensor, slots: Numbers, offsets: Numbers) -> None:
        """Write rows [n, hidden_size] to tokens `offsets` [n] of `slots` [n]. Rows of one slot must be consecutive."""
        values = self._values(layer)
        where = torch.from_numpy(slots), torch.from_numpy(offsets)
        first, second = rows.to("cpu").chunk(2, dim=-1)
        values[where[0], 0, where[1]], values[where[0], 1, where[1]] = first, second
        begins = np.flatnonzero(np.concatenate([[True], (slots[1:] != slots[:-1]) | (offsets[1:] <= offsets[:-1])]))
        ends = np.append(begins[1:], len(slots)) - 1
        filled, own = self._filled[self.layers.index(layer)], slots[begins]
        continues = (offsets[begins] == 0) | (offsets[begins] == filled[own])
        filled[own] = np.where(continues, offsets[ends] + 1, 0)

    def rows(self, layer: int, slots: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return the states of the first `num_tokens` tokens of consecutive blocks, [num_tokens, hidden_size]."""
        found = self._values(layer)[list(slots)]  # [blocks, 2, block_tokens, half]
        return found.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:num_tokens]

    def whole(self, layer: int, slots: Sequence[int]) -> NDArray[np.bool_]:
        """Return which slots hold the states of all of their tokens, bool [n]."""
        found: NDArray[np.bool_] = self._filled[self.layers.index(layer), list(slots)] == self.block_tokens
        return found

    def groups_to_host(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        return READY

    def groups_to_device(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        return READY
