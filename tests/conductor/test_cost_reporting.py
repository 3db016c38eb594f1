"""Reporting of costs: prediction errors, slow nodes, rejected measurements, profiles."""

import logging
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from conductor.config import ConductorConfig
from conductor.core import Core
from conductor.decision_log.codec import event_from_json, to_json
from conductor.metrics import cost_samples, costs_given
from conductor.policy.events import (
    DecodeSample,
    NodeJoined,
    NodeLost,
    NodeReported,
    NodeView,
    PrefillSample,
    RequestArrived,
    RequestCompleted,
)
from settings.keys import assemble
from telemetry import ConductorCollector, ConductorSample
from worker.policy.cost_profile import MOONCAKE, load_profile

PROFILE = load_profile(MOONCAKE)


def view(name, role, **more):
    return NodeView(name, role, 1, "h", "", "m", 16, 1 << 20, 1 << 17, 64, 1000, **more)


@pytest.fixture
def core():
    core = Core(assemble(ConductorConfig, listen="none"), clock=iter(range(10**6)).__next__)
    core.handle(costs_given("m", PROFILE))
    yield core
    core.close()


def join(core, **more):
    core.handle(NodeJoined(view("p", "prefill", **more)))
    core.handle(NodeJoined(view("d", "decode", **more)))


def values(core, name):
    """Return the exported values of the metric `name` by labels."""
    registry = CollectorRegistry()
    registry.register(
        ConductorCollector(
            lambda: [ConductorSample(s.name, s.value, dict(s.labels)) for s in cost_samples(core.policy)]
        )
    )
    found = [sample for family in registry.collect() for sample in family.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in found}


def test_predictions_begin_with_the_profile_and_are_the_profiles_own(core):
    join(core)
    place = core.handle(RequestArrived("r", 0, "f", "m", 8192, 10))[0]
    assert place.predicted_ttft_s == pytest.approx(PROFILE.prefill_s(8192), rel=0.03)
    assert place.predicted_tbt_s == pytest.approx(PROFILE.decode_s(1, 8192), rel=0.03)
    assert place.extrapolated == ()
    for new, reused, batch, context in ((100, 0, 1, 100), (2000, 60_000, 64, 10**6), (131_072, 0, 128, 1000)):
        costs = core.policy._state.costs["m"]
        assert costs.prefill_cost_s(new, reused) == pytest.approx(PROFILE.prefill_s(new, reused), rel=0.03)
        assert costs.step_cost_s(batch, context, 128) == pytest.approx(PROFILE.decode_s(batch, context), rel=0.03)


def test_measurements_take_over_from_a_profile_that_was_measured_elsewhere(core):
    join(core)
    sizes = [(100 + 37 * i % 4000, 0) for i in range(300)]
    prefills = tuple(PrefillSample(new, 0, 7 * PROFILE.prefill_s(new)) for new, _ in sizes)
    core.handle(NodeReported("p", prefills=prefills))
    place = core.handle(RequestArrived("r", 0, "f", "m", 2000, 10))[0]
    assert place.predicted_ttft_s == pytest.approx(7 * PROFILE.prefill_s(2000), rel=0.1)


def test_a_profile_is_an_event_that_a_log_can_hold():
    given = costs_given("m", PROFILE)
    assert event_from_json(to_json(given)) == given


def test_nodes_that_are_not_what_the_profile_was_measured_with_are_named(core, caplog):
    with caplog.at_level(logging.WARNING):
        join(core, hardware=PROFILE.hardware)
        assert not caplog.records
        core.handle(NodeJoined(view("other", "prefill", hardware="a toaster")))
    assert "node other does not match the cost profile 'mooncake-70b-8xa800'" in caplog.text
    assert "it runs on 'a toaster'" in caplog.text


def test_errors_of_all_four_predictions_are_exported_as_histograms_per_model_and_node(core):
    join(core)
    core.handle(NodeReported("p", prefills=(PrefillSample(1000, 0, 2.5 * PROFILE.prefill_s(1000)),)))
    core.handle(NodeReported("d", decodes=(DecodeSample(4, 4000, PROFILE.decode_s(4, 4000) / 3),)))
    place = core.handle(RequestArrived("r", 0, "f", "m", 1000, 10))[0]
    core.handle(RequestCompleted("r", 0, "finished", place.predicted_ttft_s * 10, place.predicted_tbt_s))
    buckets = values(core, "moonpool:prediction_relative_error_bucket")
    assert buckets["prefill", "m", "p", "-0.5"] == 1 > buckets["prefill", "m", "p", "-0.75"] == 0
    assert buckets["step", "m", "d", "3.0"] == 1 > buckets["step", "m", "d", "1.0"] == 0
    assert buckets["ttft", "m", "p", "-0.75"] == buckets["ttft", "m", "p", "+Inf"] == 1
    assert buckets["tbt", "m", "d", "0.0"] == 1 > buckets["tbt", "m", "d", "-0.05"] == 0
    told = core.policy.snapshot(0)["prediction_errors"]
    assert {each["what"] for each in told["histograms"]} == {"prefill", "step", "ttft", "tbt"}
    assert all(len(each["counts"]) == len(told["bounds"]) + 1 for each in told["histograms"])


