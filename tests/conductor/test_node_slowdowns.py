"""Nodes that slow down, nodes that lie, and bursts of garbage: what costs learn from them and what they do not."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conductor.policy import Conductor, PolicyConfig
from conductor.policy.costs import ModelCosts
from conductor.policy.events import (
    DecodeSample,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    PrefillSample,
    RequestArrived,
    TransferSample,
)

FIXED, PER_TOKEN, PER_PAIR = 0.02, 1e-3, 2e-7
STEP_FIXED, PER_SEQUENCE, PER_CONTEXT = 0.01, 1e-3, 1e-6


def prefill_time(new, reused):
    return FIXED + PER_TOKEN * new + PER_PAIR * new * (reused + new / 2)


def step_time(batch, context):
    return STEP_FIXED + PER_SEQUENCE * batch + PER_CONTEXT * context


def prefill(rng, times=1.0):
    new, reused = rng.randrange(8, 4000), rng.randrange(0, 8000)
    return PrefillSample(new, reused, times * prefill_time(new, reused) * rng.uniform(0.95, 1.05))


def step(rng, times=1.0):
    batch = rng.randrange(1, 64)
    context = batch * rng.randrange(10, 2000)
    return DecodeSample(batch, context, times * step_time(batch, context) * rng.uniform(0.95, 1.05))


class Cluster:
    """Prefill and decode nodes p0, p1, ... and d0, d1, ... of one model, and what they report."""

    def __init__(self, num_nodes):
        self.rng = random.Random(7)
        self.conductor = Conductor(PolicyConfig(attained_share=0.0, report_timeout_s=0.0))
        self.names = [f"{role[0]}{i}" for i in range(num_nodes) for role in ("prefill", "decode")]
        for name in self.names:
            role = "prefill" if name[0] == "p" else "decode"
            view = NodeView(name, role, 1, "h", "", "m", 16, 1 << 20, 1 << 16, 64, 1000)
            self.conductor.on_event(0, NodeJoined(view))

    def work(self, name, count, times=1.0):
        """The node reports so many measurements, `times` longer than its model's."""
        if name[0] == "p":
            report = NodeReported(name, prefills=tuple(prefill(self.rng, times) for _ in range(count)))
        else:
            report = NodeReported(name, decodes=tuple(step(self.rng, times) for _ in range(count)))
        self.conductor.on_event(0, report)

    def settle(self, count=60, **times):
        """All nodes work, in turns."""
        for _ in range(count // 6):
            for name in self.names:
                self.work(name, 6, times.get(name, 1.0))

    @property
    def costs(self):
        return self.conductor._state.costs["m"]

    def slowdown(self, name):
        found = {node.node_id: (first, second) for node, first, second in self.conductor.slowdowns()}
        return found[name][0 if name[0] == "p" else 1]

    def place(self):
        return self.conductor.on_event(0, RequestArrived("r", 0, "f", "m", 1000, 10))[0]


@pytest.fixture
def cluster():
    return Cluster


@pytest.mark.parametrize("name", ["p0", "d1"])
@pytest.mark.parametrize("num_nodes", [2, 5])
def test_a_node_that_becomes_three_times_slower_is_seen_within_some_tens_of_measurements_and_recovers(
    cluster, name, num_nodes
):
    live = cluster(num_nodes)
    live.settle()
    live.work(name, 30, 3.0)
    assert live.slowdown(name) == pytest.approx(3.0, rel=0.2)
    live.work(name, 40)
    assert live.slowdown(name) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("num_nodes", [2, 3, 6])
def test_a_slow_node_does_not_spoil_what_the_others_share(cluster, num_nodes):
    live = cluster(num_nodes)
    live.settle()
    live.settle(120, p0=4.0, d0=4.0)
    assert live.slowdown("p0") == pytest.approx(4.0, rel=0.15)
    assert live.slowdown("d0") == pytest.approx(4.0, rel=0.15)
    for name in live.names[2:]:
        assert live.slowdown(name) == pytest.approx(1.0, rel=0.12)
    assert live.costs.prefill_cost_s(1000, 500) == pytest.approx(prefill_time(1000, 500), rel=0.15)
    assert live.costs.step_cost_s(8, 4000, 64) == pytest.approx(step_time(8, 4000), rel=0.15)


def test_what_all_nodes_have_in_common_is_the_models_cost_and_no_slow_down(cluster):
    live = cluster(3)
    live.settle()
    live.settle(120, **dict.fromkeys(live.names, 2.5))
    assert all(live.slowdown(name) == pytest.approx(1.0, rel=0.12) for name in live.names)
    assert live.costs.prefill_cost_s(1000) == pytest.approx(2.5 * prefill_time(1000, 0), rel=0.15)


def test_work_goes_to_the_nodes_that_are_not_slow(cluster):
    live = cluster(3)
    live.settle()
    assert live.place().prefill == "p0"
    live.work("p0", 30, 3.0)
    live.work("d0", 40, 3.0)
    placed = live.place()
    assert (placed.prefill, placed.decode) == ("p1", "d1")
    assert placed.predicted_tbt_s == pytest.approx(step_time(1, 1000), rel=0.2)
    live.work("p1", 30, 6.0)
    live.work("p2", 30, 6.0)
    assert live.place().prefill == "p0"
    expected = 3 * prefill_time(1000, 0)
    assert live.place().predicted_ttft_s == pytest.approx(expected, rel=0.2)


def test_a_burst_of_garbage_moves_nothing(cluster):
    live = cluster(2)
    live.settle(120)
    before = live.costs.prefill_cost_s(1000), live.costs.step_cost_s(8, 4000, 64)
    live.work("p0", 8, 1000.0)
    live.work("d0", 8, 0.001)
    live.work("p0", 1)
    for i in range(30):
        live.work("p0", 1, 10.0 ** (i % 5 - 2))
    after = live.costs.prefill_cost_s(1000), live.costs.step_cost_s(8, 4000, 64)
    assert after == pytest.approx(before, rel=0.1)
    assert live.slowdown("p0") == pytest.approx(1.0, rel=0.25)
    assert live.slowdown("d0") == pytest.approx(1.0, rel=0.12)


def test_nobody_is_believed_to_be_more_than_so_much_quicker_or_slower(cluster):
    live = cluster(3)
    live.settle()
    live.work("p0", 200, 1e-6)
    live.work("p1", 200, 1e3)
    assert live.slowdown("p0") >= 1 / 16.01
    assert live.slowdown("p1") <= 16.01
    assert live.costs.prefill_cost_s(1000) == pytest.approx(prefill_time(1000, 0), rel=0.25)


def test_a_node_that_left_takes_its_slow_down_with_it(cluster):
    live = cluster(2)
    live.settle()
    live.work("p0", 60, 4.0)
    view = live.conductor._state.nodes.get("p0")
    live.conductor.on_event(0, NodeLost("p0", 1))
    live.conductor.on_event(0, NodeJoined(view))
    assert live.slowdown("p0") == 1.0


WRONG = (-1.0, 0.0, math.nan, math.inf, 1e9)


def test_measurements_that_cannot_be_true_are_refused_counted_per_node_and_told_once(cluster):
    live = cluster(2)
    live.settle()
    before = live.costs.prefill, live.costs.decode
    samples = [PrefillSample(100, 0, s) for s in WRONG] + [PrefillSample(n, r, 1.0) for n, r in ((0, 5), (1 << 17, 0))]
    for _ in range(3):
        live.conductor.on_event(0, NodeReported("p0", prefills=tuple(samples)))
        live.conductor.on_event(0, NodeReported("d1", decodes=tuple(DecodeSample(1, 1, s) for s in WRONG)))
        measured = (100, -1.0, "load"), (-5, 1.0, "load"), (0, 0.0, "load"), (100, 0.1, "carrier pigeon")
        live.conductor.on_event(0, NodeReported("p1", transfers=tuple(TransferSample(*one) for one in measured)))
    assert (live.costs.prefill, live.costs.decode) == before
    refused = live.conductor.refused_samples
    assert refused["p0"] == {"no_time": 6, "no_number": 6, "too_long": 3, "no_work": 3, "too_much_work": 3}
    assert refused["d1"] == {"no_time": 6, "no_number": 6, "too_long": 3}
    assert refused["p1"] == {"no_time": 3, "no_work": 3, "unknown_path": 3}
    warnings = live.conductor.take_warnings()
    assert [warning.split()[1] for warning in warnings] == ["p0", "d1", "p1"]
    assert live.conductor.take_warnings() == []
    assert live.conductor.snapshot(0)["nodes"]["p0"]["refused_samples"]["no_work"] == 3


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.01, 100.0), base=st.sampled_from([0.001, 0.02, 0.3]))
def test_the_fit_recovers_the_truth_under_ten_percent_of_gross_outliers(seed, scale, base):
    rng, costs = random.Random(seed), ModelCosts()

    def truth(new, reused):
        return scale * (base + 1e-3 * new + 2e-7 * new * (reused + new / 2))

    for _ in range(400):
        new, reused = rng.randrange(8, 4000), rng.randrange(0, 8000)
        seconds = truth(new, reused) * rng.uniform(0.95, 1.05)
        if rng.random() < 0.1:
            seconds *= rng.choice([0.01, 20.0, 100.0])
        costs.add_prefill(PrefillSample(new, reused, seconds))
    for new, reused in ((500, 0), (500, 7000), (2000, 4000), (3900, 0)):
        assert costs.prefill_cost_s(new, reused) == pytest.approx(truth(new, reused), rel=0.2)


