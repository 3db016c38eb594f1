"""Rejections: which requests, with which reason and Retry-After."""

import pytest

from conductor.policy.decisions import Place, Reject
from conductor.policy.events import NodeLost, NodeReported, ObjectivesChanged, RequestCompleted
from conductor.policy.objectives import parse_record, record_text


@pytest.fixture
def pair(cluster, make):
    """One prefill and one decode node with known costs: 1 ms per prompt token, 10 ms per sequence and step."""

    def factory(**config):
        c = cluster(make.node("p", "prefill"), make.node("d", "decode"), **config)
        c.learn("p", per_token_s=1e-3, step_s=0.01)
        return c

    return factory


def reason(decisions):
    return decisions[0].reason if isinstance(decisions[0], Reject) else None


def test_a_predicted_ttft_over_the_objective_is_rejected_with_the_time_until_the_queue_is_shorter(pair, make):
    c = pair(ttft_slo_s=1.0)
    for i in range(3):
        assert isinstance(c.send(make.request(f"r{i}", prompt=300))[0], Place)
    reject = c.send(make.request("s", prompt=300))[0]
    assert reject.reason == "ttft"
    assert reject.retry_after_s in (1.0, 2.0)
    assert isinstance(c.after(reject.retry_after_s).send(make.request("s", prompt=300))[0], Reject)


def test_after_retry_after_the_request_is_admitted(pair, make):
    c = pair(ttft_slo_s=3.0)
    assert isinstance(c.send(make.request("r", prompt=2000))[0], Place)
    c.progress("p", "prefill_started", "r")
    reject = c.send(make.request("s", prompt=1900))[0]
    assert reject.reason == "ttft"
    assert reject.retry_after_s in (1.0, 2.0)
    assert isinstance(c.after(reject.retry_after_s).send(make.request("s", prompt=1900))[0], Place)


def test_a_requests_own_objective_replaces_the_clusters(pair, make):
    c = pair(ttft_slo_s=0.1)
    assert reason(c.send(make.request("r", prompt=300))) == "ttft"
    assert reason(c.send(make.request("r", prompt=300, ttft_objective_s=5.0))) == "ttft"  # it may only tighten
    c.send(ObjectivesChanged(1, record_text(parse_record({"headers": "any"}))))
    assert reason(c.send(make.request("r", prompt=300, ttft_objective_s=5.0))) is None


def test_a_predicted_tbt_over_the_objective_is_rejected(pair, make):
    c = pair(tbt_slo_s=0.025)
    for i in range(2):
        c.send(make.request(f"r{i}", prompt=64, new=200))
        c.progress("d", "decode_joined", f"r{i}")
    reject = c.send(make.request("s", prompt=64))[0]
    assert reject.reason == "tbt"
    assert reject.retry_after_s >= 1


def test_a_request_whose_client_has_tokens_is_never_rejected_for_load(pair, make):
    c = pair(ttft_slo_s=0.1, tbt_slo_s=0.001, max_queue_s=0.1)
    for i in range(4):
        place = c.send(make.request(f"r{i}", attempt=1, prompt=3000, new=1000, generated=5))[0]
        assert isinstance(place, Place)


def test_without_objectives_a_full_ledger_makes_the_request_wait_not_fail(pair, make):
    c = pair()
    c.send(make.request("r", prompt=64, new=4000))
    place = c.send(make.request("s", prompt=64, new=4000))[0]
    assert isinstance(place, Place)
    assert place.predicted_ttft_s > 30  # until the first one's 4,000 tokens of 10 ms are out


def test_with_objectives_a_full_ledger_is_refused_as_decode_capacity(pair, make):
    c = pair(ttft_slo_s=100.0)
    c.send(make.request("r", prompt=64, new=4000))
    reject = c.send(make.request("s", prompt=64, new=4000))[0]
    assert reject.reason == "decode_capacity"
    assert (
        37 <= reject.retry_after_s <= 64
    )  # when the first one's 4,000 tokens of 10 ms are out, and half as long after


def test_a_wait_for_pages_beyond_the_bound_is_refused_as_queue(pair, make):
    c = pair(max_queue_s=10)
    c.send(make.request("r", prompt=64, new=4000))
    assert reason(c.send(make.request("s", prompt=64, new=4000))) == "queue"


