"""Preview of other objectives over past requests, and the history that it uses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.policy import PolicyConfig
from conductor.policy import history as past_module
from conductor.policy.admission_evaluation import preview
from conductor.policy.admission_rule import Forecast
from conductor.policy.decisions import Place, Reject
from conductor.policy.events import NS, DecodeAsked, NodeJoined, ObjectivesChanged, RequestCompleted
from conductor.policy.history import JudgedRequest, RequestHistory
from conductor.policy.objectives import parse_record, record_text


@pytest.fixture
def pair(cluster, make):
    """One prefill and one decode node with known costs: 1 ms per prompt token, 10 ms per sequence and step."""

    def factory(**config):
        c = cluster(make.node("p", "prefill"), make.node("d", "decode"), **config)
        c.learn("p", per_token_s=1e-3, step_s=0.01)
        return c

    return factory


def serve(c, request_id, ttft_s=0.0, tbt_s=0.0, outcome="finished"):
    for node_id, phase in (("p", "prefill_started"), ("p", "prefill_ended"), ("d", "decode_joined"), ("d", "ended")):
        c.progress(node_id, phase, request_id)
    c.send(RequestCompleted(request_id, 0, outcome, ttft_s=ttft_s, mean_tbt_s=tbt_s, generated=8, cached_tokens=16))


def previewed(c, record, **config):
    return preview(c.now_ns, c.conductor.history, parse_record(record), c.conductor.config)


def row(c, record):
    (found,) = previewed(c, record).rows
    return found


def test_each_request_is_judged_again_and_the_served_are_measured_by_the_other_objectives(pair, make):
    c = pair(ttft_slo_s=1.0)
    assert isinstance(c.send(make.request("quick", prompt=200))[0], Place)  # predicted 0.2 s
    serve(c, "quick", ttft_s=0.3)
    assert isinstance(c.send(make.request("slow", prompt=800))[0], Place)  # predicted 0.8 s
    serve(c, "slow", ttft_s=0.9)
    assert isinstance(c.send(make.request("long", prompt=1500))[0], Reject)  # predicted 1.5 s
    assert isinstance(c.send(make.request("longest", prompt=4000))[0], Reject)

    same = row(c, {"cluster": {"ttft": "1s"}})
    assert (same.stay_admitted, same.stay_rejected, same.now_rejected, same.now_admitted) == (2, 2, 0, 0)
    assert (same.met_before, same.missed_before, same.met_now, same.missed_now) == (2, 0, 2, 0)

    tighter = row(c, {"cluster": {"ttft": "250ms"}})
    assert (tighter.stay_admitted, tighter.now_rejected, tighter.stay_rejected) == (1, 1, 2)
    assert (tighter.met_now, tighter.missed_now) == (0, 1)  # 0.3 s is more than 250 ms, though 0.2 s was predicted
    assert (tighter.now_rejected_met, tighter.now_rejected_missed) == (0, 1)

    wider = row(c, {"cluster": {"ttft": "2s"}})
    assert (wider.stay_admitted, wider.now_admitted, wider.stay_rejected) == (2, 1, 1)
    assert (wider.met_now, wider.missed_now) == (2, 0)  # of the one that was never served nothing is claimed


def test_a_request_that_would_be_turned_away_although_it_was_quick_enough_is_told_as_such(pair, make):
    c = pair(ttft_slo_s=1.0)
    c.send(make.request("r", prompt=800))
    serve(c, "r", ttft_s=0.1)
    found = row(c, {"cluster": {"ttft": "500ms"}})
    assert (found.now_rejected, found.now_rejected_met, found.met_now) == (1, 1, 0)


def test_multiples_of_the_unloaded_value_classes_and_headers_hold_as_when_a_request_comes(pair, make):
    c = pair()
    c.send(ObjectivesChanged(1, record_text(parse_record({"classes": {"chat": {}, "gone": {}}}))))
    c.send(make.request("plain", prompt=1000, slo_class="gone"))
    c.send(make.request("chat", prompt=200, slo_class="chat"))
    c.send(make.request("own", prompt=200, slo_class="chat", ttft_objective_s=60.0))
    record = {"cluster": {"ttft": "1.5x"}, "classes": {"chat": {"ttft": "1ms"}}, "headers": "any"}
    by_class = {each.slo_class: each for each in previewed(c, record).rows}
    assert set(by_class) == {"", "chat"}  # a class that the record does not have counts as none
    assert (by_class[""].stay_admitted, by_class[""].now_rejected) == (1, 0)  # it had no queue: 1 x the unloaded value
    assert (by_class["chat"].now_rejected, by_class["chat"].stay_admitted) == (1, 1)  # its own 60 s stand
    ignored = previewed(c, record | {"headers": "ignore"})
    assert sum(each.now_rejected for each in ignored.rows) == 2


def test_room_and_queues_are_judged_as_they_were(pair, make):
    c = pair(max_queue_s=5.0)
    c.send(make.request("r", prompt=64, new=4000))
    rejected = c.send(make.request("s", prompt=64, new=4000))[0]
    assert rejected.reason == "queue"
    none, bounded = row(c, {}), row(c, {"cluster": {"ttft": "100s"}})
    assert (none.stay_rejected, none.stay_admitted) == (1, 1)
    assert bounded.stay_rejected == 1
    assert row(c, {"cluster": {"ttft": "off"}}).stay_rejected == 1  # no objective makes the queue shorter


def test_what_failed_was_cancelled_or_goes_on_is_not_counted_as_met_or_missed(pair, make):
    c = pair(ttft_slo_s=1.0)
    for name, outcome in (("a", "failed"), ("b", "cancelled"), ("c", "")):
        c.send(make.request(name, prompt=64))
        if outcome:
            serve(c, name, ttft_s=0.1, outcome=outcome)
    found = row(c, {"cluster": {"ttft": "1s"}})
    assert (found.stay_admitted, found.unmeasured, found.met_now, found.missed_now) == (3, 3, 0, 0)


def test_without_enforcement_the_same_is_told_as_what_would_be(pair, make):
    c = pair(ttft_slo_s=0.1, admission="shadow")
    assert isinstance(c.send(make.request("r", prompt=800))[0], Place)
    serve(c, "r", ttft_s=0.9)
    found = previewed(c, {"cluster": {"ttft": "2s"}})
    assert found.admission == "shadow"
    assert (found.rows[0].now_admitted, found.rows[0].missed_before, found.rows[0].met_now) == (1, 1, 1)
    off = pair(ttft_slo_s=0.1, admission="off")
    off.send(make.request("r", prompt=800))
    assert row(off, {"cluster": {"ttft": "1ms"}}).stay_admitted == 1


def test_decode_load_that_is_judged_after_the_prefill_is_judged_again_there(pair, make):
    c = pair(tbt_slo_s=0.015, admission_mode="load")
    for name in ("a", "b", "s"):
        assert isinstance(c.send(make.request(name, prompt=64, new=200))[0], Place)
        c.progress("p", "prefill_ended", name)
        if name != "s":
            c.progress("d", "decode_joined", name)
    (reject,) = c.send(DecodeAsked("s", 0))
    assert reject.after_prefill
    assert row(c, {"cluster": {"tbt": "15ms"}}).stay_rejected == 1
    assert row(c, {"cluster": {"tbt": "1s"}}).now_admitted == 1


@given(st.lists(st.tuples(st.floats(0.001, 4), st.floats(0, 0.4)), max_size=30), st.floats(0.002, 4))
def test_the_same_record_changes_nothing_and_every_request_is_counted_once(requests, objective_s):
    """Whatever was predicted, judged by the rule itself and remembered with its answer."""
    from conductor.policy.admission_rule import unmet
    from conductor.policy.objectives import ObjectiveBook

    record = parse_record({"cluster": {"ttft": f"{objective_s:.6f}s"}})
    objectives = ObjectiveBook(record).resolve("m", "", "").effective(0, 0, 0, 0)
    past = RequestHistory()
    for number, (ttft_s, margin) in enumerate(requests):
        forecast = Forecast(ttft_s, 0.0, 0.0, False, margin, 0.0)
        past.judged(
            JudgedRequest(
                f"r{number}",
                number,
                "m",
                "",
                "",
                0.0,
                0.0,
                64,
                objectives,
                forecast,
                predicted_tbt_s=0.0,
                idle_ttft_s=ttft_s,
                idle_tbt_s=0.0,
                rejection=unmet(forecast, objectives.ttft_s, 0.0),
            ),
            shared_blocks=0,
        )
    found = preview(NS, past, record, PolicyConfig(attained_share=0.0, report_timeout_s=0.0))
    assert not sum(each.now_rejected + each.now_admitted for each in found.rows)
    assert sum(each.stay_admitted + each.stay_rejected for each in found.rows) == found.judged == len(requests)


def test_only_so_many_requests_are_remembered_and_what_they_shared_is_forgotten_with_them(pair, make, monkeypatch):
    monkeypatch.setattr(past_module, "MAX_REMEMBERED", 3)
    c = pair()
    c.send(NodeJoined(make.node("pool-p", "pool", host="p")))
    c.send(make.request("hot", prompt=64, matches=[("pool-p", 2, 0)], match_key=7))
    past = c.conductor.history
    assert [(hot.key, hot.uses, hot.blocks) for hot in past.hottest(5)] == [(7, 1, 2)]
    for name in ("a", "b", "c", "a"):
        c.send(make.request(name, prompt=64))
    assert [each.request_id for each in past] == ["b", "c", "a"]
    assert past.num_forgotten == 1
    assert not past.hottest(5)
    assert past.find("hot") is None


def test_a_requests_path_and_end_are_remembered(pair, make):
    c = pair(ttft_slo_s=1.0)
    c.send(make.request("r", prompt=64))
    serve(c.after(0.5), "r", ttft_s=0.6, tbt_s=0.02)
    known = c.conductor.history.find("r")
    assert [(mark.phase, mark.node_id) for mark in known.marks][:3] == [
        ("prefill_started", "p"),
        ("prefill_ended", "p"),
        ("decode_joined", "d"),
    ]
    assert (known.prefill, known.decode, known.outcome, known.ttft_s) == ("p", "d", "finished", 0.6)


def test_a_request_that_was_admitted_and_lost_its_place_later_is_not_told_as_turned_away_by_the_rule(pair, make):
    c = pair(ttft_slo_s=1.0)
    c.send(make.request("r", prompt=64))
    assert isinstance(c.send(make.request("r", prompt=3000, attempt=1))[0], Reject)
    found = row(c, {"cluster": {"ttft": "1s"}})
    assert (found.now_admitted, found.stay_admitted, found.unmeasured) == (0, 1, 1)


def test_the_flow_counts_by_slice_and_forgets_what_is_old(pair, make):
    c = pair(ttft_slo_s=1.0)
    c.send(make.request("r", prompt=160))
    serve(c, "r", ttft_s=0.25, tbt_s=0.01)
    c.send(make.request("s", prompt=3000))
    c.send(make.request("t", prompt=64, model="named-by-a-client"))
    (now,) = c.conductor.history.traffic.slices()
    flow = now.flows["m"]
    assert (flow.arrived, dict(flow.rejected), dict(flow.ended)) == (2, {"ttft": 1}, {"finished": 1})
    assert (flow.prompt_tokens, flow.cached_tokens, flow.generated) == (160, 16, 8)
    assert flow.attained == {
        ("", "ttft", "met"): 1,
        ("", "all", "met"): 1,
        ("", "ttft", "rejected"): 1,
        ("", "all", "rejected"): 1,
    }
    assert set(now.flows) == {"m", ""}  # names that clients choose are not kept
    c.after(1000).send(ObjectivesChanged(2, record_text(parse_record({}))))
    assert not list(c.conductor.history.traffic.slices())
