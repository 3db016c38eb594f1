"""Events: numbering, continuation, what cannot be continued, order within a message, the sum of what is held."""

import random

import pytest

from conductor.directory import Directory
from kvpool import BlockRun, PoolEvents, keys_from_bytes, keys_u64
from kvpool.events import Tier, contents_sum
from kvpool.policy.event_log import EventLog

NS = b"n" * 16


def run(i: int) -> BlockRun:
    return BlockRun(NS, i.to_bytes(16, "little"))


def store(log: EventLog, i: int) -> None:
    log.append(NS, run(i).chain, None, Tier.DRAM)


def test_events_after_a_number_continue_without_a_gap() -> None:
    log = EventLog(3, 1 << 20)
    for i in range(1, 6):
        store(log, i)
    assert log.after(3, 5) == []
    (message,) = log.after(3, 2) or []
    assert (message.first_seq, message.seq, message.stored) == (3, 5, (run(3), run(4), run(5)))


def test_forgotten_future_and_foreign_events_need_a_snapshot() -> None:
    log = EventLog(3, capacity_nbytes=600)
    for i in range(5):
        store(log, i)
    assert log.after(3, 2) is None
    assert log.after(3, 3) is not None
    assert log.after(3, 6) is None
    assert log.after(4, 5) is None


def test_a_block_stored_and_removed_again_keeps_its_order() -> None:
    log = EventLog(3, 1 << 20)
    for stored, i in ((True, 1), (False, 1), (True, 2), (True, 1), (False, 2), (False, 1)):
        log.append(NS, run(i).chain, *((None, Tier.DRAM) if stored else (Tier.DRAM, None)))
    directory = Directory()
    directory.apply("a", PoolEvents(3, 0, snapshot_begin=True, snapshot_end=True))
    states = []
    for message in log.after(3, 0) or []:
        assert directory.apply("a", message)
        states.append([bool(directory.match(NS, keys_u64(keys_from_bytes(run(i).chain)))) for i in (1, 2)])
    assert states == [[True, False], [True, True], [False, False]]
    assert directory.position("a") == (3, 6)


def test_large_snapshots_and_backlogs_come_in_several_messages() -> None:
    log = EventLog(3, 8 << 20)
    chain = bytearray(3 << 20)
    messages = log.snapshot({(NS, Tier.SSD): chain})
    assert messages[0].snapshot_begin
    assert messages[-1].snapshot_end
    assert [(len(run.chain), run.tier) for m in messages for run in m.stored] == [(1 << 20, Tier.SSD)] * 3
    for _ in range(4):
        log.append(NS, bytes(chain[: 1 << 20]), None, Tier.DRAM)
    backlog = log.after(3, 0) or []
    assert len(backlog) > 1
    assert [m.first_seq for m in backlog] == [1, *(m.seq + 1 for m in backlog[:-1])]
    assert backlog[-1].seq == 4


@pytest.mark.parametrize("tier", list(Tier))
def test_blocks_add_as_much_to_the_contents_one_at_a_time_as_all_at_once(tier: Tier) -> None:
    kv_namespace, chain = bytes(range(240, 256)), random.Random(0).randbytes(16 * 100)
    one_by_one = sum(contents_sum(kv_namespace, chain[at : at + 16], tier) for at in range(0, len(chain), 16))
    assert one_by_one % 2**64 == contents_sum(kv_namespace, chain, tier)
