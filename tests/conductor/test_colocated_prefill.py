"""Prefilling on the decode node: only where that is sooner, and breaks the time between tokens of nobody."""

from __future__ import annotations

from typing import Any

import pytest

from conductor.policy.decisions import Place, Reject
from conductor.policy.events import Held, NodeReported, Progress, RequestCompleted

CHUNK = 512


def small(cluster: Any, make: Any, **config: Any) -> Any:
    """One prefill node with a second of work before a newcomer, two decode nodes; a token of prompt takes 1 ms."""
    nodes = [make.node(f"decode-{i}", "decode", chunk_tokens=CHUNK) for i in (0, 1)]
    config = {"colocated_prefill": "act", "explain": 4, **config}
    c = cluster(make.node("pool-0", "pool"), make.node("prefill-0", "prefill"), *nodes, **config)
    c.learn("prefill-0", per_token_s=1e-3)
    c.learn("decode-0", per_token_s=1e-3, step_s=0.01)
    return c


def busy(c: Any, make: Any, prompt: int = 1000) -> None:
    """The prefill node has work, of which decode-1 will have nothing."""
    (placed,) = c.send(make.request("first", prompt=prompt, new=8, generated=1, excluded=("decode-1",)))
    assert (placed.prefill, placed.decode) == ("prefill-0", "decode-0")


def decoding(c: Any, make: Any, **fields: Any) -> None:
    """Somebody decodes on decode-1, its prompt handed over."""
    (placed,) = c.send(make.request("old", prompt=64, new=2000, excluded=("decode-0",), **fields))
    assert (placed.prefill, placed.decode) == ("prefill-0", "decode-1")
    for phase in ("prefill_started", "prefill_ended", "ended"):
        c.progress("prefill-0", phase, "old")
    c.progress("decode-1", "decode_joined", "old")


def ask(c: Any, make: Any, name: str = "new", **fields: Any) -> Place:
    """A newcomer for whom decode-1 is the only decode node."""
    (placed,) = c.send(make.request(name, **{"prompt": 100, "new": 8, "excluded": ("decode-0",), **fields}))
    assert isinstance(placed, Place)
    return placed


def test_a_request_is_prefilled_on_its_idle_decode_node_where_the_prefill_node_is_busy(cluster: Any, make: Any) -> None:
    c = small(cluster, make)
    busy(c, make)
    placed = ask(c, make)
    assert (placed.prefill, placed.decode) == ("decode-1", "")
    score = placed.considered.colocated
    assert score is not None
    assert (score.is_better, score.node_id) == (True, "decode-1")
    assert placed.predicted_ttft_s == pytest.approx(0.1, rel=0.1)  # alone there: no step takes longer
    assert score.divided_s > 1.0
    assert placed.considered.prefill[0].node_id == "prefill-0"
    assert c.conductor.snapshot(c.now_ns)["counters"]["undivided_done"] == 1


def test_it_stands_in_the_ledger_of_the_decode_node_until_it_ends_there(cluster: Any, make: Any) -> None:
    c = small(cluster, make)
    busy(c, make)
    ask(c, make)
    node = c.conductor.snapshot(c.now_ns)["nodes"]["decode-1"]
    assert node["committed_tokens"] == 112  # whole blocks
    assert node["queue_s"] == pytest.approx(0.1, rel=0.1)
    for phase in ("prefill_started", "prefill_ended", "ended"):
        c.progress("decode-1", phase, "new")
    assert c.conductor.snapshot(c.now_ns)["nodes"]["decode-1"]["committed_tokens"] == 0
    c.send(RequestCompleted("new", 0, "finished", ttft_s=0.1, mean_tbt_s=0.01, generated=8))
    assert c.counts["requests"] == 1


def test_an_idle_prefill_node_keeps_its_work(cluster: Any, make: Any) -> None:
    placed = ask(small(cluster, make), make)
    assert (placed.prefill, placed.decode) == ("prefill-0", "decode-1")
    assert placed.considered.colocated is not None
    assert not placed.considered.colocated.is_better


