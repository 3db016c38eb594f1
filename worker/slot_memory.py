"""Slots in memory registered with the messenger: their offsets, digests and slices. Imports no torch.

The registered memory is host memory: the memory in which the engine computes, or a mirror of a GPU's (`DeviceStaging`
copies between them). It may also be the GPU's memory itself, if adapters reach it; then there is no host copy, and
subclasses compute digests on the GPU.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine import KvGroupShape
from kvpool import CommitAhead, KvGroup, KvSpec, layer_digests_at
from kvpool.errors import SpecError
from messenger import GpuMemory, GpuRegion, Messenger, Region, RemoteKey, SharedMemory, UnitSection
from messenger.staging import READY, DeviceStaging, HostStaging, Ranges, Ticket
from moonpool_proto.v1.worker_pb2 import BlockSlots
from worker.policy import BatchLimits, WindowSlots, num_window_slots


class SlotMemory(ABC):
    """Slots of every group of `spec`, group after group, in the layout of the engine's cache.

    A slot is named by its block's number, which is its own number in groups without a window. In `spec.windowed` groups
    its number is that of `windows`, and blocks without one have no offset.
    """

    staging: DeviceStaging = HostStaging()

    def __init__(
        self,
        spec: KvSpec,
        num_slots: int,
        messenger: Messenger,
        *,
        name: str,
        gpu: GpuMemory | None = None,
        digests_layers: bool = False,
        other_writers: bool = False,
        windows: WindowSlots | None = None,
    ) -> None:
        """Allocate host memory for `num_slots` slots per group and register it, or register `gpu` in its place.

        `windows`: the slots of windowed groups; required if there are any. With `digests_layers`, the messenger digests
        layers that peers write to host memory. `other_writers`: processes that are given the memory's writable
        descriptor may map it for writing. Raises OSError if there is not enough memory, and GpuMemoryUnsupported.
        """
        self.spec = spec
        self.num_slots = num_slots
        self.block_tokens = spec.block_tokens
        self.num_groups = spec.num_groups
        self.windows = windows if spec.windowed else None
        assert self.windows is not None or not spec.windowed
        self.slots_per_group = tuple(
            self.windows.num_slots if self.windows is not None and g in spec.windowed else num_slots
            for g in range(spec.num_groups)
        )
        self._slot_nbytes = [spec.slot_nbytes(g) for g in range(spec.num_groups)]
        self._layer_nbytes = [spec.layer_nbytes(g) for g in range(spec.num_groups)]
        sizes = (n * nbytes for n, nbytes in zip(self.slots_per_group, self._slot_nbytes, strict=True))
        ends = list(itertools.accumulate(sizes))
        self._base: list[int] = [0, *ends[:-1]]
        self._messenger = messenger
        self._memory: SharedMemory | None = None
        self._ahead: list[CommitAhead] = []
        self.region: Region | GpuRegion
        if gpu is not None:
            self.region = messenger.register(gpu)
            return
        host = self._memory = SharedMemory.create(
            ends[-1], name, "transparent" if other_writers else "auto", returnable=other_writers
        )
        self._ahead = [CommitAhead(host, *group) for group in zip(self._base, ends, strict=True)]
        self.region = messenger.register(host, units=self._units() if digests_layers else ())

    def _units(self) -> list[UnitSection]:
        """Return the layers of all slots of the groups whose digests the messenger can compute."""
        return [
            UnitSection(base, self._layer_nbytes[g], self.slots_per_group[g] * len(group.layers))
            for g, (group, base) in enumerate(zip(self.spec.groups, self._base, strict=True))
            if group.token_row_nbytes % 4 == 0 and base % 4 == 0
        ]

    def close(self) -> None:
        self.staging.close()
        self._messenger.deregister(self.region)
        if self._memory is not None:
            self._memory.close()

    @property
    def nbytes(self) -> int:
        return self.region.nbytes

    @property
    def _array(self) -> NDArray[np.uint8]:
        """The registered host memory, uint8 [nbytes]."""
        assert self._memory is not None, "registered GPU memory has no host copy"
        return self._memory.array

    @property
    def host_region(self) -> Region | None:
        """The registered host memory; None if GPU memory is registered."""
        return self.region if isinstance(self.region, Region) else None

    def offsets(self, group: int, slots: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the byte offsets [n] of whole slots in the region.

        Raises ValueError for a block that has no slot in a windowed group.
        """
        numbers = self.numbers(group, slots)
        if len(numbers) and numbers.min() < 0:
            raise ValueError(f"block {np.asarray(slots)[int(numbers.argmin())]} has no slot in group {group}")
        found: NDArray[np.int64] = self._base[group] + numbers * self._slot_nbytes[group]
        return found

    def numbers(self, group: int, slots: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int64]:
        """Return the numbers [n] of slots within the group; -1 for blocks that have none."""
        if self.windows is None or group not in self.spec.windowed:
            return np.asarray(slots, dtype=np.int64)
        return self.windows.slot_of[np.asarray(slots, dtype=np.int64)].astype(np.int64)

    def with_slots(self, group: int, slots: Sequence[int]) -> Sequence[int]:
        """Return those of the blocks that have a slot in the group."""
        if self.windows is None or group not in self.spec.windowed:
            return slots
        return [slot for slot, number in zip(slots, self.numbers(group, slots), strict=True) if number >= 0]

    def all_offsets(self, slots: Sequence[int], groups: Sequence[int]) -> NDArray[np.int64]:
        """Return the byte offsets [len(groups), n] of whole slots in the region."""
        return np.stack([self.offsets(g, slots) for g in groups])

    def lend(self, slots: Sequence[int]) -> list[Callable[[], None]]:
        """Prepare slots that are about to hold other blocks; return functions that commit the memory after them.

        Each is to be called once, on a worker thread.
        """
        due: list[Callable[[], None]] = []
        if not self._ahead:  # it is committed, or a GPU's
            return due
        for g, (ahead, base, nbytes) in enumerate(zip(self._ahead, self._base, self._slot_nbytes, strict=True)):
            count = self.slots_per_group[g] if g in self.spec.windowed else max(slots, default=-1) + 1
            end = base + count * nbytes
            if ahead.begins(end):
                due.append(partial(ahead.run, end))
        return due

    def _commit_all(self) -> None:
        """Commit the whole memory now. Blocks."""
        assert self._memory is not None
        self._memory.try_commit(0, self._memory.nbytes)
        self._ahead = []

    def grant_write(self, slots: Sequence[int]) -> RemoteKey:
        """Grant write access to the range of the region that contains these slots, and all of windowed groups."""
        firsts = [0 if g in self.spec.windowed else min(slots) for g in range(self.num_groups)]
        ends = [n if g in self.spec.windowed else max(slots) + 1 for g, n in enumerate(self.slots_per_group)]
        base = min(b + first * n for b, first, n in zip(self._base, firsts, self._slot_nbytes, strict=True))
        end = max(b + last * n for b, last, n in zip(self._base, ends, self._slot_nbytes, strict=True))
        return self._messenger.grant(self.region, base, end - base, read=False, write=True)

    def slot_slices(
        self, slots: Sequence[int], groups: Sequence[int], remote: Sequence[NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """Return messenger slices [groups * n, 3] pairing whole slots with remote offsets, one array [n] per group."""
        parts = [
            np.stack([self.offsets(g, slots), there, np.full(len(slots), self._slot_nbytes[g], dtype=np.int64)], axis=1)
            for g, there in zip(groups, remote, strict=True)
        ]
        return np.concatenate(parts)

    def slot_digests(self, group: int, slots: Sequence[int], valid: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return layer digests [n, layers of the group] of the valid tokens of each slot."""
        return layer_digests_at(self._array, self.offsets(group, slots), self.spec, group, valid)

    def slot_bytes(self, group: int, slots: Sequence[int]) -> NDArray[np.uint8]:
        """Return a copy of whole slots as the messenger sees them, uint8 [n, slot_nbytes]."""
        size = self._slot_nbytes[group]
        return np.stack([self._array[at : at + size] for at in self.offsets(group, slots).tolist()])

    @abstractmethod
    def groups_to_host(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        """Begin to make the engine's content of these slots readable by the messenger; see `DeviceStaging.to_host`.

        In windowed groups, the caller must hold the blocks: others may get the slots of all others meanwhile.
        """

    @abstractmethod
    def groups_to_device(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        """Begin to make received content of these slots readable by the engine; see `DeviceStaging.to_device`.

        In windowed groups, as `groups_to_host`.
        """

    def to_host_now(self, slots: Sequence[int], groups: Sequence[int] | None = None) -> None:
        """Make the engine's content of these slots readable by the messenger. Blocks; not on the engine's thread.

        In lasting groups, unless others are given. Raises StagingError.
        """
        self.groups_to_host(slots, self.spec.lasting if groups is None else groups).wait()

    def to_device_now(self, slots: Sequence[int], groups: Sequence[int] | None = None) -> None:
        """Make received content of these slots readable by the engine. Blocks; not on the engine's thread.

        In lasting groups, unless others are given. Raises StagingError.
        """
        self.groups_to_device(slots, self.spec.lasting if groups is None else groups).wait()

    def all_ended(self) -> Ticket:
        """Return a ticket of all copies and computation queued so far; only after it may slots be reused."""
        return self.staging.all_ended()


def spec_of(groups: Sequence[KvGroupShape], block_tokens: int) -> KvSpec:
    """Return the pool's specification of a model's KV: the same groups in the same order.

    Raises SpecError, also for a window that is shorter than a block beside layers with full attention.
    """
    spec = KvSpec(
        tuple(
            KvGroup(
                kind=g.kind,
                window=g.window,
                layers=g.layers,
                kv_heads=g.kv_heads,
                head_dim=g.head_dim,
                dtype=g.dtype,
                scale_group=g.scale_group,
            )
            for g in groups
        ),
        block_tokens=block_tokens,
    )
    if short := [spec.groups[g].window for g in spec.windowed if spec.groups[g].window < block_tokens]:
        raise SpecError(
            f"the model's sliding_window is {short[0]} tokens, shorter than a block: set block_tokens to at most "
            f"{short[0]}, not {block_tokens}"
        )
    return spec


def windows_of(spec: KvSpec, num_blocks: int, limits: BatchLimits | None = None) -> WindowSlots | None:
    """Return the slots of the spec's windowed groups, one for every block without `limits`; None without any.

    Raises ValueError if `limits` has too few for one prompt.
    """
    if not spec.windowed:
        return None
    window_blocks, lock = spec.window_blocks, threading.Lock()
    num_slots = num_blocks if limits is None else num_window_slots(limits, window_blocks, num_blocks)
    return WindowSlots(num_blocks, num_slots, window_blocks=window_blocks, lock=lock)


class EngineMemory(SlotMemory):
    """Slots in which an engine computes, addressed by (group, slot, layer)."""

    def __init__(
        self,
        spec: KvSpec,
        num_slots: int,
        messenger: Messenger,
        *,
        gpu: GpuMemory | None = None,
        other_writers: bool = False,
        windows: WindowSlots | None = None,
    ) -> None:
        """As SlotMemory."""
        super().__init__(
            spec, num_slots, messenger, name="moonpool-kv", gpu=gpu, digests_layers=True, other_writers=other_writers,
            windows=windows,
        )  # fmt: skip
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
        return layer_digests_at(self._array, self.offsets(group, slots), self.spec, group, valid, one)[:, 0]

    def pushed_digests(
        self, layer: int, slots: Sequence[int], valid: NDArray[np.int32], token: int
    ) -> NDArray[np.uint64]:
        """Return `one_layer_digests` of what a peer wrote under the key with this token, after its notification.

        Uses the digests that the messenger computed while it wrote whole layers, and reads the others.
        """
        units = None if self.host_region is None else self.host_region.units
        if units is None:
            return self.one_layer_digests(layer, slots, valid)
        group, index = self.place_of_layer[layer]
        starts = self.offsets(group, slots) + index * self._layer_nbytes[group]
        digests, are_known = units.find(starts, token)
        are_known &= valid == self.block_tokens
        rest = np.flatnonzero(~are_known)
        if len(rest):
            digests[rest] = self.one_layer_digests(layer, [slots[i] for i in rest.tolist()], valid[rest])
        return digests

    def block_slots(self, slots: Sequence[int], seen_from: int) -> list[BlockSlots]:
        """Describe a prompt's blocks to a peer that writes them; of windowed groups, those from `seen_from` on."""
        firsts = [seen_from if g in self.spec.windowed else 0 for g in range(self.num_groups)]
        return [BlockSlots(offsets=self.offsets(g, slots[first:]), first_block=first) for g, first in enumerate(firsts)]

    def is_windowed(self, layer: int) -> bool:
        """Return True for a model layer of a windowed group."""
        return self.place_of_layer[layer][0] in self.spec.windowed

    def layer_nbytes(self, layer: int) -> int:
        """Return the size of one model layer of a slot."""
        return self._layer_nbytes[self.place_of_layer[layer][0]]

    def groups_to_host(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        """As SlotMemory; a no-op for an engine that computes in host memory."""
        return self.staging.to_host(self._group_ranges(slots, groups)) if self.staging.is_needed else READY

    def groups_to_device(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        """As SlotMemory; a no-op for an engine that computes in host memory."""
        return self.staging.to_device(self._group_ranges(slots, groups)) if self.staging.is_needed else READY

    def to_host(self, slots: Sequence[int], layers: int | Sequence[int]) -> Ticket:
        """As `groups_to_host`, for some model layers."""
        return self.staging.to_host(self._ranges(slots, layers)) if self.staging.is_needed else READY

    def to_device(self, slots: Sequence[int], layers: int | Sequence[int]) -> Ticket:
        """As `groups_to_device`, for some model layers."""
        return self.staging.to_device(self._ranges(slots, layers)) if self.staging.is_needed else READY

    def _group_ranges(self, slots: Sequence[int], groups: Sequence[int]) -> list[Ranges]:
        return [Ranges.same(self.offsets(g, self.with_slots(g, slots)), self._slot_nbytes[g]) for g in groups]

    def _ranges(self, slots: Sequence[int], layers: int | Sequence[int]) -> list[Ranges]:
        """Return the byte ranges of the layers of the slots, equal in the mirror and on the device.

        Blocks without a slot in a windowed group have none there.
        """
        places = sorted(self.place_of_layer[layer] for layer in ([layers] if isinstance(layers, int) else layers))
        found: list[Ranges] = []
        while places:
            group, first = places[0]
            count = 1
            while places[count : count + 1] == [(group, first + count)]:  # adjacent in every slot
                count += 1
            size = self._layer_nbytes[group]
            offsets = self.offsets(group, self.with_slots(group, slots))
            found.append(Ranges.same(offsets + first * size, count * size))
            del places[:count]
        return found

    @abstractmethod
    def differ(
        self, group: int, given: NDArray[np.uint8], computed: NDArray[np.uint8], valid: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """Return bool [n]: True for slots whose tokens differ by more than the order of summation can explain.

        `given` and `computed` are a group's slots, uint8 [n, slot_nbytes]; the first `valid` [n] tokens of each are
        compared.
        """
