"""Slots in memory registered with the messenger: their offsets, digests and slices. Imports no torch."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine import KvGroupShape
from kvpool import CommitAhead, KvGroup, KvSpec, layer_digests_at
from messenger import Messenger, Region, RemoteKey, SharedMemory


class SlotMemory(ABC):
    """`num_slots` slots of every group of `spec`, group after group, in the layout of the engine's cache."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger, *, name: str) -> None:
        """Allocate and register the memory. Raises OSError if there is not enough."""
        self.spec = spec
        self.num_slots = num_slots
        self.block_tokens = spec.block_tokens
        self.num_groups = spec.num_groups
        self._slot_nbytes = [spec.slot_nbytes(g) for g in range(spec.num_groups)]
        self._layer_nbytes = [spec.layer_nbytes(g) for g in range(spec.num_groups)]
        ends = list(itertools.accumulate(num_slots * nbytes for nbytes in self._slot_nbytes))
        self._base: list[int] = [0, *ends[:-1]]
        self._messenger = messenger
        self._memory = SharedMemory.create(ends[-1], name, "auto")
        self._ahead = [CommitAhead(self._memory, *group) for group in zip(self._base, ends, strict=True)]
        self.region: Region = messenger.register(self._memory)

    def close(self) -> None:
        self._messenger.deregister(self.region)
        self._memory.close()

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def offsets(self, group: int, slots: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the byte offsets [n] of whole slots in the region."""
        found: NDArray[np.int64] = self._base[group] + np.asarray(slots, dtype=np.int64) * self._slot_nbytes[group]
        return found

    def all_offsets(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Return the byte offsets [groups, n] of whole slots in the region."""
        return np.stack([self.offsets(g, slots) for g in range(self.num_groups)])

    def commits_due(self, slots: Sequence[int]) -> list[Callable[[], None]]:
        """Return functions that commit the memory after these slots, which are about to be used.

        Each is to be called once, on a worker thread.
        """
        due: list[Callable[[], None]] = []
        for ahead, base, nbytes in zip(self._ahead, self._base, self._slot_nbytes, strict=True):
            end = base + (max(slots, default=-1) + 1) * nbytes
            if ahead.begins(end):
                due.append(partial(ahead.run, end))
        return due

    def grant_write(self, slots: Sequence[int]) -> RemoteKey:
        """Grant write access to the range of the region that contains these slots."""
        base = self.offsets(0, [min(slots)])[0]
        end = self.offsets(self.num_groups - 1, [max(slots) + 1])[0]
        return self._messenger.grant(self.region, int(base), int(end - base), read=False, write=True)

    def slot_slices(self, slots: Sequence[int], remote: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return messenger slices [groups * n, 3] pairing whole slots with remote offsets, one array [n] per group."""
        parts = [
            np.stack(
                [self.offsets(g, slots), remote[g], np.full(len(slots), self._slot_nbytes[g], dtype=np.int64)], axis=1
            )
            for g in range(self.num_groups)
        ]
        return np.concatenate(parts)

    def slot_digests(self, group: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return layer digests [n, layers of the group] of the valid tokens of each slot."""
        return layer_digests_at(self._memory.array, self.offsets(group, slots), self.spec, group, valid)

    def slot_bytes(self, group: int, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of whole slots as the messenger sees them, uint8 [n, slot_nbytes]."""
        size = self._slot_nbytes[group]
        return np.stack([self._memory.array[at : at + size] for at in self.offsets(group, slots).tolist()])

    @abstractmethod
    def to_host(self, slots: Sequence[int]) -> None:
        """Make the engine's content of these slots readable by the messenger. Returns when the bytes are available."""

    @abstractmethod
    def to_device(self, slots: Sequence[int]) -> None:
        """Make received content of these slots readable by the engine."""


def spec_of(groups: Sequence[KvGroupShape], block_tokens: int) -> KvSpec:
    """Return the pool's specification of a model's KV: the same groups in the same order."""
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
    """Slots in which an engine computes, addressed by (group, slot, layer)."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger) -> None:
        super().__init__(spec, num_slots, messenger, name="moonpool-kv")
        # model layer -> (group, layer within the group)
        self.place_of_layer = {
            layer: (g, i) for g, group in enumerate(spec.groups) for i, layer in enumerate(group.layers)
        }

    def layer_slices(self, layer: int, slots: Sequence[int], remote: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return messenger slices [n, 3] of one model layer of each slot; `remote` has whole-slot offsets per group."""
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
        """Return the digests [n] of one model layer of each slot."""
        group, index = self.place_of_layer[layer]
        one = slice(index, index + 1)
        return layer_digests_at(self._memory.array, self.offsets(group, slots), self.spec, group, valid, one)[:, 0]

    @abstractmethod
    def to_host(self, slots: Sequence[int], layer: int | None = None) -> None:
        """Make one layer of the slots, or all layers, readable by the messenger. Returns when the bytes are there."""

    @abstractmethod
    def to_device(self, slots: Sequence[int], layer: int | None = None) -> None:
        """Make received content of one layer of the slots, or of all layers, readable by the engine."""

    @abstractmethod
    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return bool [n]: True for slots whose tokens differ by more than the order of summation can explain.

        `given` and `computed` are a group's slots, uint8 [n, slot_nbytes]; the first `valid` [n] tokens of each are
        compared.
        """
