"""Reuse of a sibling's KV: where it saves time, at the best quality in time, from pool nodes that answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conductor import wire
from conductor.decision_log.codec import decision_from_json, event_from_json, to_json
from conductor.directory.directory import Matches
from conductor.policy.decisions import Place
from conductor.policy.events import NodeReported, SiblingMatch, SiblingPoint, TransferSample
from moonpool_proto.v1 import conductor_pb2

BLOCKS = 60
CHEAP = SiblingPoint(0, 1, 0.1, 0.05)
MIDDLE = SiblingPoint(2, 5, 0.3, 0.02, "pool-0", BLOCKS, 64)
GOOD = SiblingPoint(1, 7, 0.6, 0.0, "pool-1", BLOCKS, 64)
SIBLING = SiblingMatch("f" * 32, "pool-0", BLOCKS, (CHEAP, MIDDLE, GOOD))
PROMPT = 1000
"""Tokens, of which 960 are in the sibling's blocks; each takes 1 ms."""


def start(cluster: Any, make: Any, **config: Any) -> Any:
    pools = [make.node(f"pool-{i}", "pool", host=f"h{i}") for i in (0, 1)]
    c = cluster(*pools, make.node("prefill-0", "prefill", host="h0"), make.node("decode-0", "decode"), **config)
    c.learn("prefill-0", per_token_s=1e-3)
    c.learn("decode-0", step_s=0.01)
    return c


def ask(c: Any, make: Any, name: str = "new", **fields: Any) -> Place:
    (placed,) = c.send(make.request(name, **{"prompt": PROMPT, "new": 8, "siblings": (SIBLING,), **fields}))
    assert isinstance(placed, Place)
    return placed


def layers(placed: Place) -> tuple[int, int] | None:
    return None if placed.sibling is None else (placed.sibling.first_layer, placed.sibling.last_layer)


@pytest.mark.parametrize(
    ("objective_s", "chosen", "ttft_s"),
    [(0.0, (1, 7), 0.62), (0.7, (1, 7), 0.62), (0.4, (2, 5), 0.33), (0.2, (0, 1), 0.14), (0.05, (0, 1), 0.14)],
)
def test_the_best_quality_in_time_is_chosen_or_else_the_cheapest(
    cluster: Any, make: Any, objective_s: float, chosen: tuple[int, int], ttft_s: float
) -> None:
    placed = ask(start(cluster, make, admission_mode="none"), make, ttft_objective_s=objective_s)
    assert layers(placed) == chosen
    assert placed.sibling is not None
    assert (placed.sibling.num_blocks, placed.sibling.pool) == (BLOCKS, "pool-0")
    assert placed.reuse_blocks == 0
    assert placed.predicted_ttft_s == pytest.approx(ttft_s, rel=0.1)


def test_load_is_part_of_the_time(cluster: Any, make: Any) -> None:
    c = start(cluster, make, admission_mode="none")
    ask(c, make, "before", siblings=(), prompt=300, ttft_objective_s=0.5)  # due sooner
    assert layers(ask(c, make, ttft_objective_s=0.7)) == (2, 5)


def test_a_request_that_would_be_rejected_is_served_with_a_siblings_kv(cluster: Any, make: Any) -> None:
    c = start(cluster, make, admission_mode="early")
    (rejected,) = c.send(make.request("without", prompt=PROMPT, new=8, ttft_objective_s=0.5))
    assert not isinstance(rejected, Place)
    assert layers(ask(c, make, ttft_objective_s=0.5)) == (2, 5)


def test_own_kv_comes_first_and_only_what_it_lacks_counts(cluster: Any, make: Any) -> None:
    c = start(cluster, make)
    assert layers(ask(c, make, "all", matches=(("pool-0", BLOCKS),))) is None
    placed = ask(start(cluster, make), make, "some", matches=(("pool-0", 30),))
    assert (placed.reuse_blocks, layers(placed)) == (30, (1, 7))


@pytest.mark.parametrize(
    "fields",
    [
        {"siblings": ()},
        {"siblings": (replace(SIBLING, blocks=3),)},  # the gain is within the error of predictions
        {"siblings": (replace(SIBLING, points=(replace(GOOD, cost=0.95),)),)},
        {"siblings": (replace(SIBLING, points=(replace(GOOD, input_blocks=0),)),)},
        {"excluded": ("pool-0",)},
        {"window_tokens": 512},
    ],
)
def test_nothing_is_reused_that_does_not_pay_or_is_not_there(cluster: Any, make: Any, fields: dict[str, Any]) -> None:
    assert layers(ask(start(cluster, make), make, **fields)) is None


def test_a_fetch_is_tried_before_its_time_is_known_and_left_if_it_is_too_long(cluster: Any, make: Any) -> None:
    far = replace(SIBLING, pool="pool-1", points=(replace(MIDDLE, input_pool="pool-1", input_nbytes=1 << 20),))
    c = start(cluster, make)  # 1 GB from the other host
    assert layers(ask(c, make, "first", siblings=(far,))) == (2, 5)
    for bytes_per_s, chosen in ((1e8, None), (1e11, (2, 5))):
        c = start(cluster, make)
        samples = tuple(TransferSample(n, n / bytes_per_s, "fetch") for n in (1 << 20, 1 << 25, 1 << 30)) * 20
        c.send(NodeReported("prefill-0", transfers=samples))
        assert layers(ask(c, make, "next", siblings=(far,))) == chosen


def test_a_pool_node_that_does_not_answer_has_nothing(cluster: Any, make: Any) -> None:
    placed = ask(start(cluster, make), make, excluded=("pool-1",))
    assert layers(placed) == (2, 5)


def test_events_and_decisions_survive_the_log(cluster: Any, make: Any) -> None:
    event = make.request("new", prompt=PROMPT, new=8, siblings=(SIBLING,))
    assert event_from_json(to_json(event)) == event
    placed = ask(start(cluster, make), make)
    assert decision_from_json(to_json(placed)) == placed
    assert "siblings" not in to_json(make.request("old", prompt=PROMPT, new=8))


def test_matches_of_siblings_name_the_pool_with_most_blocks() -> None:
    roster = ("pool-0", "pool-1")
    found = {
        b"kv": Matches(roster, np.array([[3, 5], [0, 0]], np.int64), 5),
        b"in": Matches(roster, np.array([[4, 2], [0, 0]], np.int64), 4),
        b"no": Matches(roster, np.zeros((2, 2), np.int64), 0),
    }
    sibling = conductor_pb2.Sibling(model_fingerprint="a", kv_namespace=b"kv")
    sibling.points.add(first_layer=1, last_layer=2, cost=0.5, quality_loss=0.1, input_namespace=b"in")
    sibling.points.add(first_layer=0, last_layer=2, cost=float("nan"))
    match = wire.sibling_match(sibling, found.__getitem__)
    assert match == SiblingMatch("a", "pool-1", 5, (SiblingPoint(1, 2, 0.5, 0.1, "pool-0", 4),))
    sibling.kv_namespace = b"no"
    assert wire.sibling_match(sibling, found.__getitem__) is None