@pytest.mark.parametrize(("objective_s", "node_id"), [(0.05, "prefill-0"), (1.0, "decode-1")])
def test_nobody_is_made_to_miss_the_objective_for_its_time_between_tokens(
    cluster: Any, make: Any, objective_s: float, node_id: str
) -> None:
    c = small(cluster, make)
    decoding(c, make, tbt_objective_s=objective_s)
    busy(c, make)
    placed = ask(c, make)
    assert placed.prefill == node_id
    score = placed.considered.colocated
    assert score is not None
    assert score.bound_s == pytest.approx(objective_s)
    assert score.step_s == pytest.approx(0.12, rel=0.1)  # its prompt's one chunk, and the step of two


def test_another_decode_node_does_it_where_the_least_loaded_one_may_not(cluster: Any, make: Any) -> None:
    c = small(cluster, make)
    for name, node_id, objective_s in (("strict", "decode-0", 0.05), ("a", "decode-1", 1.0), ("b", "decode-1", 1.0)):
        excluded = tuple({"decode-0", "decode-1"} - {node_id})
        c.send(make.request(name, prompt=64, new=2000, excluded=excluded, tbt_objective_s=objective_s))
        for phase in ("prefill_started", "prefill_ended", "ended"):
            c.progress("prefill-0", phase, name)
        c.progress(node_id, "decode_joined", name)
    c.send(make.request("first", prompt=4000, new=1))
    placed = ask(c, make, excluded=())
    assert [score.node_id for score in placed.considered.decode] == ["decode-0", "decode-1"]
    assert (placed.prefill, placed.decode) == ("decode-1", "")
    assert placed.considered.colocated is not None
    assert placed.considered.colocated.node_id == "decode-1"
    assert placed.predicted_tbt_s == pytest.approx(placed.considered.decode[1].tbt_s)


def test_of_decode_nodes_that_are_alike_the_one_whose_host_has_the_prefix_does_it(cluster: Any, make: Any) -> None:
    nodes = [make.node(f"decode-{i}", "decode", host=f"h{i}", chunk_tokens=CHUNK) for i in (0, 1)]
    pools = [make.node(f"pool-h{i}", "pool", host=f"h{i}") for i in (0, 1)]
    c = cluster(*pools, make.node("prefill-0", "prefill"), *nodes, colocated_prefill="act", explain=4)
    c.learn("prefill-0", per_token_s=1e-3)
    c.learn("decode-0", per_token_s=1e-3, step_s=0.01)
    c.send(make.request("first", prompt=4000, new=1))
    placed = ask(c, make, prompt=800, excluded=(), matches=(("pool-h1", 40),))
    assert (placed.prefill, placed.reuse_blocks, placed.holders[0].pool) == ("decode-1", 40, "pool-h1")


def test_its_own_objective_counts_too_where_others_decode(cluster: Any, make: Any) -> None:
    c = small(cluster, make)
    decoding(c, make)
    busy(c, make)
    placed = ask(c, make, tbt_objective_s=0.05)
    assert placed.decode == "decode-1"
    assert placed.considered.colocated.bound_s == pytest.approx(0.05)


@pytest.mark.parametrize(("prompt", "node_id"), [(20, "decode-1"), (300, "prefill-0")])
def test_without_objectives_a_step_takes_at_most_four_usual_ones(
    cluster: Any, make: Any, prompt: int, node_id: str
) -> None:
    c = small(cluster, make)
    decoding(c, make)
    busy(c, make)
    placed = ask(c, make, prompt=prompt)
    assert placed.prefill == node_id
    score = placed.considered.colocated
    assert score.is_better == (score.step_s <= score.bound_s) == (node_id == "decode-1")


def test_a_long_prompt_disturbs_by_no_more_than_a_chunk_at_a_time(cluster: Any, make: Any) -> None:
    c = small(cluster, make)
    decoding(c, make, tbt_objective_s=0.6)
    busy(c, make, prompt=3000)
    placed = ask(c, make, prompt=1500)
    assert placed.prefill == "decode-1"
    assert placed.considered.colocated.step_s == pytest.approx(0.512 + 0.02, rel=0.1)
    assert placed.predicted_ttft_s == pytest.approx(1.5 + 3 * 0.02, rel=0.1)  # a step for each of three chunks


