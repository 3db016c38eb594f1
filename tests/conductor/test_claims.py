"""Claims of placed requests, and their ends."""

import pytest

from conductor.policy.decisions import Place, ReleaseOrphan
from conductor.policy.events import FrontendLost, Held, NodeJoined, NodeLost, RequestCompleted, Tick

NOTHING = {"requests": 0, "committed_tokens": 0, "prefills": 0, "sends": 0, "copies": 0}


def test_the_peak_is_committed_in_whole_blocks(cluster, make):
    c = cluster()
    c.send(make.request(prompt=17, new=16))
    assert c.counts["committed_tokens"] == 48


def test_completion_releases_all(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(RequestCompleted("r", 0, "finished"))
    assert c.counts == NOTHING


def test_both_workers_letting_go_releases_all(cluster, make):
    c = cluster()
    c.send(make.request())
    c.progress("prefill-0", "ended")
    assert c.counts["committed_tokens"] == 320
    c.progress("decode-0", "ended")
    assert c.counts == NOTHING


def test_a_lost_frontend_releases_its_requests_and_no_other(cluster, make):
    c = cluster()
    frontend_id = make.request().frontend_id
    c.send(make.request())
    assert c.send(FrontendLost("another")) == []
    assert c.counts["requests"] == 1
    assert c.send(FrontendLost(frontend_id)) == [ReleaseOrphan("r", 0)]
    assert c.counts == NOTHING


def test_a_request_that_workers_hold_returns_after_a_false_loss_of_its_frontend(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(FrontendLost(make.request().frontend_id))
    c.holds("decode-0", Held("r", 0, committed_tokens=288))
    assert (c.counts["requests"], c.counts["committed_tokens"]) == (1, 288)
    c.holds("decode-0")
    assert c.counts == NOTHING


def test_a_lost_node_releases_what_it_held_and_nothing_else(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(NodeLost("decode-0", 1))
    assert (c.counts["committed_tokens"], c.counts["prefills"]) == (0, 1)
    c.send(NodeLost("prefill-0", 1))
    assert c.counts == NOTHING


def test_the_end_of_an_old_incarnation_does_not_touch_the_new_one(cluster, make):
    c = cluster()
    c.send(NodeJoined(make.node("decode-0", "decode", incarnation=2)))
    c.send(make.request())
    c.send(NodeLost("decode-0", 1))
    assert c.counts["committed_tokens"] == 320


def test_a_new_incarnation_has_nothing_of_the_old_one(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(NodeJoined(make.node("decode-0", "decode", incarnation=2)))
    assert c.counts["committed_tokens"] == 0


def test_a_new_attempt_replaces_the_claims_of_the_former(cluster, make):
    c = cluster()
    c.send(make.request())
    assert isinstance(c.send(make.request(attempt=1, excluded=("decode-0",)))[0], Place)
    assert c.counts["requests"] == 1
    c.send(RequestCompleted("r", 0, "retry"))
    assert c.counts["requests"] == 1
    c.send(RequestCompleted("r", 1, "finished"))
    assert c.counts == NOTHING


def test_asking_again_for_the_same_attempt_claims_once(cluster, make):
    c = cluster()
    first, second = c.send(make.request()), c.send(make.request())
    assert first == second
    assert c.counts["requests"] == 1


def test_progress_of_an_old_attempt_is_ignored(cluster, make):
    c = cluster()
    c.send(make.request(attempt=1))
    c.progress("decode-0", "ended", attempt=0)
    assert c.counts["committed_tokens"] == 320


def test_what_workers_hold_rebuilds_the_ledger_of_a_restarted_conductor(cluster):
    c = cluster()
    c.holds("prefill-0", Held("r", 0, remaining_prefill_tokens=500))
    c.holds("decode-0", Held("r", 0, committed_tokens=320), Held("s", 0, committed_tokens=160))
    assert (c.counts["requests"], c.counts["committed_tokens"], c.counts["prefills"]) == (2, 480, 1)
    c.holds("prefill-0")
    c.holds("decode-0")
    assert c.counts == NOTHING


def test_a_request_that_another_conductor_placed_is_counted_where_it_decodes_before_it_is_there(cluster):
    c = cluster()
    prefilling = Held(
        "r", 0, remaining_prefill_tokens=300, prompt_tokens=300, max_new_tokens=20, decode_node="decode-1"
    )
    c.holds("prefill-0", prefilling)
    assert (c.counts["prefills"], c.counts["committed_tokens"]) == (1, 320)
    c.holds("decode-1", Held("r", 0, committed_tokens=336, prompt_tokens=300, max_new_tokens=20))
    assert c.counts["committed_tokens"] == 336
    c.progress("prefill-0", "ended")
    assert (c.counts["prefills"], c.counts["committed_tokens"]) == (0, 336)
    c.progress("decode-1", "ended")
    assert c.counts == NOTHING


def test_a_request_of_another_conductor_whose_prefill_ends_alone_holds_nothing_more(cluster):
    c = cluster()
    c.holds("prefill-0", Held("r", 0, prompt_tokens=300, max_new_tokens=20, decode_node="decode-1"))
    c.progress("prefill-0", "ended")
    assert c.counts == NOTHING
    c.holds("decode-1", Held("r", 0, committed_tokens=336))  # its report was slower: it really has them
    assert c.counts["committed_tokens"] == 336


def test_a_request_of_another_conductor_whose_prefill_node_is_lost_holds_nothing_more(cluster):
    c = cluster()
    c.holds("prefill-0", Held("r", 0, prompt_tokens=300, max_new_tokens=20, decode_node="decode-1"))
    c.send(NodeLost("prefill-0", 1))
    assert c.counts == NOTHING


def test_a_request_of_another_conductor_that_its_decode_node_holds_outlives_its_prefill_node(cluster):
    c = cluster()
    c.holds("prefill-0", Held("r", 0, prompt_tokens=300, max_new_tokens=20, decode_node="decode-1"))
    c.holds("decode-1", Held("r", 0, committed_tokens=336))
    c.send(NodeLost("prefill-0", 1))
    assert c.counts["committed_tokens"] == 336


def test_a_request_that_has_not_reached_its_decode_node_ends_with_its_prefill_node_and_may_return(cluster, make):
    c = cluster()
    (placed,) = c.send(make.request())
    at_prefill = Held("r", 0, prompt_tokens=300, max_new_tokens=20, decode_node=placed.decode)
    c.holds(placed.prefill, at_prefill)
    c.send(NodeLost(placed.prefill, 1))
    assert c.counts == NOTHING
    c.send(NodeJoined(make.node(placed.prefill, "prefill")))  # only its stream was lost
    c.holds(placed.prefill, at_prefill)
    assert (c.counts["requests"], c.counts["committed_tokens"]) == (1, 320)
    c.holds(placed.decode, Held("r", 0, committed_tokens=320))
    c.progress(placed.prefill, "ended")
    assert (c.counts["requests"], c.counts["committed_tokens"]) == (1, 320)


def test_a_later_attempt_that_another_conductor_placed_takes_the_earlier_ones_place(cluster, make):
    c = cluster()
    c.send(make.request())
    assert c.counts["committed_tokens"] == 320
    c.holds("decode-1", Held("r", 1, committed_tokens=64))
    assert (c.counts["requests"], c.counts["committed_tokens"]) == (1, 64)
    c.send(RequestCompleted("r", 0, "retry"))
    assert c.counts["committed_tokens"] == 64


def test_a_worker_that_only_lost_its_stream_gets_its_claims_back(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(NodeLost("prefill-0", 1))
    c.send(NodeLost("decode-0", 1))
    c.send(NodeJoined(make.node("decode-0", "decode")))
    c.holds("decode-0", Held("r", 0, committed_tokens=320))
    assert c.counts["committed_tokens"] == 320


def test_a_request_whose_decode_node_was_lost_is_still_accounted_for(cluster, make):
    c = cluster(ttft_slo_s=100.0)
    (placed,) = c.send(make.request(tenant="t"))
    c.progress(placed.prefill, "prefill_started")
    c.progress(placed.prefill, "ended")
    c.send(NodeLost(placed.decode, 1))
    assert c.counts == NOTHING
    c.send(RequestCompleted("r", 0, "failed", generated=3))
    results = {labels["result"]: n for labels, n in c.conductor.attainment.by_class() if labels["objective"] == "all"}
    assert results == {"failed": 1}
    (account,) = (account for _, account, _ in c.conductor.tenants() if account.name == "t")
    assert account.used.generated_tokens == 3


@pytest.mark.parametrize("is_back", [False, True])
def test_what_was_charged_for_a_request_is_put_right_though_its_nodes_were_lost(cluster, make, is_back):
    c = cluster()
    c.send(make.request(tenant="t"))
    for name in ("prefill-0", "decode-0"):
        c.send(NodeLost(name, 1))
    if is_back:
        c.send(NodeJoined(make.node("decode-0", "decode")))
        c.holds("decode-0", Held("r", 0, committed_tokens=320))
    c.send(RequestCompleted("r", 0, "retry"))
    (account,) = (account for _, account, _ in c.conductor.tenants() if account.name == "t")
    assert account.finish_ns == 0


def test_a_request_that_ended_with_its_lost_node_is_not_revived_when_the_node_comes_back(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(NodeLost("prefill-0", 1))
    c.send(NodeLost("decode-0", 1))
    c.send(RequestCompleted("r", 0, "retry"))
    c.send(NodeJoined(make.node("decode-0", "decode")))
    c.holds("decode-0", Held("r", 0, committed_tokens=320))
    assert c.counts == NOTHING


def test_a_last_word_that_is_said_twice_counts_once(cluster, make):
    c = cluster(ttft_slo_s=100.0)
    c.send(make.request())
    for _ in range(2):
        c.send(RequestCompleted("r", 0, "finished", ttft_s=1.0, generated=9))
    assert {n for _, n in c.conductor.attainment.by_class()} == {1}
    assert c.conductor.snapshot(c.now_ns)["counters"]["completed_finished"] == 1


def test_a_completed_request_is_not_revived_while_a_worker_tidies_up(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(RequestCompleted("r", 0, "cancelled"))
    c.holds("decode-0", Held("r", 0, committed_tokens=320))
    assert c.counts == NOTHING
    c.after(40).send(Tick())
    c.holds("decode-0", Held("r", 0, committed_tokens=320))  # it really has them
    assert c.counts["committed_tokens"] == 320


def test_a_lost_end_report_is_made_up_for_by_the_next_held_list(cluster, make):
    c = cluster()
    c.send(make.request())
    c.holds("decode-0", Held("r", 0, committed_tokens=320))
    c.holds("decode-0")
    assert c.counts["committed_tokens"] == 0


def test_a_request_that_has_not_reached_its_worker_yet_keeps_its_claim(cluster, make):
    c = cluster()
    c.send(make.request())
    c.holds("decode-0")
    assert c.counts["committed_tokens"] == 320


def test_an_orphan_is_released_once_nobody_has_held_it_for_long(cluster, make):
    c = cluster(orphan_timeout_s=100)
    c.send(make.request())
    assert [c.after(33).send(Tick()) for _ in range(3)] == [[], [], []]
    c.holds("decode-0", Held("r", 0, committed_tokens=320))
    assert [c.after(33).send(Tick()) for _ in range(3)] == [[], [], []]
    assert c.after(2).send(Tick()) == [ReleaseOrphan("r", 0)]
    assert c.counts == NOTHING


def test_while_the_conductor_stood_still_no_request_becomes_an_orphan(cluster, make):
    c = cluster(orphan_timeout_s=100)
    c.send(make.request())
    assert c.after(40).send(Tick()) == []
    assert c.after(10_000).send(Tick()) == []
    c.holds("decode-0", Held("r", 0, committed_tokens=320))
    assert [c.after(33).send(Tick()) for _ in range(4)] == [[], [], [], [ReleaseOrphan("r", 0)]]


def test_that_the_conductor_stood_still_does_not_keep_an_orphan_for_ever(cluster, make):
    c = cluster(orphan_timeout_s=100)
    c.send(make.request())
    assert [c.after(seconds).send(Tick()) for seconds in (40, 10_000, 40)] == [[], [], []]
    assert c.after(20).send(Tick()) == [ReleaseOrphan("r", 0)]


def test_prediction_errors_are_measured_against_what_the_client_saw(cluster, make):
    c = cluster()
    predicted = c.send(make.request())[0].predicted_ttft_s
    c.progress("prefill-0", "ended")
    c.progress("decode-0", "ended")  # the workers' reports may come before the frontend's
    c.send(RequestCompleted("r", 0, "finished", ttft_s=predicted + 0.5))
    error = c.conductor.snapshot(c.now_ns)["models"]["m"]["prediction_error"]
    assert abs(error["ttft_s"] - 0.5) < 1e-9


def test_an_aggregated_node_that_reports_its_prefill_late_still_teaches_how_long_requests_decode(cluster, make):
    c = cluster(make.node("a", "aggregated"))
    c.learn("a", per_token_s=1e-3)
    c.send(make.request("r", prompt=1000))
    c.progress("a", "prefill_started", "r")
    c.after(5.0).progress("a", "prefill_ended", "r")
    c.progress("a", "ended", "r")
    assert 3.5 < c.conductor.snapshot(c.now_ns)["models"]["m"]["costs"]["decode_time_s"] < 4.5


def test_an_outcome_that_nobody_knows_counts_as_a_failure(cluster, make):
    c = cluster()
    c.send(make.request())
    c.send(RequestCompleted("r", 0, "exploded"))
    counters = c.conductor.snapshot(c.now_ns)["counters"]
    assert {name: n for name, n in counters.items() if name.startswith("completed_")} == {"completed_failed": 1}


def test_prefills_that_a_node_has_started_are_computed_one_after_the_other(cluster, make):
    c = cluster(max_queue_s=1e6)
    c.learn("prefill-0", per_token_s=1e-3)
    c.send(NodeLost("prefill-1", 1))

    def queue_s():
        return next(seconds for node, seconds, _ in c.conductor.loads_of_nodes() if node.node_id == "prefill-0")

    for name in ("a", "b", "c"):
        c.send(make.request(name, prompt=1000))
    total_s = queue_s()
    one_s = total_s / 3
    assert one_s == pytest.approx(1.0, rel=0.2)
    for name in ("a", "b", "c"):
        c.progress("prefill-0", "prefill_started", name)
    assert queue_s() == pytest.approx(total_s, rel=1e-3)
    c.after(0.5 * one_s)
    c.send(Tick())
    assert queue_s() == pytest.approx(2.5 * one_s, rel=1e-3)  # only the first one advances
    c.progress("prefill-0", "prefill_ended", "a")  # sooner than predicted: the next begins now
    assert queue_s() == pytest.approx(2 * one_s, rel=1e-3)
    c.after(0.5 * one_s)
    c.progress("prefill-0", "ended", "b")  # cancelled
    assert queue_s() == pytest.approx(one_s, rel=1e-3)
    c.after(0.25 * one_s)
    c.send(Tick())
    assert queue_s() == pytest.approx(0.75 * one_s, rel=1e-3)
