"""Slots in memory that the messenger can reach: where each lies, and what its bytes sum up to. Nothing of engines."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvpool import CommitAhead, KvSpec, layer_digests_at
from messenger import Messenger, Region, RemoteKey, SharedMemory


class SlotMemory(ABC):
    """`num_slots` slots of every group of `spec`, group after group: as the engine's cache lays them out."""

    def __init__(self, spec: KvSpec, num_slots: int, messenger: Messenger, *, name: str) -> None:
        """Raises OSError when there is not enough memory."""
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
        """Byte offsets of whole slots in the region."""
        found: NDArray[np.int64] = self._base[group] + np.asarray(slots, dtype=np.int64) * self._slot_nbytes[group]
        return found

    def all_offsets(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Byte offsets of whole slots in the region, [groups, n]."""
        return np.stack([self.offsets(g, slots) for g in range(self.num_groups)])

    def commits_due(self, slots: Sequence[int]) -> list[Callable[[], None]]:
        """What a thread is to run, each once, now that these slots are about to be used: commits what comes next."""
        due: list[Callable[[], None]] = []
        for ahead, base, nbytes in zip(self._ahead, self._base, self._slot_nbytes, strict=True):
            end = base + (max(slots, default=-1) + 1) * nbytes
            if ahead.begins(end):
                due.append(partial(ahead.run, end))
        return due

    def grant_write(self, slots: Sequence[int]) -> RemoteKey:
        """Let whoever has the key write these slots: a range of the region that contains them."""
        base = self.offsets(0, [min(slots)])[0]
        end = self.offsets(self.num_groups - 1, [max(slots) + 1])[0]
        return self._messenger.grant(self.region, int(base), int(end - base), read=False, write=True)

    def slot_slices(self, slots: Sequence[int], remote: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Messenger slices [groups * n, 3] pairing whole slots with remote offsets (one array [n] per group)."""
        parts = [
            np.stack(
                [self.offsets(g, slots), remote[g], np.full(len(slots), self._slot_nbytes[g], dtype=np.int64)], axis=1
            )
            for g in range(self.num_groups)
        ]
        return np.concatenate(parts)

    def slot_digests(self, group: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Layer digests [n, layers of the group] of the valid tokens of each slot."""
        return layer_digests_at(self._memory.array, self.offsets(group, slots), self.spec, group, valid)

    def slot_bytes(self, group: int, slots: Sequence[int]) -> NDArray[np.uint8]:
        """A copy of whole slots as the messenger sees them, [n, slot_nbytes]."""
        size = self._slot_nbytes[group]
        return np.stack([self._memory.array[at : at + size] for at in self.offsets(group, slots).tolist()])

    @abstractmethod
    def to_host(self, slots: Sequence[int]) -> None:
        """Make what the engine has in these slots readable by the messenger. Returns when the bytes are there."""

    @abstractmethod
    def to_device(self, slots: Sequence[int]) -> None:
        """Make what has landed in these slots readable by the engine."""