def test_a_node_of_unknown_chunks_takes_one_prompt_at_a_time(cluster: Any, make: Any) -> None:
    nodes = make.node("pool-0", "pool"), make.node("prefill-0", "prefill"), make.node("decode-0", "decode")
    c = cluster(*nodes, colocated_prefill="act", explain=4)
    c.learn("prefill-0", per_token_s=1e-3)
    c.send(make.request("first", prompt=2000, new=1))
    (second,) = c.send(make.request("second", prompt=100, new=8))
    (third,) = c.send(make.request("third", prompt=100, new=8))
    assert (second.prefill, third.prefill) == ("decode-0", "prefill-0")


@pytest.mark.parametrize("trouble", ["drains", "is full", "is suspect", "is excluded"])
def test_a_decode_node_that_is_no_place_gets_no_prefill(cluster: Any, make: Any, trouble: str) -> None:
    c = small(cluster, make, report_timeout_s=5.0)
    busy(c, make, prompt=4000)
    if trouble == "drains":
        c.send(NodeReported("decode-1", draining=True))
    elif trouble == "is full":
        c.send(make.request("big", prompt=4000, new=64, generated=1, excluded=("decode-0",)))
    elif trouble == "is suspect":
        for _ in range(4):
            for node_id in ("pool-0", "prefill-0", "decode-0"):
                c.after(0.5).send(NodeReported(node_id))
    excluded = ("decode-0", "decode-1") if trouble == "is excluded" else ("decode-0",)
    for decision in c.send(make.request("new", prompt=100, new=100, excluded=excluded)):
        assert getattr(decision, "prefill", "") != "decode-1"


def test_advice_is_counted_and_told_and_changes_nothing(cluster: Any, make: Any) -> None:
    told, plain = small(cluster, make, colocated_prefill="advise"), small(cluster, make, colocated_prefill="off")
    for c in (told, plain):
        busy(c, make)
    advised, usual = ask(told, make), ask(plain, make)
    assert advised.considered.colocated is not None
    assert advised.considered.colocated.is_better
    assert usual.considered.colocated is None
    assert (advised.prefill, advised.decode, advised.predicted_ttft_s) == (
        usual.prefill,
        usual.decode,
        usual.predicted_ttft_s,
    )
    assert told.conductor.snapshot(told.now_ns)["counters"]["undivided_advised"] == 1


def test_a_conductor_that_did_not_place_it_learns_of_the_prefill_from_the_decode_node(cluster: Any, make: Any) -> None:
    c = small(cluster, make)
    held = Held("other", 0, 128, remaining_prefill_tokens=100, prompt_tokens=100, max_new_tokens=8)
    c.holds("decode-1", held)
    node = c.conductor.snapshot(c.now_ns)["nodes"]["decode-1"]
    assert node["queue_s"] == pytest.approx(0.1, rel=0.1)
    assert node["committed_tokens"] == 128
    c.send(NodeReported("decode-1", progress=(Progress("other", 0, "ended"),)))
    assert c.counts["requests"] == 0


def test_what_comes_of_weighing_it_is_counted_per_model_of_the_requests_that_are_placed(
    cluster: Any, make: Any
) -> None:
    c = small(cluster, make)
    busy(c, make, prompt=4000)
    ask(c, make)
    decoding(c, make)
    ask(c, make, name="slow", prompt=600)
    c.send(make.request("big", prompt=4000, new=64, generated=1, excluded=("decode-0",)))
    full = ask(c, make, name="full", prompt=200, generated=1)
    assert full.considered.colocated is not None
    assert full.considered.colocated.why_not == "no_room"
    (refused,) = c.send(make.request("late", prompt=16, new=8, ttft_objective_s=1e-9, excluded=("decode-0",)))
    assert isinstance(refused, Reject)
    assert list(c.conductor.colocated_outcomes()) == [
        ("m", "done", 1),
        ("m", "no_room", 2),
        ("m", "not_sooner", 1),
        ("m", "slows_others", 2),
    ]
    calm = small(cluster, make, colocated_prefill="advise")
    busy(calm, make)
    ask(calm, make)
    assert list(calm.conductor.colocated_outcomes()) == [("m", "advised", 1), ("m", "not_sooner", 1)]
