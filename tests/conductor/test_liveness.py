"""Nodes that hang: joined, silent, and given no work until they are heard of again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.config import ConductorConfig
from conductor.errors import ConductorConfigError
from conductor.policy.decisions import Copy
from conductor.policy.events import NodeJoined, NodeLost, NodeReported, Tick
from conductor.policy.nodes import Liveness
from settings.keys import assemble

ALL = ("pool-0", "pool-1", "prefill-0", "prefill-1", "decode-0", "decode-1")


def let_pass(cluster, seconds, *, silent=()):
    """Time in which every node but the silent ones reports once a second."""
    for _ in range(seconds):
        cluster.after(1.0).send(Tick())
        for node_id in ALL:
            if node_id not in silent:
                cluster.send(NodeReported(node_id))


def test_a_silent_node_gets_no_work_until_it_reports_again(cluster, make):
    c = cluster(report_timeout_s=5.0)
    let_pass(c, 6, silent=("prefill-0", "decode-1"))
    assert c.conductor.suspects == {"prefill-0", "decode-1"}
    (place,) = c.send(make.request())
    assert (place.prefill, place.decode) == ("prefill-1", "decode-0")
    c.send(NodeReported("prefill-0"))
    (place,) = c.send(make.request("r2", prompt=4000))
    assert place.prefill == "prefill-0"


def test_a_node_is_not_suspect_at_the_timeout_but_after_it(cluster):
    c = cluster(report_timeout_s=5.0)
    let_pass(c, 5, silent=("decode-0",))
    assert c.conductor.suspects == set()
    c.after(0.001).send(Tick())
    assert c.conductor.suspects == {"decode-0"}


def test_a_cluster_whose_only_places_hang_is_not_ready_and_says_who(cluster, make):
    c = cluster(make.node("prefill-0", "prefill"), make.node("decode-0", "decode"), report_timeout_s=5.0)
    assert c.conductor.ready_models() == ["m"]
    let_pass(c, 6, silent=("decode-0",))
    assert c.conductor.ready_models() == []
    (reject,) = c.send(make.request())
    assert (reject.reason, "decode-0 silent" in reject.message) == ("no_nodes", True)
    assert c.conductor.snapshot(c.now_ns)["nodes"]["decode-0"]["suspect"]


def test_a_refusal_says_whether_what_is_missing_is_likely_to_be_there_in_a_moment(cluster, make):
    c = cluster(make.node("prefill-0", "prefill"), make.node("decode-0", "decode"), report_timeout_s=5.0, return_s=30.0)
    let_pass(c, 40, silent=("decode-0",))
    assert c.send(make.request())[0].may_return  # silent
    assert not c.send(make.request("r2", excluded=("decode-0",)))[0].may_return
    c.send(NodeReported("prefill-0", draining=True))
    assert c.send(make.request("r3"))[0].may_return  # leaving
    c.send(NodeReported("prefill-0"))
    c.send(NodeLost("decode-0", 1))
    assert c.send(make.request("r4"))[0].may_return  # it left just now
    let_pass(c, 29)
    assert c.send(make.request("r5"))[0].may_return
    assert not c.send(make.request("r6", excluded=("decode-0",)))[0].may_return
    let_pass(c, 2)
    assert not c.send(make.request("r7"))[0].may_return
    c.send(NodeLost("prefill-0", 1))
    assert c.send(make.request("r8"))[0].may_return
    c.after(31)
    assert not c.send(make.request("r9"))[0].may_return


def test_after_a_start_requests_wait_for_the_workers_that_are_still_to_join(cluster, make):
    c = cluster(make.node("pool-0", "pool"), return_s=30.0)
    (reject,) = c.send(make.request())
    assert (reject.reason, reject.may_return) == ("no_nodes", True)
    c.send(NodeJoined(make.node("prefill-0", "prefill")))
    assert c.after(29).send(make.request("r2"))[0].may_return
    assert not c.after(2).send(make.request("r3"))[0].may_return


def test_a_request_that_only_the_silent_nodes_could_take_is_not_called_too_long(cluster, make):
    nodes = make.node("prefill-0", "prefill"), make.node("decode-0", "decode", capacity_tokens=8192)
    c = cluster(*nodes, make.node("decode-1", "decode", capacity_tokens=128), report_timeout_s=5.0)
    let_pass(c, 6, silent=("decode-0",))
    (reject,) = c.send(make.request(prompt=1024))
    assert reject.reason == "no_nodes"


def test_blocks_of_a_silent_pool_node_are_not_counted_on_nor_sent_to_it(cluster, make):
    c = cluster(report_timeout_s=5.0)
    matches = (("pool-0", 4), ("pool-1", 15))
    let_pass(c, 6, silent=("pool-1", "prefill-1"))
    (place,) = c.send(make.request(matches=matches))
    assert [holder.pool for holder in place.holders] == ["pool-0"]
    let_pass(c, 1, silent=("pool-0", "prefill-1"))
    let_pass(c, 6, silent=("pool-0", "prefill-1"))
    c.learn("prefill-0")
    place, *copies = c.send(make.request("r2", matches=matches))
    assert [holder.pool for holder in place.holders] == ["pool-1"]
    assert not any(isinstance(decision, Copy) for decision in copies)


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_silent_node_that_leaves_and_joins_again_is_not_suspect(cluster, make, incarnation):
    c = cluster(report_timeout_s=5.0)
    let_pass(c, 6, silent=("decode-0",))
    c.send(NodeLost("decode-0", 1))
    assert c.conductor.suspects == set()
    c.send(NodeJoined(make.node("decode-0", "decode", incarnation=incarnation)))
    let_pass(c, 4, silent=("decode-0",))
    assert c.conductor.suspects == set()


def test_a_conductor_that_stood_still_suspects_nobody_for_what_it_did_not_read(cluster):
    c = cluster(report_timeout_s=5.0)
    let_pass(c, 3)
    c.after(60.0).send(Tick())
    assert c.conductor.suspects == set()
    let_pass(c, 6, silent=("decode-0",))
    assert c.conductor.suspects == {"decode-0"}


def test_suspicion_does_not_let_go_of_what_the_node_holds(cluster, make):
    c = cluster(make.node("prefill-0", "prefill"), make.node("decode-0", "decode"), report_timeout_s=5.0)
    c.send(make.request())
    let_pass(c, 6, silent=("decode-0",))
    assert c.counts["requests"] == 1


def test_without_a_timeout_silence_means_nothing(cluster):
    c = cluster()
    let_pass(c, 100, silent=ALL)
    assert c.conductor.suspects == set()


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("abc")), max_size=40))
def test_exactly_those_silent_for_longer_than_the_timeout_are_suspect(steps):
    liveness, now, heard = Liveness(9), 0, {}
    for gap, node_id in steps:
        now += gap
        liveness.pass_time(now)
        liveness.mark_alive(node_id, now)
        heard[node_id] = now
        assert liveness.suspects == {other for other, at in heard.items() if now - at > 9}


def test_a_timeout_that_ticks_cannot_keep_is_refused():
    with pytest.raises(ConductorConfigError, match=r"report_timeout_s must be .*got 1"):
        assemble(ConductorConfig, listen="unix:/x", report_timeout_s=1.5)
    with pytest.raises(ConductorConfigError, match=r"orphan_timeout_s must be .*got 1"):
        assemble(ConductorConfig, listen="unix:/x", orphan_timeout_s=1.5)
