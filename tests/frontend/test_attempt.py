"""The pure core of following an attempt: order, duplicates, and whose loss matters."""

from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.attempt import Attempt, Setback
from frontend.inbox import AttemptFailed, Event, Inbox, TokenArrived, WorkerGone
from frontend.streams import WorkerStream
from moonpool_proto.v1 import conductor_pb2, worker_pb2


class Named:
    def __init__(self, node_id: str) -> None:
        self.node_id = node_id


def attempt_of(first_index: int = 0, *, decode: bool = True) -> Attempt:
    placement = conductor_pb2.Placement(prefill=conductor_pb2.NodeRef(node_id="p"))
    if decode:
        placement.decode.node_id = "d"
    attempt = Attempt(1, placement, Inbox(10, lambda: None), first_index)
    attempt.prefill = cast(WorkerStream, Named("p"))
    attempt.decode = cast(WorkerStream, Named("d")) if decode else None
    return attempt


def token(node_id: str, index: int) -> TokenArrived:
    return TokenArrived(node_id, worker_pb2.Token(index=index, token_id=100 + index), 0.0)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5), st.data())
def test_tokens_come_out_once_and_in_order_however_they_arrive(first_index: int, data: Any) -> None:
    attempt = attempt_of(first_index)
    indices = list(range(first_index, first_index + 8))
    extra = data.draw(st.lists(st.sampled_from([*range(first_index), *indices]), max_size=6))
    events: list[Event] = [token("p" if index == first_index else "d", index) for index in indices + extra]
    events = data.draw(st.permutations(events))
    taken: list[int] = []
    while events:
        size = data.draw(st.integers(1, len(events)))
        tokens, setback = attempt.take(events[:size])
        assert setback is None
        taken += [arrived.token.index for arrived in tokens]
        events = events[size:]
    assert taken == indices
    assert attempt.num_duplicates == len(extra)


def test_tokens_before_a_failure_in_one_batch_are_taken() -> None:
    failure = worker_pb2.Failure(code="x", message="m", retryable=True)
    tokens, setback = attempt_of().take([token("p", 0), AttemptFailed("p", failure), token("d", 1)])
    assert [arrived.token.index for arrived in tokens] == [0]
    assert setback == Setback("p", "x", "m", retryable=True)


def test_prefill_worker_may_go_once_its_token_and_a_decode_token_are_here() -> None:
    gone = WorkerGone("p", "died")
    assert attempt_of().take([token("p", 0), gone])[1] is not None
    assert attempt_of().take([token("d", 1), gone])[1] is not None
    assert attempt_of().take([token("p", 0), token("d", 1), gone])[1] is None
    assert attempt_of().take([token("p", 0), token("d", 1), WorkerGone("d", "died")])[1] is not None
    assert attempt_of(decode=False).take([token("p", 0), token("p", 1), gone])[1] is not None


def test_inbox_overflows_once_and_still_takes_failures() -> None:
    calls: list[None] = []
    inbox = Inbox(2, lambda: calls.append(None))
    for index in range(5):
        inbox.put(token("d", index))
    inbox.put(WorkerGone("d", "died"))
    assert inbox.overflowed
    assert len(calls) == 1
