"""The order of those that wait: age, class, shares, deadlines; and how long anybody can be kept waiting by it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool_proto.v1 import conductor_pb2
from worker.policy.scheduling_order import QueueEntry, RequestKey, WaitQueue
from worker.request import queue_entry_from_proto

FRESH = QueueEntry(arrived_s=0.0, due_s=10.0, ages_s=60.0)


def queue_of(*turns: QueueEntry) -> WaitQueue:
    queue = WaitQueue()
    for number, turn in enumerate(turns):
        queue.add((str(number), 0), turn)
    return queue


def order(queue: WaitQueue, count: int, now_s: float = 0.0) -> list[int]:
    return sorted(range(count), key=lambda number: queue.rank((str(number), 0), now_s))


def test_a_class_of_a_lower_level_goes_first_whatever_its_deadline() -> None:
    assert order(queue_of(replace(FRESH, due_s=1.0), replace(FRESH, level=-1, due_s=50.0, priority=9)), 2) == [1, 0]


def test_within_a_class_the_account_with_the_smallest_ticket_goes_first() -> None:
    flood = [replace(FRESH, account="a", start_ns=start) for start in (0, 10, 20)]
    assert order(queue_of(*flood, replace(FRESH, account="b", start_ns=5, due_s=50.0)), 4) == [0, 3, 1, 2]


def test_an_account_uses_its_first_ticket_for_what_is_most_urgent_of_its_own() -> None:
    late = replace(FRESH, account="a", start_ns=20, due_s=1.0)
    queue = queue_of(replace(FRESH, account="a", start_ns=0), replace(FRESH, account="b", start_ns=10), late)
    assert order(queue, 3) == [2, 1, 0]
    assert [queue.entry((str(n), 0)).start_ns for n in range(3)] == [20, 10, 0]


def test_a_priority_moves_a_request_among_its_accounts_own_only() -> None:
    pushy = replace(FRESH, account="a", start_ns=20, priority=-(2**31) + 1)
    queue = queue_of(replace(FRESH, account="a", start_ns=0), replace(FRESH, account="b", start_ns=10), pushy)
    assert order(queue, 3) == [2, 1, 0]


def test_equals_go_as_they_came() -> None:
    assert order(queue_of(*[FRESH] * 5), 5) == [0, 1, 2, 3, 4]


def test_who_has_waited_for_the_bound_goes_before_all_that_is_newer() -> None:
    queue = queue_of(replace(FRESH, level=9, start_ns=10**12), replace(FRESH, level=-9, arrived_s=30.0, ages_s=90.0))
    assert order(queue, 2, now_s=59.9) == [1, 0]
    assert order(queue, 2, now_s=60.0) == [0, 1]


def test_who_leaves_takes_along_the_ticket_that_it_used() -> None:
    queue = queue_of(replace(FRESH, start_ns=0), replace(FRESH, start_ns=7, due_s=1.0))
    queue.remove(("1", 0))
    assert queue.entry(("0", 0)).start_ns == 7
    queue.remove(("0", 0))
    queue.remove(("0", 0))
    assert len(queue) == 0


BOUND_S = 20
arrivals = st.lists(
    st.tuples(
        st.integers(0, 12),  # after the one before, seconds
        st.integers(1, 5),  # service, seconds
        st.integers(-3, 3),  # level
        st.sampled_from("abc"),
        st.integers(0, 10**6),  # ticket
        st.integers(-5, 5),  # priority
        st.integers(0, 40),  # due, from its arrival
    ),
    min_size=1,
    max_size=40,
)


def served(history: list[tuple[int, int, int, str, int, int, int]]) -> list[tuple[QueueEntry, int, float]]:
    """(turn, seconds of service, when it began) of all, by one server that asks the queue for whoever is next."""
    coming: list[tuple[QueueEntry, int]] = []
    now_s = 0.0
    for gap_s, work_s, level, account, ticket, priority, due_s in history:
        now_s += gap_s
        coming.append((QueueEntry(now_s, now_s + due_s, now_s + BOUND_S, level, account, ticket, priority), work_s))
    queue, waiting, done = WaitQueue(), dict[RequestKey, tuple[QueueEntry, int]](), []
    now_s = 0.0
    while coming or waiting:
        if not waiting:
            now_s = max(now_s, coming[0][0].arrived_s)
        while coming and coming[0][0].arrived_s <= now_s:
            key = str(len(coming)), 0
            waiting[key] = coming.pop(0)
            queue.add(key, waiting[key][0])
        key = queue.first(waiting, now_s)
        turn, work_s = waiting.pop(key)
        queue.remove(key)
        done.append((turn, work_s, now_s))
        now_s += work_s
    return done


@settings(max_examples=200, deadline=None)
@given(arrivals)
def test_nobody_starves(history: list[tuple[int, int, int, str, int, int, int]]) -> None:
    """Once a request has waited for the bound nothing newer is begun before it: so it begins within the bound, the
    service under way, and the service of what was there before it."""
    done = served(history)
    assert len(done) == len(history)
    for turn, _, began_s in done:
        passed = [t for t, _, at_s in done if turn.ages_s <= at_s < began_s]
        assert all(t.arrived_s <= turn.arrived_s for t in passed)
        older_s = sum(work_s for t, work_s, at_s in done if t.arrived_s <= turn.arrived_s and at_s >= turn.ages_s)
        assert began_s <= max(turn.arrived_s, turn.ages_s) + 5 + older_s


@settings(max_examples=200, deadline=None)
@given(arrivals, st.data())
def test_the_tickets_of_an_account_are_used_in_its_own_order(
    history: list[tuple[int, int, int, str, int, int, int]], data: st.DataObject
) -> None:
    queue, here = WaitQueue(), dict[RequestKey, QueueEntry]()
    for number, (_, _, level, account, ticket, priority, due_s) in enumerate(history):
        key = str(number), 0
        here[key] = QueueEntry(0.0, due_s, 60.0, level, account, ticket, priority)
        queue.add(key, here[key])
        if data.draw(st.booleans()):
            key = data.draw(st.sampled_from(sorted(here)))
            del here[key]
            queue.remove(key)
    for group in {(turn.level, turn.account) for turn in here.values()}:
        own = [key for key in here if (here[key].level, here[key].account) == group]
        own.sort(key=lambda key: (here[key].priority, here[key].due_s, int(key[0])))
        used = [queue.entry(key).start_ns for key in own]
        assert used == sorted(used)
    assert len(queue) == len(here)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_who_is_told_no_time_confuses_nobody_elses_place(wrong: float) -> None:
    queue = WaitQueue()
    for number, due_s in enumerate((5.0, wrong, 1.0, 3.0)):
        message = conductor_pb2.Turn(waited_s=wrong, due_in_s=due_s, ages_in_s=wrong if due_s == wrong else 100.0)
        queue.add((str(number), 0), queue_entry_from_proto(message, 1000.0))
    for number in (1, 0, 2, 3):
        queue.remove((str(number), 0))
    assert len(queue) == 0
    queue.add(("again", 0), QueueEntry())
    assert queue.first([("again", 0)], 1000.0) == ("again", 0)
