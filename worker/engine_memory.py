"""An engine's slots as the messenger sees them, layer by layer: what every engine's memory has in common. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine import KvGroupShape
from kvpool import KvGroup, KvSpec, layer_digests_at
from messenger import Messenger
from worker.slot_memory import SlotMemory


def spec_of(groups: Sequence[KvGroupShape], block_tokens: int) -> KvSpec:
    """The pool's view of a model's KV: the same groups, in the same order."""
    return KvSpec(
        tuple(
            KvGroup(
                kind=g.kind, window=g.window, layers=g.layers, kv_heads=g.kv_heads, head_dim=g.head_dim, dtype=g.dtype
            )
            for g in groups
        ),
        block_tokens=block_tokens,
    )


class EngineMemory(SlotMemory):
    """The slots that an engine computes in, addressed by (group, slot, layer)."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger) -> None:
        super().__init__(spec, num_slots, messenger, name="moonpool-kv")
        # model layer -> (group, layer within the group)
        self.place_of_layer = {
            layer: (g, i) for g, group in enumerate(spec.groups) for i, layer in enumerate(group.layers)
        }

    def layer_slices(self, layer: int, slots: Sequence[int], remote: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Messenger slices [n, 3] of one model layer of each slot; `remote` holds whole-slot offsets per group."""
        group, index = self.place_of_layer[layer]
        size = self._layer_nbytes[group]
        shift = index * size
        return np.stack(
            [
                self.offsets(group, slots) + shift,
                remote[group] + shift,
                np.full(len(slots), size, dtype=np.int64),
            ],
            axis=1,
        )

    def one_layer_digests(self, layer: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Digests [n] of one model layer of each slot."""
        group, index = self.place_of_layer[layer]
        one = slice(index, index + 1)
        return layer_digests_at(self._memory.array, self.offsets(group, slots), self.spec, group, valid, one)[:, 0]

    @abstractmethod
    def to_host(self, slots: Sequence[int], layer: int | None = None) -> None:
        """Make slots (one layer of them, or all) readable by the messenger. Returns when the bytes are there."""

    @abstractmethod
    def to_device(self, slots: Sequence[int], layer: int | None = None) -> None:
        """Make what has landed in these slots (in one layer of them, or all) readable by the engine."""

    @abstractmethod
    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Which slots of a group, uint8 [n, slot_nbytes], hold other KV in their `valid` [n] tokens than what was
        computed: by more than another order of the same sums explains."""