def test_a_prefill_queue_beyond_the_bound_is_refused_as_queue(pair, make):
    c = pair(max_queue_s=2)
    reasons = [reason(c.send(make.request(f"r{i}", prompt=1000, new=8))) for i in range(4)]
    assert reasons == [None, None, None, "queue"]


def test_among_full_decode_nodes_the_least_committed_is_taken(cluster, make):
    c = cluster()
    c.send(make.request("a", prompt=96, new=4000, excluded=("decode-1",)))
    c.send(make.request("b", prompt=64, new=3000, excluded=("decode-0",)))
    assert c.send(make.request("c", prompt=64, new=3000))[0].decode == "decode-1"


def test_a_request_too_long_for_every_node_is_refused_by_name(pair, make):
    reject = pair().send(make.request(prompt=4000, new=200))[0]
    assert (reject.reason, reject.retry_after_s) == ("too_long", 0.0)
    assert "4200 tokens" in reject.message


def test_a_request_that_only_the_excluded_node_could_take_is_not_called_too_long(cluster, make):
    c = cluster(make.node("p", "prefill"), make.node("d", "decode"), make.node("e", "decode", capacity_tokens=128))
    assert reason(c.send(make.request(excluded=("d",)))) == "no_nodes"


def test_too_long_for_a_drained_big_node_is_not_called_too_long(cluster, make):
    c = cluster(make.node("p", "prefill"), make.node("d", "decode"), make.node("e", "decode", capacity_tokens=128))
    c.send(NodeReported("d", draining=True))
    assert reason(c.send(make.request())) == "no_nodes"


def test_a_long_request_goes_to_the_node_that_is_large_enough(cluster, make):
    small = {"capacity_tokens": 256}
    c = cluster(
        make.node("p-a", "prefill", **small),
        make.node("p-b", "prefill"),
        make.node("d-a", "decode", **small),
        make.node("d-b", "decode"),
    )
    place = c.send(make.request(prompt=1000))[0]
    assert (place.prefill, place.decode) == ("p-b", "d-b")


def test_unknown_models_and_lost_nodes_are_told_apart(cluster, make):
    c = cluster()
    assert reason(c.after(31).send(make.request(model="other"))) == "unknown_model"
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        c.send(NodeLost(name, 1))
    assert reason(c.send(make.request())) == "no_nodes"


def test_just_after_a_start_a_model_may_still_be_reconnecting(cluster, make):
    for age_s in (0, 29):
        (rejection,) = cluster().after(age_s).send(make.request(model="other"))
        assert (rejection.reason, rejection.may_return) == ("no_nodes", True)


def test_an_aggregated_node_without_room_waits_for_pages_in_its_ttft(cluster, make):
    c = cluster(make.node("a", "aggregated"), make.node("b", "aggregated"))
    c.learn("a")
    c.send(make.request("r", prompt=64, new=4000))
    assert c.send(make.request("s", prompt=64, new=4000))[0].prefill == "b"
    assert c.send(make.request("t", prompt=64, new=4000))[0].predicted_ttft_s > 30


@pytest.mark.parametrize("preempts", [True, False])
@pytest.mark.parametrize("roles", [{"prefill-0": "prefill", "decode-0": "decode"}, {"a": "aggregated"}])
def test_a_request_does_not_wait_for_pages_that_answers_of_lower_classes_give_up(cluster, make, roles, preempts):
    c = cluster(*(make.node(name, role, preempts=preempts) for name, role in roles.items()))
    record = {"classes": {"chat": {}, "batch": {"priority": 10}}}
    c.send(ObjectivesChanged(1, record_text(parse_record(record))))
    first, *_, last = [*roles, *roles]
    c.learn(first)
    c.send(make.request("slow", prompt=64, new=4000, slo_class="batch"))
    before = c.send(make.request("early", prompt=64, new=4000, slo_class="chat"))[0]
    assert before.predicted_ttft_s > 30, "it has generated nothing yet"
    c.send(RequestCompleted("early", 0, "cancelled", 0.1, 0.01, 0))
    for phase in ("prefill_started", "prefill_ended"):
        c.progress(first, phase, "slow")
    if last != first:
        c.progress(last, "decode_joined", "slow")
    for slo_class, waits in (("batch", True), ("chat", not preempts)):
        place = c.send(make.request("next", prompt=64, new=4000, slo_class=slo_class))[0]
        assert (place.predicted_ttft_s > 30) == waits
        c.send(RequestCompleted("next", 0, "cancelled", 0.1, 0.01, 0))
