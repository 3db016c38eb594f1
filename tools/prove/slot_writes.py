"""Invariant of workers' slots: whoever writes one is its only holder, and nobody could share it yet.

Checked for the engine's writes, for peers' writes when they have ended, and for reads from pools into slots. A slot in
quarantine is still written by those that quarantine waits for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from messenger.grants import Access
from messenger.peer import Peer
from tools.prove.hash_engine import HashMemory
from tools.prove.instances import on_creation, remember, running_process
from tools.prove.world.scheduler import ProcessState, world
from worker.policy.slots import SlotPool


def watch() -> None:
    """Wrap what writes slots. Once per process."""
    on_creation(SlotPool, lambda pool: remember("slot pools", pool))
    on_creation(HashMemory, lambda memory: remember("slot memories", memory))
    write, writing, read = HashMemory.write, Access.writing, Peer.read

    def watched_write(self: HashMemory, layer: int, slots: Any, start: int, words: Any) -> None:
        positions = np.arange(start, start + len(words))
        _check(running_process(), slots[positions // self.block_tokens].tolist(), "the engine", in_quarantine=False)
        write(self, layer, slots, start, words)

    def watched_writing(self: Access, rows: Any) -> Any:
        @contextlib.contextmanager
        def watched() -> Iterator[None]:
            with writing(self, rows):
                yield
            process = running_process()
            for memory in process.objects.get("slot memories", []):
                if self.region is memory.host_region:
                    _check(process, memory.slots_at(rows[:, 0]), "a peer", in_quarantine=True)

        return watched()

    def watched_read(self: Peer, key: Any, region: Any, slices: Any, *arguments: Any, **options: Any) -> Any:
        reading, process = read(self, key, region, slices, *arguments, **options), running_process()
        memories = [each for each in process.objects.get("slot memories", []) if region is each.host_region]
        slots = [slot for memory in memories for slot in memory.slots_at(np.asarray(slices)[:, 0])]
        reading.add_done_callback(lambda _: _check(process, slots, "a read", in_quarantine=True))
        return reading

    HashMemory.write, Access.writing, Peer.read = watched_write, watched_writing, watched_read  # type: ignore[method-assign]


def _check(process: ProcessState, slots: Iterable[int], who: str, *, in_quarantine: bool) -> None:
    for pool in process.objects.get("slot pools", []):
        for slot in dict.fromkeys(slots):
            if slot < 0:
                world().problem(f"late write: {who} writes the slot of a window of {process.name} that no block has")
                continue
            is_only_holder = pool._count[slot] == 1 and pool._key[slot] is None
            if not is_only_holder and not (in_quarantine and slot in pool._quarantined):
                shared = "others may share" if pool._key[slot] is not None else f"{pool._count[slot]} hold"
                world().problem(f"late write: {who} writes a slot of {process.name} that {shared}")
