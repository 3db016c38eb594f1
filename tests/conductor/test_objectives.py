"""Which objectives a request has, how a record is written, and what is counted of them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.decision_log.codec import event_from_json, to_json
from conductor.errors import ObjectivesError
from conductor.policy.decisions import Place, Reject
from conductor.policy.events import NodeLost, NodeReported, ObjectivesChanged, Progress, RequestCompleted
from conductor.policy.objectives import (
    Objective,
    ObjectiveBook,
    Scope,
    SloClass,
    SloRecord,
    TenantSlo,
    digest,
    parse_record,
    record_from_text,
    record_text,
    record_to_plain,
)

RECORD = {
    "cluster": {"ttft": "10s", "tbt": "1s"},
    "models": {"m": {"ttft": "8s"}},
    "classes": {"chat": {"ttft": "4s", "tbt": "100ms p95"}, "batch": {"ttft": "off", "tbt": "off", "priority": 5}},
    "tenants": {"acme": {"ttft": "2s", "class": "chat"}, "slow": {"class": "batch"}},
}


def changed(c, record: dict, version: int = 1):
    return c.send(ObjectivesChanged(version, record_text(parse_record(record))))


def effective(
    record: dict, *, model="m", tenant="", slo_class="", header_ttft_s=0.0, header_tbt_s=0.0, unloaded=(0, 0)
):
    book = ObjectiveBook(parse_record(record))
    return book.resolve(model, tenant, slo_class).effective(header_ttft_s, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("asked", "bound_s", "source"),
    [
        ({"tenant": "acme", "header_ttft_s": 1.0}, 1.0, "header"),
        ({"tenant": "acme"}, 2.0, "tenant"),
        ({"tenant": "stranger", "slo_class": "chat"}, 4.0, "class"),
        ({"tenant": "stranger"}, 8.0, "model"),
        ({"model": "another"}, 10.0, "cluster"),
    ],
)
def test_the_nearest_scope_that_says_something_decides(asked, bound_s, source) -> None:
    found = effective(RECORD, **asked)
    assert (found.ttft_s, found.ttft_from) == (bound_s, source)


def test_each_objective_is_found_by_itself() -> None:
    found = effective(RECORD, tenant="acme")
    assert (found.ttft_from, found.tbt_from, found.tbt_s, found.tbt_percentile) == ("tenant", "class", 0.1, 95.0)


def test_off_at_a_nearer_scope_switches_a_farther_one_off() -> None:
    found = effective(RECORD, tenant="slow")
    assert (found.ttft_s, found.ttft_from, found.tbt_s, found.tbt_from) == (0.0, "class", 0.0, "class")


def test_nothing_said_is_nothing_to_meet() -> None:
    found = effective({})
    assert (found.ttft_s, found.tbt_s, found.ttft_from, found.tbt_from) == (0.0, 0.0, "none", "none")


@pytest.mark.parametrize(
    ("rule", "header_s", "bound_s", "source"),
    [
        ("any", 9.0, 9.0, "header"),
        ("any", 1.0, 1.0, "header"),
        ("tighten", 9.0, 2.0, "tenant"),
        ("tighten", 1.0, 1.0, "header"),
        ("ignore", 1.0, 2.0, "tenant"),
        (None, 9.0, 2.0, "tenant"),
        (None, 1.0, 1.0, "header"),
    ],
)
def test_the_record_says_what_a_header_may_do(rule, header_s, bound_s, source) -> None:
    for record in (RECORD | {"headers": rule}, RECORD | {"tenants": {"acme": {"ttft": "2s", "headers": rule}}}):
        found = effective(record, tenant="acme", header_ttft_s=header_s)
        assert (found.ttft_s, found.ttft_from) == (bound_s, source)


def test_an_operator_may_let_one_tenant_loosen_its_objectives() -> None:
    record = RECORD | {"tenants": {"acme": {"ttft": "2s", "headers": "any"}, "beta": {"ttft": "2s"}}}
    assert effective(record, tenant="acme", header_ttft_s=9.0).ttft_s == 9.0
    assert effective(record, tenant="beta", header_ttft_s=9.0).ttft_s == 2.0


def test_a_record_stored_before_the_default_changed_is_read_with_the_same_digest() -> None:
    for text in ('{"cluster":{"ttft":"2s"}}', '{"cluster":{"ttft":"2s"},"headers":"tighten"}'):
        assert record_text(record_from_text(text)) == text


def test_a_header_may_bound_what_nothing_else_does_even_where_it_may_only_tighten() -> None:
    assert effective({"headers": "tighten"}, header_ttft_s=3.0).ttft_s == 3.0


def test_a_multiple_follows_what_the_request_would_take_alone(cluster, make) -> None:
    c = cluster(explain=1)
    c.learn("prefill-0", per_token_s=1e-3)
    changed(c, {"cluster": {"ttft": "5x", "tbt": "3x"}})
    (short,) = c.send(make.request("a", prompt=100))
    (long,) = c.send(make.request("b", prompt=1000))
    assert short.considered.ttft_objective_s == pytest.approx(5 * 0.1, rel=0.1)
    assert long.considered.ttft_objective_s == pytest.approx(5 * 1.0, rel=0.1)
    assert short.considered.tbt_objective_s == pytest.approx(3 * 0.01, rel=0.1)


def test_a_multiple_counts_what_need_not_be_computed(cluster, make) -> None:
    c = cluster(explain=1)
    c.learn("prefill-0", per_token_s=1e-2)
    changed(c, {"cluster": {"ttft": "5x"}})
    (alone,) = c.send(make.request("a", prompt=1024))
    reusing = c.send(make.request("b", prompt=1024, matches=(("pool-0", 48),)))[0]
    assert reusing.considered.ttft_objective_s < alone.considered.ttft_objective_s / 2


def test_a_multiple_does_not_grow_with_the_queue(cluster, make) -> None:
    c = cluster(explain=1)
    c.learn("prefill-0", per_token_s=1e-3)
    changed(c, {"cluster": {"ttft": "4x"}})
    seen = [c.send(make.request(f"r{i}", prompt=1000, new=1))[0] for i in range(20)]
    assert isinstance(seen[0], Place)
    rejected = [one for one in seen if isinstance(one, Reject)]
    assert rejected
    assert {one.reason for one in rejected} == {"ttft"}
    assert rejected[-1].considered.ttft_objective_s == pytest.approx(seen[0].considered.ttft_objective_s, rel=0.01)


def test_an_unknown_class_is_refused_by_the_names_of_those_there_are(cluster, make) -> None:
    c = cluster()
    changed(c, RECORD)
    (refused,) = c.send(make.request(slo_class="gold"))
    assert isinstance(refused, Reject)
    assert (refused.reason, refused.retry_after_s) == ("unknown_class", 0.0)
    assert "'gold'" in refused.message
    assert "batch, chat" in refused.message


@pytest.mark.parametrize("named", ["chat", ""])
def test_a_class_that_its_tenant_may_not_use_is_refused_also_by_default(cluster, make, named: str) -> None:
    c = cluster()
    changed(c, RECORD | {"default_class": "chat", "tenants": {"slow": {"class": "batch"}}})
    (refused,) = c.send(make.request("a", slo_class=named, tenant="acme", allowed_classes=("batch", "gold")))
    assert isinstance(refused, Reject)
    assert (refused.reason, refused.retry_after_s) == ("denied_class", 0.0)
    assert "'chat'" in refused.message
    assert "batch, gold" in refused.message
    assert isinstance(c.send(make.request("b", slo_class="batch", tenant="acme", allowed_classes=("batch",)))[0], Place)
    assert isinstance(c.send(make.request("c", tenant="slow", allowed_classes=("batch",)))[0], Place)
    assert isinstance(c.send(make.request("d", slo_class=named, tenant="acme"))[0], Place)
    further = make.request("e", attempt=1, generated=3, slo_class=named, tenant="acme", allowed_classes=("batch",))
    assert isinstance(c.send(further)[0], Place)


def test_a_request_without_any_class_is_not_refused_for_it(cluster, make) -> None:
    c = cluster()
    assert isinstance(c.send(make.request(allowed_classes=("batch",)))[0], Place)


def test_a_class_that_goes_away_does_not_stop_a_request_that_has_tokens(cluster, make) -> None:
    c = cluster()
    changed(c, RECORD)
    assert isinstance(c.send(make.request(slo_class="chat"))[0], Place)
    changed(c, {}, version=2)
    assert isinstance(c.send(make.request(attempt=1, generated=3, slo_class="chat"))[0], Place)


def test_a_moved_request_is_held_to_what_it_came_with(cluster, make) -> None:
    c = cluster(explain=1)
    changed(c, {"cluster": {"ttft": "50s"}})
    assert c.send(make.request())[0].considered.ttft_objective_s == 50.0
    changed(c, {"cluster": {"ttft": "3s"}}, version=2)
    c.send(NodeLost("prefill-0", 1))
    assert c.send(make.request(attempt=1, generated=1))[0].considered.ttft_objective_s == 50.0


def test_a_change_holds_from_its_event_on(cluster, make) -> None:
    c = cluster()
    assert isinstance(c.send(make.request("a"))[0], Place)
    changed(c, {"cluster": {"ttft": "1ms"}})
    assert isinstance(c.send(make.request("b"))[0], Reject)
    assert c.conductor.slo.version == 1
    changed(c, {}, version=2)
    assert isinstance(c.send(make.request("c"))[0], Place)


def test_a_change_comes_back_from_json_as_it_was() -> None:
    event = ObjectivesChanged(7, record_text(parse_record(RECORD)))
    assert event_from_json(json.loads(json.dumps(to_json(event)))) == event


NUMBERS = st.integers(1, 10**9)
PERCENTILES = st.sampled_from([50.0, 90.0, 95.0, 99.9])
OBJECTIVES = st.none() | st.one_of(
    st.builds(lambda number, p: Objective(seconds=round(1e-6 * number, 9), percentile=p), NUMBERS, PERCENTILES),
    st.builds(lambda number, p: Objective(times=float(number), percentile=p), st.integers(1, 1000), PERCENTILES),
    st.builds(lambda p: Objective(percentile=p), PERCENTILES),
)
NAMES = st.sampled_from(["a", "b-1", "c.d_e"])


@st.composite
def records(draw) -> SloRecord:
    classes = draw(st.dictionaries(NAMES, st.builds(SloClass, OBJECTIVES, OBJECTIVES, st.integers(-1000, 1000))))
    named = st.sampled_from(["", *sorted(classes)])
    rules = st.sampled_from(["any", "tighten", "ignore"])
    tenant = st.builds(TenantSlo, OBJECTIVES, OBJECTIVES, named, st.none() | rules)
    scopes = st.builds(Scope, OBJECTIVES, OBJECTIVES)
    return SloRecord(
        draw(scopes),
        draw(st.dictionaries(NAMES, scopes)),
        classes,
        draw(st.dictionaries(NAMES, tenant)),
        draw(named),
        draw(st.none() | rules),
    )


@given(records())
def test_a_record_that_is_told_is_read_back_equal(record: SloRecord) -> None:
    assert parse_record(record_to_plain(record)) == record
    text = record_text(record)
    assert record_from_text(text) == record
    assert record_text(record_from_text(text)) == text
    assert digest(text) == digest(record_text(parse_record(json.loads(text))))


@pytest.mark.parametrize(
    ("value", "objective"),
    [
        ("2s", Objective(2.0)),
        ("300ms", Objective(0.3)),
        (0.25, Objective(0.25)),
        (3, Objective(3.0)),
        ("5x", Objective(times=5.0)),
        ("2.5x p99.5", Objective(times=2.5, percentile=99.5)),
        ("off", Objective()),
        (False, Objective()),
        (0, Objective()),
        (None, None),
    ],
)
def test_an_objective_may_be_written_so(value, objective) -> None:
    assert parse_record({"cluster": {"ttft": value}}).cluster.ttft == objective


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"cluster": {"ttft": "-2s"}}, "cluster.ttft"),
        ({"cluster": {"ttft": -2}}, "cluster.ttft"),
        ({"cluster": {"ttft": float("nan")}}, "cluster.ttft"),
        ({"cluster": {"ttft": float("inf")}}, "cluster.ttft"),
        ({"cluster": {"ttft": 1e30}}, "cluster.ttft"),
        ({"cluster": {"ttft": True}}, "cluster.ttft"),
        ({"cluster": {"ttft": "soon"}}, "300ms"),
        ({"cluster": {"ttft": "25h"}}, "cluster.ttft"),
        ({"cluster": {"ttft": "90000s"}}, "86400"),
        ({"cluster": {"tbt": "3601s"}}, "3600"),
        ({"cluster": {"tbt": "0.5x"}}, "no request is faster than unloaded"),
        ({"cluster": {"tbt": "5x p0"}}, "p1 to p99.99"),
        ({"cluster": {"tbt": ["1s"]}}, "cluster.tbt"),
        ({"cluster": 5}, "cluster is 5"),
        ({"cluster": {"tpot": "1s"}}, "unknown key 'tpot'"),
        ({"clases": {}}, "unknown key 'clases'"),
        ([], "the record is []"),
        ({"classes": {"a b": {}}}, "'a b' cannot be a name"),
        ({"classes": {"c": {"priority": 1.5}}}, "classes.c.priority"),
        ({"classes": {"c": {"priority": 1001}}}, "classes.c.priority"),
        ({"classes": {f"c{i}": {} for i in range(65)}}, "at most 64"),
        ({"tenants": {7: {}}}, "quote it"),
        ({"tenants": {"t": {"class": "gold"}}}, "tenants.t.class is 'gold'"),
        ({"default_class": "gold"}, "its classes are: none"),
        ({"headers": "loosen"}, "any, tighten, ignore"),
    ],
)
def test_what_cannot_be_is_refused_by_its_place(content, said) -> None:
    with pytest.raises(ObjectivesError) as caught:
        parse_record(content)
    assert said in str(caught.value)


def finish(c, request_id: str, *, ttft_s: float, tbt_s: float = 0.0, outcome: str = "finished") -> None:
    c.send(RequestCompleted(request_id, 0, outcome, ttft_s, tbt_s, 8))


def counted(rows) -> dict[tuple[str, ...], int]:
    return {tuple(labels.values()): count for labels, count in rows}


def test_requests_are_counted_by_class_and_by_what_became_of_their_objectives(cluster, make) -> None:
    c = cluster()
    changed(c, {"classes": {"chat": {"ttft": "20s", "tbt": "10s"}, "batch": {}}})
    for number, (ttft_s, tbt_s) in enumerate([(1.0, 1.0), (30.0, 1.0), (1.0, 11.0)]):
        c.send(make.request(f"r{number}", slo_class="chat"))
        finish(c, f"r{number}", ttft_s=ttft_s, tbt_s=tbt_s)
    c.send(make.request("f", slo_class="chat"))
    finish(c, "f", ttft_s=0.0, outcome="failed")
    c.send(make.request("b", slo_class="batch"))
    finish(c, "b", ttft_s=500.0, tbt_s=500.0)
    c.send(make.request("c", slo_class="chat", ttft_objective_s=1e-6))
    assert counted(c.conductor.attainment.by_class()) == {
        ("m", "chat", "ttft", "met"): 2,
        ("m", "chat", "ttft", "missed"): 1,
        ("m", "chat", "tbt", "met"): 2,
        ("m", "chat", "tbt", "missed"): 1,
        ("m", "chat", "all", "met"): 1,
        ("m", "chat", "all", "missed"): 2,
        **{("m", "chat", objective, "failed"): 1 for objective in ("ttft", "tbt", "all")},
        **{("m", "chat", objective, "rejected"): 1 for objective in ("ttft", "tbt", "all")},
    }


def test_a_cancelled_request_met_nothing_and_missed_nothing(cluster, make) -> None:
    c = cluster(ttft_slo_s=100.0)
    c.send(make.request())
    finish(c, "r", ttft_s=1.0, outcome="cancelled")
    assert counted(c.conductor.attainment.by_class()) == {}


def test_only_so_many_tenants_are_told_apart_and_those_of_the_record_always(cluster, make) -> None:
    c = cluster()
    changed(c, {"cluster": {"ttft": "100s"}, "tenants": {"acme": {}}})
    for number in range(100):
        tenant = "acme" if number == 99 else f"t{number}"
        c.send(make.request(f"r{number}", prompt=16, new=1, tenant=tenant))
        finish(c, f"r{number}", ttft_s=1.0)
        c.send(NodeReported("prefill-0", progress=(Progress(f"r{number}", 0, "ended"),)))
    told = counted(c.conductor.attainment.by_tenant())
    assert told["acme", "ttft", "met"] == 1
    assert told["other", "ttft", "met"] == 99 - 32
    assert len({tenant for tenant, _, _ in told}) == 34


def test_what_no_node_can_meet_is_named_with_what_the_quickest_takes(cluster) -> None:
    c = cluster()
    record = parse_record(
        {
            "cluster": {"ttft": "1ms", "tbt": "9ms"},
            "classes": {"ok": {"ttft": "1s", "tbt": "50ms"}, "relative": {"ttft": "1x"}},
            "tenants": {"t": {"ttft": "0.5ms"}},
            "models": {"absent": {"ttft": "1ms"}},
        }
    )
    assert c.conductor.unmeetable(record) == [], "nothing was measured yet"
    c.learn("prefill-0", per_token_s=1e-2, step_s=0.02)
    c.learn("decode-0", per_token_s=1e-2, step_s=0.02)
    found = c.conductor.unmeetable(record)
    assert [text.split(" is ")[0] for text in found] == ["cluster.ttft", "tenants.t.ttft", "cluster.tbt"]
    assert "model 'm'" in found[0]


def test_how_long_a_prompt_may_be_is_told_of_each_ttft(cluster) -> None:
    c = cluster()
    c.learn("prefill-0", per_token_s=1e-2)
    (said,) = c.conductor.longest_prompts(parse_record({"classes": {"chat": {"ttft": "5s", "tbt": "1s"}}}))
    tokens = int(said.split("up to ")[1].split()[0])
    assert 450 <= tokens <= 550
    assert said.endswith("of at most 4096")