SAMPLES = st.lists(
    st.builds(
        PrefillSample, st.integers(0, 1 << 17), st.integers(0, 1 << 17), st.floats(-1.0, 1e5) | st.just(math.nan)
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(samples=SAMPLES, new=st.integers(1, 1 << 17), more=st.integers(0, 1 << 17), reused=st.integers(0, 1 << 17))
def test_whatever_is_reported_predictions_are_finite_never_negative_and_grow_with_new_tokens(
    samples, new, more, reused
):
    costs = ModelCosts()
    for sample in samples:
        costs.add_prefill(sample)
    least = costs.prefill_cost_s(new, reused)
    assert 0 <= least <= costs.prefill_cost_s(new + more, reused) * (1 + 1e-12) < math.inf
    assert min(costs.prefill) >= 0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), factor=st.floats(1.5, 10.0), at=st.integers(0, 3))
def test_a_slow_node_is_told_apart_from_the_shared_fit_whoever_it_is(seed, factor, at):
    live = Cluster(4)
    live.rng = random.Random(seed)
    live.settle(90, **{f"p{at}": factor})
    live.settle(90, **{f"p{at}": factor})
    assert live.slowdown(f"p{at}") == pytest.approx(factor, rel=0.2)
    assert live.costs.prefill_cost_s(2000, 1000) == pytest.approx(prefill_time(2000, 1000), rel=0.2)


