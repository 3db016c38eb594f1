"""The memory of slots is committed ahead of those that are given out, group by group."""

import os
from collections.abc import Iterator, Sequence

import pytest

from kvpool import KvGroup, KvSpec
from messenger import Messenger, MessengerConfig
from messenger.staging import READY, Ticket
from worker.policy import BatchLimits
from worker.slot_memory import SlotMemory, windows_of

SPEC = KvSpec(
    (
        KvGroup("full", 0, (0,), kv_heads=8, head_dim=128, dtype="float32"),
        KvGroup("full", 0, (1,), kv_heads=8, head_dim=128, dtype="float32"),
    ),
    128,
)
SLOT_NBYTES = 1 << 20
NUM_SLOTS = 40


class HostMemory(SlotMemory):
    def groups_to_host(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        return READY

    def groups_to_device(self, slots: Sequence[int], groups: Sequence[int]) -> Ticket:
        return READY

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
    due = memory.lend(())
    assert len(due) == 2
    assert not memory.lend([0]), "what is due is given out once"
    for commit in due:
        commit()
    assert memory.committed() == 2 * 32 * SLOT_NBYTES
    assert not memory.lend([3, 7])
    for commit in memory.lend([30]):
        commit()
    assert memory.committed() == 2 * NUM_SLOTS * SLOT_NBYTES == memory.nbytes
    assert not memory.lend([NUM_SLOTS - 1])


WINDOWED = KvSpec((SPEC.groups[0], KvGroup("window", 256, (1,), kv_heads=8, head_dim=128, dtype="float32")), 128)


def test_a_windowed_group_has_slots_of_its_own_and_offsets_only_for_blocks_that_have_one() -> None:
    messenger = Messenger(MessengerConfig(), node_id="slots", incarnation=1)
    windows = windows_of(WINDOWED, NUM_SLOTS, BatchLimits(max_batch=2, chunk_tokens=128, block_tokens=128))
    assert windows is not None
    memory = HostMemory(WINDOWED, NUM_SLOTS, messenger, name="slots", windows=windows)
    assert memory.slots_per_group == (NUM_SLOTS, 2 * 4 + 2 * (4 * 2 + 1 + 3)) == (NUM_SLOTS, windows.num_slots)
    assert memory.nbytes == sum(memory.slots_per_group) * SLOT_NBYTES
    windows.hold([39, 7])
    base = NUM_SLOTS * SLOT_NBYTES
    assert memory.offsets(1, [39, 7]).tolist() == [base + int(windows.slot_of[b]) * SLOT_NBYTES for b in (39, 7)]
    assert memory.offsets(0, [39, 7]).tolist() == [39 * SLOT_NBYTES, 7 * SLOT_NBYTES]
    with pytest.raises(ValueError, match="block 8 has no slot in group 1"):
        memory.offsets(1, [7, 8])
    memory.close()
    messenger.close()
