"""Memory that is committed ahead of its use: as much as is near, in steps, and not beyond its range."""

import os

from kvpool import CommitAhead
from messenger import SharedMemory
from messenger.mapping import can_collapse

MIB = 1 << 20


def committed(memory: SharedMemory) -> int:
    return os.fstat(memory.fd).st_blocks * 512


def test_a_step_is_committed_ahead_and_no_more_until_it_is_near() -> None:
    memory = SharedMemory.create(80 * MIB, "ahead")
    ahead = CommitAhead(memory)
    assert ahead.begins(0)
    assert not ahead.begins(0), "it is to be run first"
    ahead.run(0)
    assert committed(memory) == 32 * MIB
    assert not ahead.begins(16 * MIB)
    assert ahead.begins(17 * MIB)
    ahead.run(17 * MIB)
    assert committed(memory) in (49 * MIB, 50 * MIB)  # kernels may be set to make huge pages by themselves
    assert ahead.begins(70 * MIB)
    ahead.run(70 * MIB)
    assert committed(memory) == 80 * MIB
    assert not ahead.begins(80 * MIB)
    memory.close()


def test_a_range_is_committed_alone_and_of_huge_pages_where_they_are_wanted() -> None:
    memory = SharedMemory.create(12 * MIB, "ahead", "auto")
    ahead = CommitAhead(memory, 4 * MIB, 9 * MIB)
    assert ahead.begins(4 * MIB)
    ahead.run(4 * MIB)
    joins = can_collapse()
    if memory.pages != "huge":
        assert memory.pages == ("transparent" if joins else "small")
        assert committed(memory) == (6 if joins else 5) * MIB
    assert not ahead.begins(9 * MIB)
    memory.close()
