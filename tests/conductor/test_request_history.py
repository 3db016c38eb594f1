"""The history of requests: sessions with their turns, and what was rejected before a placement could be planned."""

import pytest

import conductor.policy.history as history_module
from conductor.policy.decisions import Reject
from tests.conductor.conftest import Cluster, node, request


@pytest.fixture
def pair() -> Cluster:
    return Cluster(node("p", "prefill"), node("d", "decode"))


def test_a_session_has_its_turns_in_order_with_what_its_client_announced(pair):
    pair.send(request("a1", session=7, pause_s=30.0, lifetime_s=300.0, tenant="t"))
    pair.after(10).send(request("b1", session=8, parent_session=7))
    pair.after(5).send(request("a2", session=7))
    pair.send(request("alone"))
    latest, other = pair.conductor.history.sessions(10)
    assert (latest.session, latest.num_turns, list(latest.requests)) == (7, 2, ["a1", "a2"])
    first = latest.requests["a1"]
    assert (first.pause_s, first.lifetime_s, first.tenant) == (30.0, 300.0, "t")
    assert latest.first_ns == first.at_ns
    assert [turn.parent_session for turn in other.requests.values()] == [7]
    assert [session.session for session in pair.conductor.history.sessions(1)] == [7]


def test_a_repeated_request_is_one_turn(pair):
    for _ in range(3):
        pair.after(1).send(request("a1", session=7))
    (session,) = pair.conductor.history.sessions(10)
    assert (session.num_turns, list(session.requests)) == (1, ["a1"])
    assert session.requests["a1"] is pair.conductor.history.find("a1")


def test_a_session_is_forgotten_with_its_last_remembered_request(pair, monkeypatch):
    monkeypatch.setattr(history_module, "MAX_REMEMBERED", 3)
    for name in ("a1", "a2"):
        pair.send(request(name, session=7))
    first_ns = pair.now_ns
    for name in ("b1", "b2"):
        pair.after(1).send(request(name, session=8))
    sessions = {each.session: each for each in pair.conductor.history.sessions(10)}
    assert (sessions[7].num_turns, list(sessions[7].requests), sessions[7].first_ns) == (2, ["a2"], first_ns)
    pair.send(request("b3", session=8))
    assert [each.session for each in pair.conductor.history.sessions(10)] == [8]


def test_requests_without_a_plan_are_recorded_with_their_reason_and_bounded(pair):
    for number in range(100):
        (decision,) = pair.after(1).send(request(f"r{number}", prompt=100_000, tenant="t"))
        assert isinstance(decision, Reject)
    refused = pair.conductor.history.refused()
    assert (refused[0].request_id, refused[0].reason, refused[0].prompt_tokens) == ("r99", "too_long", 100_000)
    assert refused[0].at_ns > refused[-1].at_ns
    assert len(refused) == 64
    assert (pair.conductor.history.num_decided, len(pair.conductor.history)) == (100, 0)


def test_a_later_attempt_is_no_other_decision(pair):
    pair.send(request("a"))
    pair.send(request("a", attempt=1, excluded=("p",), generated=1))
    assert pair.conductor.history.num_decided == 1
    assert not pair.conductor.history.refused()
