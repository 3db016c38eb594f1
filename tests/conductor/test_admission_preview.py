"""Previews of admission: what placing a request would predict or reject, with no effect on what is placed."""

import json

import pytest

from conductor.decision_log.event_log import event_line, read_row
from conductor.policy.decisions import Admissible, Place, Reject
from conductor.policy.events import AdmissionAsked, RequestCompleted

IDLE = {"requests": 0, "committed_tokens": 0, "prefills": 0, "sends": 0, "copies": 0}


@pytest.fixture
def pair(cluster, make):
    """One prefill and one decode node with known costs: 1 ms per prompt token, 10 ms per sequence and step."""

    def factory(**config):
        c = cluster(make.node("p", "prefill"), make.node("d", "decode"), make.node("pool-p", "pool"), **config)
        c.learn("p", per_token_s=1e-3, step_s=0.01)
        return c

    return factory


def test_a_preview_predicts_what_the_placement_then_predicts(pair, make):
    c = pair(ttft_slo_s=3.0)
    asked = make.request("r", prompt=512, matches=[("pool-p", 8)])
    (preview,) = c.send(AdmissionAsked(asked))
    (placed,) = c.send(asked)
    assert isinstance(placed, Place)
    assert preview == Admissible("r", placed.reuse_blocks, placed.predicted_ttft_s, placed.predicted_tbt_s)
    assert preview.reuse_blocks == 8


def test_a_preview_rejects_what_the_placement_rejects_with_the_same_answer(pair, make):
    c = pair(ttft_slo_s=1.0)
    for i in range(3):
        assert isinstance(c.send(make.request(f"r{i}", prompt=300))[0], Place)
    (preview,) = c.send(AdmissionAsked(make.request("s", prompt=300)))
    assert isinstance(preview, Reject)
    assert [preview] == c.send(make.request("s", prompt=300))


def test_previews_reserve_nothing_and_change_no_later_decision(pair, make):
    def decided(*, asks):
        c = pair(ttft_slo_s=1.0, tbt_slo_s=0.1, admission_mode="predicted")
        decisions = []
        for i in range(40):
            request = make.request(f"r{i}", prompt=200 + 16 * i, new=32, tenant=f"t{i % 3}", session=1 + i % 5)
            if asks:
                for _ in range(3):
                    c.send(AdmissionAsked(request))
            decisions.append(c.after(0.05).send(request))
            if i % 4 == 3:
                c.send(RequestCompleted(f"r{i - 3}", 0, "finished"))
        return decisions, c

    (without, _), (with_previews, c) = decided(asks=False), decided(asks=True)
    assert with_previews == without
    assert {type(each[0]) for each in without} == {Place, Reject}
    counters = c.conductor.snapshot(c.now_ns)["counters"]
    assert (counters["arrived"], counters["previewed"]) == (40, 120)
    assert counters["placed"] == sum(isinstance(each[0], Place) for each in without)


def test_a_preview_alone_leaves_nothing_behind(pair, make):
    c = pair()
    c.send(AdmissionAsked(make.request()))
    assert c.counts == IDLE
    assert c.conductor.history.find("r") is None


def test_a_request_that_no_node_serves_is_rejected_in_a_preview(pair, make):
    c = pair()
    (preview,) = c.send(AdmissionAsked(make.request(model="other")))
    assert isinstance(preview, Reject)
    assert preview.reason in ("unknown_model", "no_nodes")


def test_the_event_log_reproduces_previews(pair, make):
    c = pair(ttft_slo_s=1.0)
    event = AdmissionAsked(make.request("r", prompt=512, matches=[("pool-p", 8)]))
    decisions = c.send(event)
    line = event_line(c.now_ns, event, decisions)
    assert json.loads(line)["event"]["type"] == "AdmissionAsked"
    row = read_row(line)
    assert (row.event, row.decisions) == (event, decisions)