def of_kind(node_id, hardware, capacity_tokens=1 << 20):
    role = "prefill" if node_id[0] == "p" else "decode"
    return NodeView(node_id, role, 1, "h", "", "m", 16, capacity_tokens, 1 << 16, 64, 1000, hardware=hardware)


def factor(cluster, node_id):
    return next(
        prefill if node_id[0] == "p" else decode
        for node, prefill, decode in cluster.conductor.slowdowns()
        if node.node_id == node_id
    )


@pytest.mark.parametrize("name", ["p", "d"])
def test_a_new_node_begins_with_the_factor_of_its_kind(name):
    cluster = Cluster(3)
    for number in range(3, 5):
        cluster.conductor.on_event(0, NodeJoined(of_kind(f"{name}{number}", "slow gpu")))
    for _ in range(40):
        for number in range(5):
            cluster.work(f"{name}{number}", 1, times=2.5 if number >= 3 else 1.0)
    cluster.conductor.on_event(0, NodeJoined(of_kind(f"{name}5", "slow gpu")))
    cluster.conductor.on_event(0, NodeJoined(of_kind(f"{name}6", "slow gpu", capacity_tokens=1 << 19)))
    cluster.conductor.on_event(0, NodeJoined(of_kind(f"{name}7", "")))
    assert factor(cluster, f"{name}5") == pytest.approx(2.5, rel=0.15)
    assert factor(cluster, f"{name}6") == factor(cluster, f"{name}7") == 1.0


def test_a_node_of_a_new_kind_is_known_after_a_few_measurements():
    cluster = Cluster(3)
    for _ in range(40):
        for number in range(3):
            cluster.work(f"d{number}", 1)
    cluster.conductor.on_event(0, NodeJoined(of_kind("d3", "other gpu")))
    cluster.work("d3", 6, times=1.9)
    assert factor(cluster, "d3") == pytest.approx(1.9, rel=0.2)