def test_so_many_nodes_of_a_model_have_errors_of_their_own_and_the_others_share_them(core):
    for i in range(40):
        core.handle(NodeJoined(view(f"p{i:02}", "prefill")))
        core.handle(NodeReported(f"p{i:02}", prefills=(PrefillSample(1000, 0, 1.0),)))
    counts = {
        key[2]: n for key, n in values(core, "moonpool:prediction_relative_error_bucket").items() if key[3] == "+Inf"
    }
    assert len(counts) == 33
    assert counts["other"] == 8


def test_slow_nodes_refusals_and_extrapolations_are_exported(core):
    join(core)
    core.handle(NodeJoined(view("q", "prefill")))
    for name, times in (("p", 1.0), ("q", 4.0)):
        prefills = tuple(PrefillSample(new, 0, times * PROFILE.prefill_s(new)) for new in range(500, 4500, 100))
        core.handle(NodeReported(name, prefills=prefills))
    core.handle(NodeReported("d", decodes=(DecodeSample(1, 1, -1.0),)))
    core.handle(RequestArrived("r", 0, "f", "m", 100_000, 10**6 - 1))
    core.handle(RequestArrived("s", 0, "f", "m", 100_000, 10))
    slow = values(core, "moonpool:node_slowdown")
    assert slow["q", "m", "prefill"] == pytest.approx(4.0, rel=0.2)
    assert slow["p", "m", "prefill"] == slow["d", "m", "step"] == 1.0
    assert values(core, "moonpool:cost_samples_refused_total") == {("d", "no_time"): 1}
    assert values(core, "moonpool:predictions_extrapolated_total") == {}


def test_a_prediction_beyond_what_was_measured_says_so_in_the_decision_and_is_counted():
    core = Core(assemble(ConductorConfig, listen="none"), clock=iter(range(10**6)).__next__)
    join(core)
    guess = core.handle(RequestArrived("r", 0, "f", "m", 1000, 10))[0]
    assert guess.extrapolated == ("prefill", "decode")
    core.handle(NodeReported("p", prefills=tuple(PrefillSample(n, 0, n * 1e-3) for n in range(100, 2100, 10))))
    core.handle(NodeReported("d", decodes=tuple(DecodeSample(b, 1000 * b, b * 1e-2) for b in range(1, 33))))
    known = core.handle(RequestArrived("s", 0, "f", "m", 1000, 10))[0]
    assert known.extrapolated == ()
    assert known.predicted_ttft_s - guess.predicted_ttft_s == pytest.approx(1.0, rel=0.1)
    far = core.handle(RequestArrived("t", 0, "f", "m", 4180, 10))[0]
    assert far.extrapolated == ("prefill",)
    assert far.predicted_ttft_s == pytest.approx(1.0 + 4.18 * 1.1, rel=0.3)
    counted = values(core, "moonpool:predictions_extrapolated_total")
    assert counted == {("m", "prefill"): 2, ("m", "decode"): 1}


@pytest.mark.parametrize("per_unit_s", [0.0, 1e4])
def test_a_profile_of_work_that_costs_nothing_or_takes_hours_is_taken_in(core, per_unit_s):
    prefill = replace(PROFILE.prefill, fixed_s=per_unit_s, per_token_s=per_unit_s, per_pair_s=per_unit_s)
    decode = replace(PROFILE.decode, fixed_s=per_unit_s, per_sequence_s=per_unit_s, per_token_s=per_unit_s)
    load = replace(PROFILE.transfers["load"], fixed_s=per_unit_s, per_byte_s=per_unit_s)
    profile = replace(PROFILE, prefill=prefill, decode=decode, transfers={**PROFILE.transfers, "load": load})
    core.handle(costs_given("m", profile))
    join(core)
    (placed,) = core.handle(RequestArrived("r", 0, "f", "m", 100, 10))
    assert 0 < placed.predicted_ttft_s < (1e-6 if per_unit_s == 0 else 1e6)
    core.handle(NodeReported("d", decodes=(DecodeSample(1, 0, 0.01),)))


def test_nodes_that_have_left_take_no_series_from_those_to_come(core):
    join(core)
    for number in range(40):
        core.handle(NodeJoined(view(f"a{number}", "prefill")))
        (placed,) = core.handle(RequestArrived(f"r{number}", 0, "f", "m", 100, 10, excluded=("p",)))
        core.handle(NodeLost(placed.prefill, 1))
        core.handle(RequestCompleted(f"r{number}", 0, "finished", ttft_s=1.0, generated=2))
    assert {errors.node_id for errors in core.policy.errors if errors.what == "ttft"} == {"other"}
    (placed,) = core.handle(RequestArrived("r", 0, "f", "m", 100, 10))
    core.handle(RequestCompleted("r", 0, "finished", ttft_s=1.0, generated=2))
    assert {errors.node_id for errors in core.policy.errors if errors.what == "ttft"} == {"other", "p"}
