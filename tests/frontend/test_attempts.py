"""How often a request is tried.

Which nodes a request stays away from, and for how long.

The pure core of following an attempt: order, duplicates, and whose loss matters.
"""

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.attempts import Attempt, AttemptFailure, AvoidedNodes, RetryBudget
from frontend.worker_streams import FailureReceived, Inbox, InboxEvent, TokenReceived, WorkerDisconnected, WorkerStream
from moonpool_proto.v1 import conductor_pb2, worker_pb2


def test_tries_that_reached_a_worker_are_limited() -> None:
    tries = RetryBudget(3, grace_s=30.0)
    tries.record_reached()
    assert [tries.is_exhausted(count, now_s=1.0) for count in (1, 2, 3)] == [False, False, True]


def test_attempts_without_a_worker_never_count_beside_those_that_had_one() -> None:
    tries = RetryBudget(3, grace_s=30.0)
    for _ in range(10):
        tries.record_unreachable(1.0)
    assert not tries.is_exhausted(10, now_s=30.9)
    tries.record_reached()
    assert not tries.is_exhausted(11, now_s=100.0)
    tries.record_reached()
    assert not tries.is_exhausted(12, now_s=101.0)
    tries.record_reached()
    assert tries.is_exhausted(13, now_s=102.0)


def test_preempted_attempts_do_not_count() -> None:
    tries = RetryBudget(3, grace_s=30.0)
    for _ in range(10):
        tries.record_reached()
        tries.record_preempted()
    assert [tries.is_exhausted(count, now_s=1.0) for count in (12, 13)] == [False, True]


def test_attempts_without_a_worker_end_when_none_is_reached_for_the_whole_grace() -> None:
    tries = RetryBudget(3, grace_s=30.0)
    for now_s in (1.0, 20.0, 31.0):
        tries.record_unreachable(now_s)
    assert tries.is_exhausted(3, now_s=31.0)
    assert not tries.is_exhausted(2, now_s=31.0)


def test_a_prefill_that_cannot_reach_its_decode_node_reaches_nobody() -> None:
    failure = worker_pb2.Failure(code="decode_unreachable", retryable=True, suspect_node_id="d")
    _, found = attempt_of().take([FailureReceived("p", failure)])
    assert found == AttemptFailure("d", "decode_unreachable", "", retryable=True, is_unreached=True)
    for code in ("starting", "draining"):
        for told in (
            worker_pb2.Failure(code=code, retryable=True, suspect_node_id="d"),
            worker_pb2.Failure(code=code, retryable=True),
        ):
            _, found = attempt_of().take([FailureReceived("p", told)])
            assert found is not None
            assert found.is_unreached
    refused = worker_pb2.Failure(code="reserve", retryable=True, suspect_node_id="d")
    _, found = attempt_of().take([FailureReceived("p", refused)])
    assert found is not None
    assert not found.is_unreached


class Now:
    """Incarnations in the cluster now."""

    def __init__(self) -> None:
        self.incarnations: dict[str, int] = {}

    def __call__(self, node_id: str) -> int:
        return self.incarnations.get(node_id, 0)


def test_a_node_that_failed_is_held_off_for_the_pause_and_avoided_for_good() -> None:
    avoided = AvoidedNodes(2.0, 15.0, Now())
    avoided.add("b", 1, 100.0)
    avoided.add("a", 1, 101.0)
    assert avoided.held_off(101.9) == ["a", "b"]
    assert avoided.held_off(102.0) == ["a"]
    assert avoided.held_off(103.0) == []
    assert avoided.nodes() == ["a", "b"]


def test_the_pause_doubles_with_each_failure_up_to_the_longest() -> None:
    avoided = AvoidedNodes(2.0, 15.0, Now())
    for pause_s in (2.0, 4.0, 8.0, 15.0, 15.0):
        avoided.add("a", 1, 100.0)
        assert avoided.held_off(100.0 + pause_s - 0.01) == ["a"]
        assert avoided.held_off(100.0 + pause_s) == []


def test_another_incarnation_is_not_avoided_and_begins_anew() -> None:
    now = Now()
    avoided = AvoidedNodes(2.0, 15.0, now)
    avoided.add("a", 1, 100.0)
    avoided.add("a", 1, 100.0)
    now.incarnations["a"] = 2
    assert avoided.nodes() == avoided.held_off(100.0) == []
    avoided.add("a", 2, 100.0)
    assert avoided.held_off(101.9) == ["a"]
    assert avoided.held_off(102.0) == []


