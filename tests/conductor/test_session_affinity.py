"""Session affinity: which node is preferred among those that are about equally fast, and what it may cost."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.policy.events import Held, NodeJoined, NodeLost, RequestArrived
from conductor.policy.sessions import _MOST_SESSIONS, SessionNodes
from tests.conductor.conftest import Cluster, node, request
from tests.conductor.test_event_log import core_of, steps_of

NODES = (
    *(node(f"pool-{i}", "pool") for i in range(4)),
    *(node(f"prefill-{i}", "prefill") for i in range(4)),
    node("decode-0", "decode", capacity_tokens=1 << 20, max_batch=64),
)


def taken(c, number, **ask):
    """Place a one-token request and end it at once; return its prefill node."""
    name = f"r{number}"
    place = c.send(request(name, new=1, **ask))[0]
    c.progress(place.prefill, "ended", name)
    return place.prefill


def elsewhere(c, session):
    """Let a request of the session be placed on another node than the first by rendezvous hashing; return the node."""
    first = taken(c, "first", session=session)
    moved = taken(c, "moved", session=session, excluded=(first,))
    assert moved != first
    return moved


def test_new_sessions_spread_over_equal_nodes_alike_in_all_conductors():
    found = [[taken(c, i, session=i + 1) for i in range(400)] for c in (Cluster(*NODES), Cluster(*NODES))]
    assert found[0] == found[1]
    assert min(Counter(found[0]).values()) > 70


def test_the_sessions_of_a_node_that_leaves_spread_over_the_others():
    c = Cluster(*NODES)
    before = {session: taken(c, session, session=session) for session in range(1, 401)}
    c.send(NodeLost("prefill-2", 1))
    fresh = Cluster(*(each for each in NODES if each.node_id != "prefill-2"))
    after = {session: taken(fresh, session, session=session) for session in before}
    assert all(after[session] == at for session, at in before.items() if at != "prefill-2")
    moved = Counter(after[session] for session, at in before.items() if at == "prefill-2")
    assert len(moved) == 3
    assert min(moved.values()) > 15


def test_a_session_stays_on_its_node_if_nothing_matches():
    c = Cluster(*NODES)
    at = elsewhere(c, 77)
    assert [taken(c, i, session=77, prompt=100 + i) for i in range(8)] == [at] * 8


def test_a_session_without_an_id_takes_the_first_of_equals():
    c = Cluster(*NODES)
    elsewhere(c, 77)
    assert taken(c, 1) == "prefill-0"


def test_a_matched_prefix_outweighs_the_sessions_node():
    c = Cluster(*NODES)
    c.learn("prefill-0")
    at = elsewhere(c, 77)
    other = next(f"pool-{i}" for i in range(4) if f"prefill-{i}" != at)
    held = {"prompt": 1024, "matches": ((other, 40),), "match_key": 7}
    assert taken(c, 1, session=77, **held) == other.replace("pool", "prefill")
    assert taken(c, 2, session=77) == other.replace("pool", "prefill")  # its node from then on


def test_a_sub_agent_starts_on_the_node_of_its_parent_and_then_has_its_own():
    c = Cluster(*NODES)
    parent = elsewhere(c, 77)
    assert taken(c, 1, session=78, parent_session=77) == parent
    own = taken(c, 2, session=78, parent_session=77, excluded=(parent,))
    assert taken(c, 3, session=78, parent_session=77) == own != parent
    assert taken(c, 4, session=77) == parent


def test_a_sub_agent_of_an_unknown_parent_starts_where_the_parent_would():
    for parent in range(1, 40):
        assert taken(Cluster(*NODES), 1, session=1000, parent_session=parent) == taken(
            Cluster(*NODES), 1, session=parent
        )


def test_a_queue_moves_the_session_and_makes_the_other_node_its_own():
    c = Cluster(*NODES)
    c.learn("prefill-0")
    at = taken(c, 0, session=77)
    others = tuple(f"prefill-{i}" for i in range(4) if f"prefill-{i}" != at)
    c.send(request("long", prompt=2048, excluded=others))
    moved = taken(c, 1, session=77)
    assert moved != at
    c.progress(at, "ended", "long")
    assert taken(c, 2, session=77) == moved


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(16, 600)), max_size=12),
    st.lists(st.integers(0, 30), min_size=4, max_size=4),
    st.integers(1, (1 << 64) - 1),
    st.integers(0, 3),
)
def test_affinity_costs_at_most_a_twentieth_of_the_predicted_ttft(queued, blocks, session, served):
    c = Cluster(*NODES)
    c.learn("prefill-0")
    own = tuple(f"prefill-{i}" for i in range(4) if i != served)
    taken(c, "own", session=session, excluded=own)
    for number, (at, prompt) in enumerate(queued):
        others = tuple(f"prefill-{i}" for i in range(4) if i != at)
        c.send(request(f"q{number}", prompt=prompt, excluded=others))
    matches = tuple((f"pool-{i}", held) for i, held in enumerate(blocks) if held)
    asked = request("asked", prompt=512, new=1, matches=matches, match_key=1 if matches else 0)
    free = c.send(asked)[0]
    c.progress(free.prefill, "ended", "asked")
    kept = c.send(replace(asked, request_id="kept", session=session))[0]
    assert kept.predicted_ttft_s <= 1.05 * free.predicted_ttft_s + 1e-9


def test_the_least_recently_used_sessions_are_forgotten():
    known = SessionNodes()
    for session in range(1, _MOST_SESSIONS + 1):
        known.use(session, "a")
    known.use(1, "b")
    known.use(_MOST_SESSIONS + 1, "c")
    assert (known.node_of(1), known.node_of(2), known.node_of(_MOST_SESSIONS + 1)) == ("b", "", "c")
    assert len(known) == _MOST_SESSIONS


@pytest.mark.parametrize("field", ["session", "parent_session"])
def test_affinity_follows_from_the_log(tmp_path, field):
    core = core_of(tmp_path)
    for each in NODES:
        core.handle(NodeJoined(each))
    for i in range(40):
        excluded = (f"prefill-{i % 4}",) if i < 20 else ()
        core.handle(request(f"r{i}", **{"session": 1 + i % 5, field: 1 + i % 5}, excluded=excluded))
    core.close()
    steps = steps_of(tmp_path)
    assert all(step.logged == step.made for step in steps)
    found = [step for step in steps if isinstance(step.event, RequestArrived)]
    assert {getattr(step.event, field) for step in found} == {1, 2, 3, 4, 5}
    without = Cluster(*NODES)
    assert [without.send(replace(step.event, session=0, parent_session=0)) for step in found] != [
        step.made for step in found
    ]


def others_place(c, count, node_id="prefill-0"):
    """Report requests that other conductors placed, and their ends."""
    for i in range(count):
        c.holds(node_id, Held(f"other-{i}", 0, remaining_prefill_tokens=16, prompt_tokens=64, decode_node="decode-0"))
    c.holds(node_id)


def test_with_other_conductors_requests_are_spread_over_equal_nodes():
    c = Cluster(*NODES)
    others_place(c, 5)
    found = Counter(taken(c, i) for i in range(200))
    assert len(found) == 4
    assert min(found.values()) > 25


def test_without_other_conductors_requests_take_the_first_of_equals():
    c = Cluster(*NODES)
    assert {taken(c, i) for i in range(20)} == {"prefill-0"}


def test_the_spread_ends_when_the_others_place_nothing_any_more():
    c = Cluster(*NODES, replication_horizon_s=10.0)
    others_place(c, 5)
    c.after(100.0)
    assert {taken(c, i) for i in range(20)} == {"prefill-0"}


def test_the_chosen_node_is_explained_even_if_faster_ones_fill_the_list():
    c = Cluster(*NODES, explain=1)
    at = elsewhere(c, 77)
    place = c.send(request("kept", new=1, session=77))[0]
    assert place.prefill == at
    assert [score.node_id for score in place.considered.prefill] == [at]
