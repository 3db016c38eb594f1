"""Several models in one cluster: what is known of one says nothing of another."""

import numpy as np
import pytest

from conductor.directory.directory import Matches
from conductor.policy import Objectives
from conductor.policy.decisions import Place, Reject
from conductor.policy.events import NodeLost
from conductor.wire import request_arrived
from moonpool_proto.v1 import conductor_pb2
from settings.keys import InvalidSetting


@pytest.fixture
def two(cluster, make):
    """A cluster of models "m" and "n", a prefill and a decode node each, on one host with one pool node."""

    def start(**config):
        return cluster(
            make.node("pool-0", "pool"),
            make.node("prefill-0", "prefill"),
            make.node("decode-0", "decode"),
            make.node("n-prefill-0", "prefill", model="n"),
            make.node("n-decode-0", "decode", model="n"),
            **config,
        )

    return start


def models(c):
    return c.conductor.snapshot(c.now_ns)["models"]


def test_a_request_is_placed_on_its_models_nodes_only(two, make):
    c = two()
    for index in range(8):
        (m,) = c.send(make.request(f"m{index}"))
        (n,) = c.send(make.request(f"n{index}", model="n"))
        assert (m.prefill, m.decode) == ("prefill-0", "decode-0")
        assert (n.prefill, n.decode) == ("n-prefill-0", "n-decode-0")


def test_costs_are_learnt_per_model(two, make):
    c = two()
    c.learn("prefill-0", per_token_s=1e-2)
    c.learn("n-prefill-0", per_token_s=1e-4)
    (slow,) = c.send(make.request("slow"))
    (fast,) = c.send(make.request("fast", model="n"))
    assert slow.predicted_ttft_s == pytest.approx(2.56, rel=0.1)
    assert fast.predicted_ttft_s == pytest.approx(0.0256, rel=0.1)


def test_a_models_own_objective_decides_and_the_clusters_does_for_the_others(two, make):
    c = two(ttft_slo_s=1.0, model_objectives={"n": Objectives(10.0, 0.0)})
    for node_id in ("prefill-0", "n-prefill-0"):
        c.learn(node_id, per_token_s=1e-2)
    (rejected,) = c.send(make.request("a"))
    assert isinstance(rejected, Reject)
    assert rejected.reason == "ttft"
    assert isinstance(c.send(make.request("b", model="n"))[0], Place)
    (by_header,) = c.send(make.request("c", model="n", ttft_objective_s=0.5))
    assert by_header.reason == "ttft"


def test_a_models_objective_of_0_is_off_whatever_the_clusters_is(two, make):
    c = two(ttft_slo_s=0.001, model_objectives={"n": Objectives(0.0, 0.0)})
    assert isinstance(c.send(make.request("a"))[0], Reject)
    assert isinstance(c.send(make.request("b", model="n"))[0], Place)


def test_a_long_queue_of_one_model_is_none_of_another(two, make):
    c = two(max_queue_s=1.0)
    for node_id in ("prefill-0", "n-prefill-0"):
        c.learn(node_id, per_token_s=1e-3)
    replies = [c.send(make.request(f"m{index}", prompt=1024))[0] for index in range(4)]
    assert [type(reply) for reply in replies] == [Place, Reject, Reject, Reject]
    assert isinstance(c.send(make.request("n0", model="n", prompt=1024))[0], Place)


def test_requests_are_counted_by_model_and_those_of_unknown_models_by_none(two, make):
    c = two(model_objectives={"n": Objectives(1e-9, 0.0)})
    c.send(make.request("a"))
    c.send(make.request("b", model="n"))
    c.after(10).send(make.request("c", model="no-such-model"))
    told = models(c)
    assert set(told) == {"m", "n"}
    guesses = {"extrapolated_decode": 1, "extrapolated_prefill": 1}  # nothing was measured
    assert told["m"]["counters"] == {"arrived": 1, "placed": 1, "replaced": 0, "reused_blocks": 0, **guesses}
    assert told["n"]["counters"]["rejected_ttft"] == 1
    assert told["n"]["objectives"] == {"ttft": "0.000000001s", "tbt": "off"}
    assert c.conductor.snapshot(c.now_ns)["counters"]["arrived"] == 3


def test_a_model_without_a_decode_node_is_not_ready_and_the_other_is(two, make):
    c = two()
    assert c.conductor.ready_models() == ["m", "n"]
    c.send(NodeLost("n-decode-0", 1))
    assert c.conductor.ready_models() == ["m"]
    assert models(c)["n"]["ready"] is False


def test_a_hot_prefix_is_copied_for_each_of_two_models_with_one_chain(cluster, make):
    views = [make.node(f"pool-{host}", "pool") for host in (0, 1)]
    for model in ("m", "n"):
        for role in ("prefill", "decode"):
            views += [make.node(f"{model}-{role}-{host}", role, model=model) for host in (0, 1)]
    c = cluster(*views)
    keys, copies = np.arange(100, 110, dtype=np.uint64), []
    for model, namespace in (("m", b"a" * 16), ("n", b"b" * 16)):
        ask = conductor_pb2.ScheduleRequest(
            request_id=model,
            model=model,
            prompt_tokens=170,
            max_new_tokens=8,
            exclude_nodes=[f"{model}-prefill-0"],
        )
        _, copy = c.send(request_arrived(ask, namespace, Matches(("pool-0",), np.array([[10], [0]]), 10), keys, {}))
        copies.append(copy)
    assert {(copy.source, copy.target) for copy in copies} == {("pool-0", "pool-1")}
    assert copies[0].match_key != copies[1].match_key


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_an_objective_that_is_no_time_is_refused(seconds):
    with pytest.raises(InvalidSetting, match="objective tbt_s"):
        Objectives(1.0, seconds)