def test_a_node_that_is_not_in_the_cluster_or_of_unknown_incarnation_counts_as_the_same() -> None:
    now = Now()
    avoided = AvoidedNodes(2.0, 15.0, now)
    avoided.add("a", 1, 100.0)
    assert avoided.nodes() == ["a"]
    now.incarnations["b"] = 3
    avoided.add("b", 0, 100.0)
    assert avoided.nodes() == ["a", "b"]


def test_a_sender_whose_kv_did_not_arrive_intact_is_held_off_longer_than_its_receiver() -> None:
    avoided = AvoidedNodes(2.0, 15.0, Now())
    avoided.add("d", 1, 100.0)
    avoided.add("p", 1, 100.0, is_sender=True)
    assert (avoided.nodes(), avoided.nodes(with_senders=False)) == (["d", "p"], ["d"])
    assert [avoided.held_off(now_s) for now_s in (101.9, 102.0, 104.0)] == [["d", "p"], ["p"], []]


def test_a_node_that_failed_by_itself_is_not_only_a_sender_afterwards() -> None:
    avoided = AvoidedNodes(2.0, 15.0, Now())
    avoided.add("p", 1, 100.0)
    avoided.add("p", 1, 110.0, is_sender=True)
    assert avoided.nodes(with_senders=False) == avoided.held_off(113.9) == ["p"]
    assert avoided.held_off(114.0) == []


@pytest.mark.parametrize("code", ["push", "unverified"])
def test_the_sender_of_kv_that_did_not_arrive_intact_is_named_beside_the_receiver(code: str) -> None:
    failure = worker_pb2.Failure(code=code, message="m", retryable=True, suspect_node_id="d")
    assert attempt_of().take([FailureReceived("p", failure)]) == (
        [],
        AttemptFailure("d", code, "m", retryable=True, sender="p"),
    )


class Named:
    def __init__(self, node_id: str) -> None:
        self.node_id = node_id


def attempt_of(first_index: int = 0, *, decode: bool = True) -> Attempt:
    placement = conductor_pb2.Placement(prefill=conductor_pb2.NodeRef(node_id="p"))
    if decode:
        placement.decode.node_id = "d"
    attempt = Attempt(1, placement, Inbox(10, lambda: None), first_index)
    attempt.prefill = cast("WorkerStream", Named("p"))
    attempt.decode = cast("WorkerStream", Named("d")) if decode else None
    return attempt


def token(node_id: str, index: int) -> TokenReceived:
    return TokenReceived(node_id, worker_pb2.Token(index=index, token_id=100 + index), 0.0)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5), st.data())
def test_tokens_come_out_once_and_in_order_however_they_arrive(first_index: int, data: Any) -> None:
    attempt = attempt_of(first_index)
    indices = list(range(first_index, first_index + 8))
    extra = data.draw(st.lists(st.sampled_from([*range(first_index), *indices]), max_size=6))
    events: list[InboxEvent] = [token("p" if index == first_index else "d", index) for index in indices + extra]
    events = data.draw(st.permutations(events))
    taken: list[int] = []
    while events:
        size = data.draw(st.integers(1, len(events)))
        tokens, failure = attempt.take(events[:size])
        assert failure is None
        taken += [arrived.token.index for arrived in tokens]
        events = events[size:]
    assert taken == indices
    assert attempt.num_duplicates == len(extra)


def test_tokens_before_a_failure_in_one_batch_are_taken() -> None:
    failure = worker_pb2.Failure(code="x", message="m", retryable=True)
    tokens, failure = attempt_of().take([token("p", 0), FailureReceived("p", failure), token("d", 1)])
    assert [arrived.token.index for arrived in tokens] == [0]
    assert failure == AttemptFailure("p", "x", "m", retryable=True)


def test_prefill_worker_may_go_once_its_token_and_a_decode_token_are_here() -> None:
    gone = WorkerDisconnected("p", "died")
    assert attempt_of().take([token("p", 0), gone])[1] is not None
    assert attempt_of().take([token("d", 1), gone])[1] is not None
    assert attempt_of().take([token("p", 0), token("d", 1), gone])[1] is None
    assert attempt_of().take([token("p", 0), token("d", 1), WorkerDisconnected("d", "died")])[1] is not None
    assert attempt_of(decode=False).take([token("p", 0), token("p", 1), gone])[1] is not None


def test_inbox_overflows_once_and_still_takes_failures() -> None:
    calls: list[None] = []
    inbox = Inbox(2, lambda: calls.append(None))
    for index in range(5):
        inbox.put(token("d", index))
    inbox.put(WorkerDisconnected("d", "died"))
    assert inbox.overflowed
    assert len(calls) == 1
