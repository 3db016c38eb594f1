"""Modes of admission: the load they use, shadow mode, Retry-After, and the later evaluation of rejections."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conductor.policy.admission import LONGEST_RETRY_S, retry_after_s
from conductor.policy.admission_evaluation import MAX_OPEN_CASES, interval
from conductor.policy.decisions import Place, Reject
from conductor.policy.events import NS, DecodeAsked, DecodeSample, Held, NodeLost, NodeReported, RequestCompleted, Tick
from conductor.policy.role_plan import LoadSeries


@pytest.fixture
def pair(cluster, make):
    """One prefill and one decode node with known costs: 1 ms per prompt token, 10 ms per sequence and step."""

    def factory(**config):
        c = cluster(make.node("p", "prefill"), make.node("d", "decode"), **config)
        c.learn("p", per_token_s=1e-3, step_s=0.01)
        return c

    return factory


def decoding(c, make, *names, prompt=64, new=200):
    for name in names:
        assert isinstance(c.send(make.request(name, prompt=prompt, new=new, generated=1))[0], Place)
        c.progress("p", "prefill_started", name)
        c.progress("p", "prefill_ended", name)
        c.progress("d", "decode_joined", name)


def judged(c, model="m"):
    return {(reason, verdict): n for (_, reason, verdict), n in c.conductor.evaluation.rejections.items()}


def reason(decisions):
    return decisions[0].reason if isinstance(decisions[0], Reject) else None


def test_the_load_of_now_does_not_see_whose_prefill_will_have_ended(pair, make):
    reasons = {}
    for mode in ("early", "predicted", "predicted-uniform"):
        c = pair(tbt_slo_s=0.025, admission_mode=mode)
        for i in range(2):  # on their way: nothing decodes yet
            c.send(make.request(f"r{i}", prompt=64, new=1000))
        reasons[mode] = reason(c.send(make.request("s", prompt=64)))
    assert reasons == {"early": None, "predicted": "tbt", "predicted-uniform": "tbt"}


def test_learned_lengths_count_who_is_admitted_and_joins_later_than_the_one_judged(cluster, make):
    reasons = {}
    for mode in ("predicted", "predicted-uniform"):
        nodes = [make.node(name, "prefill") for name in ("p", "q", "r")]
        c = cluster(*nodes, make.node("d", "decode"), tbt_slo_s=0.025, admission_mode=mode)
        c.learn("p", per_token_s=1e-3, step_s=0.01)
        for name in ("long", "longer"):  # prompts of a second and more, each on a node of its own
            assert isinstance(c.send(make.request(name, prompt=1000, new=200))[0], Place)
        reasons[mode] = reason(c.send(make.request("short", prompt=64, new=200)))
    assert reasons == {"predicted": "tbt", "predicted-uniform": None}


def test_the_load_of_now_counts_who_will_have_ended(pair, make):
    reasons = {}
    for mode in ("early", "predicted"):
        c = pair(tbt_slo_s=0.025, admission_mode=mode)
        decoding(c, make, "a", "b", new=10)  # they end within two seconds; the prompt takes three
        reasons[mode] = reason(c.send(make.request("s", prompt=3000)))
    assert reasons == {"early": "tbt", "predicted": None}


def test_learned_lengths_tell_who_will_be_gone_where_a_usual_time_for_all_does_not(pair, make):
    reasons = {}
    for mode in ("predicted", "predicted-uniform"):
        c = pair(tbt_slo_s=0.025, admission_mode=mode)
        for i in range(60):  # long prompts get short answers, short ones long answers
            for name, prompt, generated, took_s in (("l", 300, 3, 0.1), ("s", 64, 900, 9.0)):
                c.send(make.request(f"{name}{i}", prompt=prompt, new=1000, generated=0, tbt_objective_s=9.0))
                c.progress("p", "prefill_started", f"{name}{i}")
                c.progress("p", "prefill_ended", f"{name}{i}")
                c.progress("d", "decode_joined", f"{name}{i}")
                c.after(took_s).progress("d", "ended", f"{name}{i}")
                c.send(RequestCompleted(f"{name}{i}", 0, "finished", 0.1, 0.01, generated))
        decoding(c, make, "x", "y", prompt=300, new=700)
        reasons[mode] = reason(c.after(0.02).send(make.request("z", prompt=2000)))
    assert reasons == {"predicted": None, "predicted-uniform": "tbt"}


@pytest.mark.parametrize("config", [{"admission_mode": "none"}, {"admission": "off"}, {"admission": "shadow"}])
def test_where_nothing_is_enforced_only_the_bound_on_waiting_rejects(pair, make, config):
    c = pair(ttft_slo_s=0.1, max_queue_s=2.0, **config)
    reasons = [reason(c.send(make.request(f"r{i}", prompt=1000, new=8))) for i in range(4)]
    assert reasons == [None, None, None, "queue"]


def test_shadow_counts_what_it_would_have_rejected_and_measures_whether_that_had_been_right(pair, make):
    c = pair(ttft_slo_s=0.5, admission="shadow")
    for name, ttft_s in (("a", 0.4), ("b", 2.0)):
        assert isinstance(c.send(make.request(name, prompt=1000))[0], Place)
        c.send(RequestCompleted(name, 0, "finished", ttft_s, 0.01, 5))
    told = {(why, rejected, unwanted) for _, why, rejected, unwanted in c.conductor.rejections()}
    assert ("ttft", 0, 2) in told
    assert judged(c) == {("ttft", "false"): 1, ("ttft", "right"): 1}
    assert c.conductor.evaluation.false_share("m")[0] == 0.5
    assert not c.conductor.evaluation.admissions


def test_in_load_mode_decode_load_is_judged_once_the_prefill_has_ended(pair, make):
    c = pair(tbt_slo_s=0.025, admission_mode="load")
    decoding(c, make, "a", "b")
    place = c.send(make.request("s", prompt=64))[0]
    assert isinstance(place, Place)
    assert place.asks_again
    c.progress("p", "prefill_ended", "s")
    rejects = c.send(DecodeAsked("s", 0))
    assert [(r.reason, r.after_prefill) for r in rejects] == [("tbt", True)]
    assert rejects[0].retry_after_s >= 1
    c.holds("d", Held("s", 0, 64))  # the worker is tidying up: that does not bring the request back
    assert c.counts["requests"] == 2
    assert c.send(DecodeAsked("s", 0)) == []


def test_in_load_mode_what_has_room_goes_on_and_what_the_client_has_seen_is_not_asked_about(pair, make):
    c = pair(tbt_slo_s=0.025, admission_mode="load")
    decoding(c, make, "a")
    assert c.send(make.request("s", prompt=64))[0].asks_again
    c.progress("p", "prefill_ended", "s")
    assert c.send(DecodeAsked("s", 0)) == []
    c.progress("d", "decode_joined", "s")
    assert not c.send(make.request("t", attempt=1, prompt=64, generated=3))[0].asks_again
    assert c.send(DecodeAsked("t", 1)) == []
    assert c.send(DecodeAsked("nobody", 0)) == []


@pytest.mark.parametrize("mode", ["none", "load", "early", "predicted-uniform", "predicted"])
def test_no_mode_rejects_a_request_whose_client_has_tokens(pair, make, mode):
    c = pair(ttft_slo_s=0.01, tbt_slo_s=1e-6, max_queue_s=0.1, admission_mode=mode)
    for i in range(4):
        assert isinstance(c.send(make.request(f"r{i}", attempt=1, prompt=3000, new=900, generated=1))[0], Place)
        assert c.send(DecodeAsked(f"r{i}", 1)) == []


@pytest.mark.parametrize("objective_s", [float("nan"), float("inf"), -1.0, 0.0, 1e300, 5e-324])
def test_absurd_objectives_break_nothing(pair, make, objective_s):
    c = pair()
    for name in ("a", "b"):
        got = c.send(make.request(name, prompt=300, ttft_objective_s=objective_s, tbt_objective_s=objective_s))[0]
        assert isinstance(got, Place) or 1 <= got.retry_after_s <= LONGEST_RETRY_S
    c.after(500).send(Tick())
    c.conductor.snapshot(c.now_ns)


def test_clocks_that_jump_break_nothing(pair, make):
    c = pair(ttft_slo_s=5.0, tbt_slo_s=0.1)
    decoding(c, make, "a", "b")
    for seconds in (-900, 10**9, -(10**8)):
        c.after(seconds).send(Tick())
        assert isinstance(c.send(make.request(f"r{seconds}", prompt=64))[0], Place | Reject)
        c.send(RequestCompleted(f"r{seconds}", 0, "finished", 0.1, 0.01, 9))
    assert c.conductor.validate()[0] == []


@given(st.text(max_size=20), st.integers(0, 9), st.floats())
def test_retry_after_is_whole_bounded_never_too_soon_and_always_the_same(request_id, attempt, wait_s):
    found = retry_after_s(request_id, attempt, wait_s)
    assert found == int(found)
    assert max(1, min(LONGEST_RETRY_S, wait_s if wait_s == wait_s else 1)) <= found <= LONGEST_RETRY_S
    assert found == retry_after_s(request_id, attempt, wait_s)


def test_clients_that_were_rejected_together_do_not_come_back_together():
    found = [retry_after_s(f"request-{i}", 0, 20.0) for i in range(1000)]
    assert {20.0 + later for later in range(11)} == set(found)
    assert max(found.count(seconds) for seconds in set(found)) < 150


def test_a_rejection_is_false_in_hindsight_where_the_queue_was_shorter_than_predicted(pair, make):
    c = pair(ttft_slo_s=1.5)
    c.send(make.request("r", prompt=1400, new=8))
    assert reason(c.send(make.request("s", prompt=1000, new=8))) == "ttft"
    assert len(c.conductor.evaluation) == 1
    c.after(0.1).progress("p", "prefill_ended", "r")
    assert judged(c) == {("ttft", "false"): 1}
    assert len(c.conductor.evaluation) == 0


def test_a_rejection_is_right_in_hindsight_once_its_objective_has_passed(pair, make):
    c = pair(ttft_slo_s=1.5)
    c.send(make.request("r", prompt=1400, new=8))
    assert reason(c.send(make.request("s", prompt=1000, new=8))) == "ttft"
    c.after(1.0).send(Tick())
    assert judged(c) == {("ttft", "right"): 1}


@pytest.mark.parametrize(("step_s", "verdict"), [(0.01, "false"), (0.05, "right")])
def test_a_rejection_for_tbt_is_judged_by_the_steps_that_came_and_can_have(pair, make, step_s, verdict):
    c = pair(tbt_slo_s=0.025)
    decoding(c, make, "a", "b")
    assert reason(c.send(make.request("s", prompt=64))) == "tbt"
    for _ in range(8):
        steps = tuple(DecodeSample(1, 64, seconds) for seconds in (step_s, math.nan, -step_s, 1e9))
        c.after(1.0).send(NodeReported("d", held=(Held("a", 0), Held("b", 0)), decodes=steps))
        c.send(Tick())
    assert judged(c) == {("tbt", verdict): 1}


def test_where_the_node_was_lost_hindsight_does_not_know(pair, make):
    c = pair(tbt_slo_s=0.025)
    decoding(c, make, "a", "b")
    assert reason(c.send(make.request("s", prompt=64))) == "tbt"
    c.send(NodeLost("d", 1))
    assert judged(c) == {("tbt", "undecided"): 1}
    assert len(c.conductor.evaluation) == 0


def test_a_rejected_request_that_would_begin_to_decode_much_later_is_given_up(cluster, make):
    c = cluster(make.node("p", "prefill"), make.node("d", "decode"), tbt_slo_s=0.025, admission_mode="early")
    c.learn("p", per_token_s=0.1, step_s=0.01)
    decoding(c, make, "a", "b")
    assert reason(c.send(make.request("s", prompt=3000))) == "tbt"  # five minutes of prefill
    for _ in range(30):
        held = (Held("a", 0), Held("b", 0))
        c.after(5.0).send(NodeReported("d", held=held, decodes=(DecodeSample(1, 64, 0.01),)))
        c.send(Tick())
    assert judged(c) == {("tbt", "undecided"): 1}


def test_hindsight_watches_a_bounded_number_and_counts_the_others(pair, make):
    c = pair(ttft_slo_s=0.01)
    for i in range(MAX_OPEN_CASES + 10):
        c.send(make.request(f"r{i}", prompt=1000))
    assert len(c.conductor.evaluation) == MAX_OPEN_CASES
    assert judged(c) == {("ttft", "unwatched"): 10}
    c.after(200).send(Tick())
    assert len(c.conductor.evaluation) == 0


def test_an_admitted_request_that_missed_its_objective_is_a_false_accept(pair, make):
    c = pair(ttft_slo_s=5.0, tbt_slo_s=0.1)
    for name, ttft_s, tbt_s in (("a", 1.0, 0.01), ("b", 9.0, 0.01), ("c", 1.0, 0.5)):
        c.send(make.request(name, prompt=100))
        c.send(RequestCompleted(name, 0, "finished", ttft_s, tbt_s, 9))
    found = c.conductor.evaluation.admissions
    assert {what: n for (_, what), n in found.items()} == {"met": 1, "missed_ttft": 1, "missed_tbt": 1}


@given(st.integers(0, 500), st.integers(0, 500))
@example(0, 11)
@example(1, 0)
def test_an_interval_holds_the_share(hits, others):
    low, high = interval(hits, hits + others)
    assert 0 <= low <= (hits / (hits + others) if hits + others else 0.5) <= high <= 1


def test_a_margin_that_lets_nobody_in_gives_way_in_time(pair, make):
    c = pair(tbt_slo_s=0.014, attained_share=0.95)  # a step of one sequence takes 10 ms
    late = {"ttft_s": 0.1, "mean_tbt_s": 0.02, "generated": 10}
    number = 0
    while isinstance(c.after(1).send(make.request(f"r{number}", prompt=64))[0], Place):
        c.send(RequestCompleted(f"r{number}", 0, "finished", **late))
        number += 1
        assert number < 100
    waits = 0
    while reason(c.send(make.request(f"s{waits}", prompt=64))) == "tbt":
        c.after(10).send(Tick())
        waits += 1
        assert waits < 60


def test_loads_and_their_swing_are_told_for_models_with_objectives(pair, make):
    c = pair(ttft_slo_s=2.0, tbt_slo_s=0.1)
    for i in range(4):
        c.after(30).send(Tick())
        if i % 2:
            c.send(RequestCompleted(f"r{i - 1}", 0, "cancelled"))
        else:
            c.send(make.request(f"r{i}", prompt=1000, generated=1))
    c.send(Tick())
    loads = c.conductor.loads
    assert loads.prefill["m"].deviation > 0.05
    assert loads.decode["m"].last >= 0
    free = pair()
    free.send(Tick())
    assert not free.conductor.loads.prefill


def test_a_swing_of_nothing_is_nothing():
    swing = LoadSeries()
    for second in range(50):
        swing.add(second * NS, 0.7)
    assert (swing.last, swing.deviation) == (0.7, 0.0)


def test_reserving_for_usual_answers_lets_more_in_and_the_ledger_follows_what_is_held(cluster, make):
    counts = {}
    for overrun in (0.0, 0.05):
        c = cluster(overrun_probability=overrun)
        for i in range(100):
            c.send(make.request(f"w{i}", prompt=64, new=2000))
            c.send(RequestCompleted(f"w{i}", 0, "finished", 0.1, 0.01, 40))
        c.send(make.request("r", prompt=64, new=2000))
        counts[overrun] = c.counts["committed_tokens"]
    assert counts[0.0] == 2064
    assert counts[0.05] <= 128
    c.holds("decode-0", Held("r", 0, committed_tokens=1024))
    assert c.counts["committed_tokens"] == 1024


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("aggregated",)])
def test_whichever_node_decodes_begins_with_the_pages_of_usual_answers(cluster, make, roles):
    c = cluster(*(make.node(role, role) for role in roles), overrun_probability=0.05)
    assert c.send(make.request("first", prompt=64, new=2000))[0].reserve_tokens == 2064, "nothing is learned yet"
    for i in range(100):
        c.send(make.request(f"w{i}", prompt=64, new=2000))
        c.send(RequestCompleted(f"w{i}", 0, "finished", 0.1, 0.01, 40))
    assert 0 < c.send(make.request("r", prompt=64, new=2000))[0].reserve_tokens <= 128


def test_an_expected_length_raises_the_reservation_but_never_lowers_it(cluster, make):
    reserved = {}
    for expected in (0, 1, 700, 1 << 20):
        c = cluster(overrun_probability=0.05)
        for i in range(100):
            c.send(make.request(f"w{i}", prompt=64, new=2000))
            c.send(RequestCompleted(f"w{i}", 0, "finished", 0.1, 0.01, 40))
        c.send(make.request("r", prompt=64, new=2000, expected_tokens=expected))
        reserved[expected] = c.counts["committed_tokens"]
    assert reserved[1] == reserved[0] <= 128
    assert 764 <= reserved[700] <= 784
    assert reserved[1 << 20] == 2064, "the most that the client allows"


def test_endless_requests_count_as_constant_load_and_teach_nothing(cluster, make):
    c = cluster(admission_mode="predicted", tbt_slo_s=10.0)
    c.learn("prefill-0")
    c.send(make.request("e", prompt=64, new=2000, endless=True))
    lengths = c.conductor._state.lengths
    groups = len(lengths)
    c.send(RequestCompleted("e", 0, "cancelled", 0.1, 0.01, 5000))
    assert len(lengths) == groups == 0
