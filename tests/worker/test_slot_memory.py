"""The memory of slots is committed ahead of those that are given out, group by group."""

import os
from collections.abc import Iterator, Sequence

import pytest

from kvpool import KvGroup, KvSpec
from messenger import Messenger, MessengerConfig
from worker.slot_memory import SlotMemory

SPEC = KvSpec(
    (
        KvGroup("full", 0, (0,), kv_heads=8, head_dim=128, dtype="float32"),
        KvGroup("window", 128, (1,), kv_heads=8, head_dim=128, dtype="float32"),
    ),
    128,
)
SLOT_NBYTES = 1 << 20
NUM_SLOTS = 40


class HostMemory(SlotMemory):
    def to_host(self, slots: Sequence[int]) -> None: ...

    def to_device(self, slots: Sequence[int]) -> None: ...

    def committed(self) -> int:
        return os.fstat(self._memory.fd).st_blocks * 512


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    messenger = Messenger(MessengerConfig(), node_id="slots", incarnation=1)
    memory = HostMemory(SPEC, NUM_SLOTS, messenger, name="slots")
    yield memory
    memory.close()
    messenger.close()


def test_each_group_is_committed_ahead_of_its_slots_once(memory: HostMemory) -> None:
    assert SPEC.slot_nbytes(0) == SPEC.slot_nbytes(1) == SLOT_NBYTES
    assert memory.committed() == 0
    due = memory.commits_due(())
    assert len(due) == 2
    assert not memory.commits_due([0]), "what is due is given out once"
    for commit in due:
        commit()
    assert memory.committed() == 2 * 32 * SLOT_NBYTES
    assert not memory.commits_due([3, 7])
    for commit in memory.commits_due([30]):
        commit()
    assert memory.committed() == 2 * NUM_SLOTS * SLOT_NBYTES == memory.nbytes
    assert not memory.commits_due([NUM_SLOTS - 1])
