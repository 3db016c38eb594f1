"""Learned margins: most of the admitted meet their objective, though predictions are only right on average."""

import random

import pytest

from conductor.policy.admission_rule import Margin
from conductor.policy.events import NS


@pytest.mark.parametrize("met", [0.8, 0.95])
def test_as_many_stay_below_the_margin_as_are_to_meet_the_objective(met: float) -> None:
    rng, margin, late = random.Random(3), Margin(), 0
    for number in range(20_000):
        measured_s = 0.08 * (1 + rng.gauss(0.05, 0.1))
        late += number >= 10_000 and measured_s - 0.08 > margin.share * 0.1
        margin.learn(met, 0.08, measured_s, 0.1)
    assert late / 10_000 == pytest.approx(1 - met, abs=0.01)


def test_no_margin_is_kept_where_none_is_asked_for_or_nothing_was_near_the_objective() -> None:
    margin = Margin()
    for _ in range(100):
        margin.learn(0.0, 0.09, 0.2, 0.1)
        margin.learn(0.95, 0.01, 0.2, 0.1)
        margin.learn(0.95, 0.09, 0.2, 0.0)
        margin.learn(0.95, 0.09, 0.0, 0.1)
        margin.learn(0.95, float("nan"), 0.2, 0.1)
    assert (margin.share, margin.num_samples) == (0.0, 0)


def test_no_error_makes_a_margin_that_admits_nobody() -> None:
    margin = Margin()
    for _ in range(1000):
        margin.learn(0.95, 0.09, 1e9, 0.1)
    assert margin.share == 0.5


def test_a_margin_is_kept_while_requests_confirm_it_and_fades_when_none_does() -> None:
    margin = Margin()
    for second in range(1000):
        margin.learn(0.95, 0.09, 0.12 if second % 10 == 0 else 0.09, 0.1)
        margin.pass_time(second * NS)
    kept = margin.share
    assert kept > 0.1
    for second in range(1000, 2000):
        margin.learn(0.95, 0.01, 0.01, 0.1)  # far from its objective
        margin.pass_time(second * NS)
    assert margin.share == pytest.approx(kept / 2**8)
