"""Learning of the cost models, and its speed."""

import random

import pytest

from conductor.policy.costs import CostFit, MeanDuration, ModelCosts, TransferCosts, prefill_s, tbt_s
from conductor.policy.events import CostsGiven, DecodeSample, PathCosts, PrefillSample, TransferSample


def prefill_time(new, reused):
    return 0.02 + 1e-3 * new + 2e-7 * new * (reused + new / 2)


@pytest.fixture
def prefills():
    rng = random.Random(1)
    sizes = [(rng.randrange(8, 4000), rng.randrange(0, 8000)) for _ in range(300)]
    return [PrefillSample(n, r, prefill_time(n, r) * rng.uniform(0.9, 1.1)) for n, r in sizes]


def predict(costs, new, reused):
    return prefill_s(*costs.prefill, new + reused, reused)


def test_the_fit_finds_the_polynomial_behind_noisy_samples(prefills):
    costs = ModelCosts()
    for sample in prefills:
        costs.add_prefill(sample)
    for new, reused in ((16, 0), (500, 4000), (4000, 0), (2000, 7000)):
        assert predict(costs, new, reused) == pytest.approx(prefill_time(new, reused), rel=0.1)
    assert costs.summary()["prefill"]["relative_error"] < 0.15


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_one_sample_sets_the_scale_whatever_the_machine(factor):
    costs = ModelCosts()
    costs.add_prefill(PrefillSample(1000, 0, prefill_time(1000, 0) * factor))
    assert predict(costs, 1000, 0) == pytest.approx(prefill_time(1000, 0) * factor, rel=0.02)
    assert predict(costs, 500, 0) < predict(costs, 1000, 0) < predict(costs, 2000, 0)


def test_predictions_before_any_sample_are_finite_and_grow_with_work():
    costs = ModelCosts()
    assert 0 < predict(costs, 1, 0) < predict(costs, 100, 0) < predict(costs, 100, 5000) < 60


def test_outliers_hardly_move_the_prediction(prefills):
    calm, troubled = ModelCosts(), ModelCosts()
    for i, sample in enumerate(prefills):
        calm.add_prefill(sample)
        stall = 50 if i > 20 and i % 20 == 0 else 1
        troubled.add_prefill(PrefillSample(sample.new_tokens, sample.reused_tokens, sample.seconds * stall))
    assert predict(troubled, 1000, 1000) == pytest.approx(predict(calm, 1000, 1000), rel=0.25)
    assert troubled.summary()["prefill"]["clipped"] > 0


def test_a_lasting_change_gets_through(prefills):
    costs = ModelCosts()
    for sample in prefills[:100]:
        costs.add_prefill(sample)
    for sample in prefills:
        costs.add_prefill(PrefillSample(sample.new_tokens, sample.reused_tokens, sample.seconds * 10))
    assert predict(costs, 1000, 1000) == pytest.approx(10 * prefill_time(1000, 1000), rel=0.4)


def test_coefficients_are_never_negative():
    fit = CostFit((1e-3, 1e-3))
    for x in (1.0, 2.0, 3.0, 4.0) * 20:
        fit.add((1.0, x), 5.0 - x)  # falls with x: a free fit would have a negative slope
    assert min(fit.coefficients) >= 0
    assert fit.predict((1.0, 100.0)) < 10


def test_samples_without_work_or_time_are_ignored():
    fit = CostFit((1e-3, 1e-3))
    for features, seconds in (((0.0, 0.0), 1.0), ((1.0, 1.0), 0.0), ((1.0, 1.0), -1.0), ((1.0, 1.0), float("inf"))):
        fit.add(features, seconds)
    fit.add((1.0, 1.0), float("nan"))
    assert fit.num_samples == 0


def test_the_decode_step_follows_batch_and_context():
    costs = ModelCosts()
    for batch in range(1, 33):
        for context in (100, 10_000):
            costs.add_decode(DecodeSample(batch, context, 0.01 + 1e-3 * batch + 1e-6 * context))
    assert tbt_s(*costs.decode, 4, 1000, 64) == pytest.approx(0.015, rel=0.1)
    assert tbt_s(*costs.decode, 40, 20_000, 64) == pytest.approx(0.07, rel=0.1)
    assert tbt_s(*costs.decode, 40, 20_000, 20) == pytest.approx(2 * 0.04, rel=0.1)


def test_reads_from_a_pool_are_fitted_apart_from_pushes_and_share_the_senders_bandwidth():
    transfers = TransferCosts()
    for _ in range(20):
        for nbytes in (1 << 16, 1 << 20, 1 << 24):
            transfers.add(TransferSample(nbytes, nbytes / 1e9, "fetch"))
            transfers.add(TransferSample(nbytes, nbytes / 1e6, "push"))
    alone, shared = transfers.fetch_s(1 << 24, 0), transfers.fetch_s(1 << 24, 1)
    assert alone == pytest.approx((1 << 24) / 1e9, rel=0.05)
    assert shared == pytest.approx(2 * alone, rel=0.05)
    assert transfers.fetch_s(0, 0) == transfers.fetch_s(0, 1) == 0


def test_a_mean_duration_has_no_value_before_the_first():
    duration = MeanDuration()
    assert duration.mean_s is None
    duration.add(2.0)
    duration.add(4.0)
    assert duration.mean_s == 3.0


def test_where_all_time_is_found_to_come_from_context_a_step_without_any_is_still_learned_from():
    costs = ModelCosts()
    costs.slowdowns.make_room(1)
    for batch in range(1, 101):
        context = batch * 37 % 101 * 400 + 100
        costs.add_decode(DecodeSample(batch % 16 + 1, context, 1e-6 * context**1.3), 0)
    assert costs.decode[:2] == (0.0, 0.0)
    costs.add_decode(DecodeSample(1, 0, 0.01), 0)
    assert 0 < costs.step_cost_s(8, 10_000, 8) < 10


def test_a_profile_whose_ranges_no_work_ever_reaches_is_gone_by_all_the_same():
    costs, transfers = ModelCosts(), TransferCosts()
    far = 1e18
    paths = (PathCosts("load", 1e-4, 1e-9, far),)
    costs.give(CostsGiven("m", "far", "", "", (0.01, 1e-4, 1e-9), (0.004, 5e-4, 1e-8), far, far, far, far, paths))
    transfers.give(paths)
    assert costs.prefill_cost_s(1000) == pytest.approx(0.01 + 0.1 + 5e-4, rel=0.01)
    assert costs.step_cost_s(8, 10_000, 64) == pytest.approx(0.004 + 0.004 + 1e-4, rel=0.01)
    assert transfers.load_s(1 << 20) == pytest.approx(1e-4 + 1e-9 * (1 << 20), rel=0.05)
