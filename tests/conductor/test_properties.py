"""Properties that hold for every cluster and every history."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.decision_log.codec import decision_from_json, event_from_json, to_json
from conductor.policy import Conductor, PolicyConfig
from conductor.policy.costs import ModelCosts
from conductor.policy.decisions import Copy, Place, Reject
from conductor.policy.events import (
    CopyFinished,
    DecodeSample,
    Held,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    PoolMatch,
    PoolMatches,
    PrefillSample,
    Progress,
    RequestArrived,
    RequestCompleted,
    Tick,
    TransferSample,
)
from conductor.policy.nodes import PREFILL_CANDIDATE
from conductor.policy.placement.prefill import Prefixes, score_candidates
from conductor.policy.state import ClusterState, PlacementContext

BLOCK = 16
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1", "both-0")
OTHERS = ("prefill-0.n", "decode-0.n")  # of another model
POOLS = ("pool-0", "pool-1")
CAPACITY = 2048


def view(node_id, incarnation):
    name, _, model = node_id.partition(".")
    role = {"prefill": "prefill", "decode": "decode", "both": "aggregated", "pool": "pool"}[name.split("-")[0]]
    pool = "" if role == "pool" else f"pool-{name[-1]}"
    return NodeView(node_id, role, incarnation, "h", pool, model or "m", BLOCK, CAPACITY, 4096, 4, 1000)


names = st.sampled_from([f"r{i}" for i in range(12)])
phases = st.sampled_from(["prefill_started", "prefill_ended", "decode_joined", "ended"])
seconds = st.floats(1e-6, 10, allow_nan=False)
attempts = st.integers(0, 2)
reports = st.builds(
    NodeReported,
    st.sampled_from(WORKERS),
    st.integers(0, 9).map(lambda n: n == 0),
    st.lists(st.builds(Held, names, attempts, st.integers(0, 200), st.integers(0, 500)), max_size=3).map(tuple),
    st.lists(st.builds(Progress, names, attempts, phases), max_size=3).map(tuple),
    st.lists(st.builds(PrefillSample, st.integers(0, 2000), st.integers(0, 2000), seconds), max_size=2).map(tuple),
    st.lists(st.builds(DecodeSample, st.integers(0, 8), st.integers(0, 9000), seconds), max_size=2).map(tuple),
    st.lists(
        st.builds(TransferSample, st.integers(0, 1 << 24), seconds, st.sampled_from(["load", "push", "copy"])),
        max_size=2,
    ).map(tuple),
)
arrivals = st.builds(
    RequestArrived,
    names,
    attempts,
    st.just("f"),
    st.just("m"),
    st.integers(1, 2000),
    st.integers(1, 600),
    st.dictionaries(st.sampled_from(POOLS), st.integers(1, 125)).map(
        lambda found: PoolMatches.of(*(PoolMatch(pool, n, n // 3, n % 4) for pool, n in found.items()))
    ),
    st.integers(0, 3),
    excluded=st.lists(st.sampled_from(WORKERS), max_size=1).map(tuple),
    tenant=st.just("t"),
    in_workers=st.dictionaries(st.sampled_from(WORKERS), st.integers(1, 125)).map(
        lambda found: PoolMatches.of(*(PoolMatch(worker, n) for worker, n in found.items()))
    ),
)
others = st.one_of(
    st.builds(RequestCompleted, names, attempts, st.sampled_from(["finished", "retry"]), seconds, seconds),
    st.builds(lambda n, i: NodeJoined(view(n, i)), st.sampled_from(WORKERS + POOLS), st.integers(1, 2)),
    st.builds(NodeLost, st.sampled_from(WORKERS + POOLS), st.integers(1, 2)),
    st.builds(CopyFinished, st.sampled_from(POOLS), st.sampled_from(POOLS), st.integers(0, 3), st.just(100), seconds),
    st.just(Tick()),
)
histories = st.lists(
    st.tuples(st.integers(0, 3_000_000_000), st.one_of(arrivals, arrivals, reports, others)), min_size=1, max_size=60
)

others_names = st.sampled_from([f"n{i}" for i in range(4)])
of_another_model = st.one_of(
    st.builds(
        RequestArrived, others_names, attempts, st.just("f"), st.just("n"), st.integers(1, 2000), st.integers(1, 600)
    ),
    st.builds(
        NodeReported,
        st.sampled_from(OTHERS),
        held=st.lists(st.builds(Held, others_names, attempts, st.integers(0, 200)), max_size=2).map(tuple),
        progress=st.lists(st.builds(Progress, others_names, attempts, phases), max_size=2).map(tuple),
        prefills=st.lists(st.builds(PrefillSample, st.integers(0, 2000), st.just(0), seconds), max_size=2).map(tuple),
    ),
    st.builds(RequestCompleted, others_names, attempts, st.just("finished"), seconds, seconds),
    st.builds(lambda n, i: NodeJoined(view(n, i)), st.sampled_from(OTHERS), st.integers(1, 2)),
    st.builds(NodeLost, st.sampled_from(OTHERS), st.integers(1, 2)),
)


def start(**config):
    conductor = Conductor(PolicyConfig(**{"explain": 8, "attained_share": 0.0, "report_timeout_s": 0.0, **config}))
    for node_id in POOLS + WORKERS + OTHERS:
        conductor.on_event(0, NodeJoined(view(node_id, 1)))
    return conductor


def run(conductor, history):
    now_ns = 0
    for gap_ns, event in history:
        now_ns += gap_ns
        yield now_ns, event, conductor.on_event(now_ns, event)


@settings(max_examples=150, deadline=None)
@given(histories)
def test_any_history_leaves_claims_that_fit_together_and_answers_that_hold(history):
    conductor = start()
    for now_ns, event, decisions in run(conductor, history):
        assert conductor.validate()[0] == []
        json.dumps(conductor.snapshot(0))
        if isinstance(event, RequestArrived):
            answer = decisions[0]
            assert isinstance(answer, Place | Reject)
            assert answer.request_id == event.request_id
            if isinstance(answer, Place):
                check_place(event, answer, conductor._state.seen_share.has_others(now_ns))
            else:
                assert answer.reason in ("no_nodes", "too_long", "queue")
                assert answer.message


def check_place(event, place, spreads):
    assert place.prefill in WORKERS
    assert place.prefill not in event.excluded
    assert place.decode not in event.excluded
    assert (place.decode == "") == (place.prefill.startswith("both") or event.max_new_tokens == 1)
    assert place.reuse_blocks * BLOCK < event.prompt_tokens
    covered = 0
    for holder in place.holders:
        assert holder.first_block == covered
        assert holder.num_blocks > 0
        covered += holder.num_blocks
        held = {match.pool: match for match in event.matches}[holder.pool]
        assert held.blocks >= covered
        assert holder.ssd_blocks <= min(held.ssd_blocks, holder.num_blocks)
    memory = {match.pool: match.blocks for match in event.in_workers}
    assert place.local_blocks == min(memory.get(place.prefill, 0), (event.prompt_tokens - 1) // BLOCK)
    assert max(covered, place.local_blocks) == place.reuse_blocks
    chosen = next(score for score in place.considered.prefill if score.node_id == place.prefill)
    totals = [(s.transfer_s + s.queue_s + s.prefill_s, s.node_id) for s in place.considered.prefill]
    total = chosen.transfer_s + chosen.queue_s + chosen.prefill_s
    # Requests are spread over about equally fast nodes once nodes report requests of other conductors.
    assert total <= 1.05 * min(totals)[0] + 1e-12
    assert spreads or (total, chosen.node_id) == min(totals)


@settings(max_examples=80, deadline=None)
@given(histories, st.lists(st.tuples(st.integers(0, 59), of_another_model), min_size=1, max_size=30))
def test_what_happens_to_another_model_changes_no_decision(history, elsewhere):
    config = {"ttft_slo_s": 20.0, "tbt_slo_s": 1.0}
    alone = [decisions for _, _, decisions in run(start(**config), history)]
    conductor, beside, now_ns = start(**config), [], 0
    for index, (gap_ns, event) in enumerate(history):
        now_ns += gap_ns
        for at, other in elsewhere:
            if at % len(history) == index:
                for decision in conductor.on_event(now_ns, other):
                    assert not isinstance(decision, Place) or {decision.prefill, decision.decode} <= {*OTHERS, ""}
        decisions = conductor.on_event(now_ns, event)
        if isinstance(event, Tick):  # which tells of whatever is an orphan by now
            decisions = [d for d in decisions if not d.request_id.startswith("n")]
        beside.append(decisions)
    assert beside == alone
    assert conductor.validate()[0] == []


@settings(max_examples=80, deadline=None)
@given(histories)
def test_with_admission_on_no_ledger_is_ever_over_committed(history):
    conductor = start(ttft_slo_s=1e6)
    fresh = ((gap, event) for gap, event in history if not isinstance(event, NodeReported) or not event.held)
    for now_ns, _, decisions in run(conductor, fresh):
        nodes = conductor.snapshot(now_ns)["nodes"]
        assert all(node["committed_tokens"] <= CAPACITY for node in nodes.values() if node["role"] != "pool")
        assert all(d.retry_after_s >= 1 for d in decisions if isinstance(d, Reject) and d.reason == "decode_capacity")


@settings(max_examples=60, deadline=None)
@given(histories)
def test_the_same_history_gives_the_same_decisions_even_through_json(history):
    config = {"ttft_slo_s": 20.0, "report_timeout_s": 7.0}
    first = list(run(start(**config), history))
    again = start(**config)
    for now_ns, event, decisions in first:
        restored = event_from_json(json.loads(json.dumps(to_json(event))))
        assert restored == event
        assert again.on_event(now_ns, restored) == decisions
        assert [decision_from_json(json.loads(json.dumps(to_json(d)))) for d in decisions] == decisions


@settings(max_examples=40, deadline=None)
@given(histories)
def test_when_all_is_completed_and_all_let_go_nothing_is_left(history):
    conductor = start()
    copies, now_ns = [], 0
    for now_ns, _, decisions in run(conductor, history):  # noqa: B007
        copies += [d for d in decisions if isinstance(d, Copy)]
    for name in WORKERS:
        conductor.on_event(now_ns, NodeReported(name))
    for i in range(12):
        for attempt in range(3):
            conductor.on_event(now_ns, RequestCompleted(f"r{i}", attempt, "cancelled"))
    for copy in copies:
        conductor.on_event(now_ns, CopyFinished(copy.source, copy.target, copy.match_key, 0, 0.1))
    assert set(conductor.validate()[1].values()) == {0}


@given(
    own=st.lists(st.integers(0, 100), min_size=1, max_size=6),
    local=st.one_of(st.just([0] * 6), st.lists(st.integers(0, 100), min_size=6, max_size=6)),
    best=st.integers(0, 100),
    on_ssd=st.integers(0, 100),
    queues=st.lists(st.floats(0, 10), min_size=6, max_size=6),
    threshold=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    sends=st.integers(0, 4),
    slowdowns=st.lists(st.floats(0.2, 5.0), min_size=6, max_size=6),
    most=st.sampled_from([0, 100, 1000, 1 << 20]),
    window=st.sampled_from([(0, 0), (8, 700), (1000, 50)]),
)
def test_the_vectorised_algorithm_is_the_papers_loop(
    own, local, best, on_ssd, queues, threshold, sends, slowdowns, most, window
):
    def nbytes(blocks: int) -> float:
        return blocks * 1000.0 + min(blocks, window[0]) * window[1]

    best = max([best, *own])
    prompt = 101 * BLOCK
    state = ClusterState(PolicyConfig(balancing_threshold=threshold))
    costs, transfers = ModelCosts(), state.transfers
    costs.slowdowns.make_room(6)
    costs.slowdowns.factors[0] = slowdowns
    costs.prefill_most = float(most), 2.0 * most
    model: Any = SimpleNamespace(block_tokens=BLOCK, kv_sizes=(1000, *window))
    context = PlacementContext(0, state, RequestArrived("r", 0, "f", "m", prompt, 8), model, costs, None)
    candidates = np.zeros(len(own), PREFILL_CANDIDATE)
    candidates["slot"], candidates["own_blocks"] = np.arange(len(own))[::-1], own
    candidates["local_blocks"] = local[: len(own)]
    candidates["own_ssd_blocks"] = np.minimum(own, on_ssd // 2)
    prefixes = Prefixes(candidates, best, min(best, on_ssd), "pool", sends)
    found = score_candidates(context, prefixes, np.array(queues[: len(own)]))
    for i, in_pool in enumerate(own):
        prefix, loaded = max(in_pool, local[i]), max(0, in_pool - local[i])
        ratio = best / prefix if prefix else (float("inf") if best else 0.0)
        reuse, transfer_s, ssd = prefix, transfers.load_s(nbytes(loaded)), min(in_pool, on_ssd // 2)
        if ratio > threshold:
            reuse, missing = best, best - prefix
            ssd += min(missing, on_ssd)
            transfer_s += transfers.fetch_s(nbytes(missing), sends)
        transfer_s += transfers.ssd_read_s(nbytes(ssd))
        prefill_s = costs.prefill_cost_s(prompt - reuse * BLOCK, reuse * BLOCK, len(own) - 1 - i)
        assert found.candidates[["reuse_blocks", "fetches"]][i].tolist() == (reuse, ratio > threshold)
        assert found.prefill_s[i] == prefill_s
        total_s = found.transfer_s[i] + found.queue_s[i] + found.prefill_s[i]
        assert total_s == pytest.approx(transfer_s + queues[i] + prefill_s, rel=1e-12)
