"""Shadow prices: they keep out what costs most, follow the demand, and are 0 while there is enough node time."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conductor.policy.decisions import Place, Reject
from conductor.policy.events import NS, RequestCompleted, Tick
from conductor.policy.shadow_prices import ShadowPrices, fitting_prices

seconds = st.floats(0.0, 100.0, allow_subnormal=False)


def prices_after(needs_s, *, rate_per_s=10, duration_s=60, prefill_nodes=8, decode_nodes=8):
    """Prices after `duration_s` of requests that need (prefill, decode) seconds, in turn."""
    prices, now_ns = ShadowPrices(), 0
    for number in range(rate_per_s * duration_s):
        now_ns = number * NS // rate_per_s
        prices.count(now_ns, *needs_s[number % len(needs_s)])
        if number % rate_per_s == 0:
            prices.adapt(now_ns, prefill_nodes, decode_nodes)
    prices.adapt(now_ns, prefill_nodes, decode_nodes)
    return prices


def test_requests_cost_nothing_while_there_is_time_for_all():
    prices = prices_after([(0.5, 0.5), (1.0, 0.9)])  # 7.5 and 7.0 of 8 nodes
    assert (prices.prefill, prices.decode) == (0.0, 0.0)


@pytest.mark.parametrize("scarce", ["prefill", "decode"])
def test_of_requests_that_do_not_all_fit_the_expensive_ones_cost_more_than_one(scarce):
    cheap, dear = (0.5, 0.1), (4.0, 0.1)  # 5 and 40 node seconds per second of both kinds together
    needs = [cheap, dear] if scarce == "prefill" else [cheap[::-1], dear[::-1]]
    prices = prices_after(needs)
    free = "decode" if scarce == "prefill" else "prefill"
    assert getattr(prices, free) == 0.0
    assert prices.cost_of(*needs[0]) < 1 <= prices.cost_of(*needs[1])


def test_both_kinds_of_time_have_a_price_if_both_are_scarce():
    rng = np.random.default_rng(3)
    prices = prices_after(rng.exponential(2.0, (200, 2)).tolist())  # 20 of 8 nodes
    assert prices.prefill > 0
    assert prices.decode > 0


def test_more_nodes_lower_the_price_and_an_end_of_the_demand_ends_it():
    needs = np.random.default_rng(5).exponential(2.0, (200, 2)).tolist()
    scarce, ample = prices_after(needs), prices_after(needs, prefill_nodes=12, decode_nodes=12)
    assert ample.prefill < scarce.prefill
    assert ample.decode < scarce.decode
    scarce.adapt(200 * NS, 8, 8)
    assert (scarce.prefill, scarce.decode) == (0.0, 0.0)


def test_ten_thousand_requests_per_second_are_counted_like_one():
    """Only some requests of a window are samples; the others add to their weight."""
    needs = np.random.default_rng(7).exponential(2.0, (997, 2))
    few = prices_after(needs.tolist(), rate_per_s=10, duration_s=60)
    many = prices_after((needs / 1000).tolist(), rate_per_s=10_000, duration_s=20)
    assert many.prefill == pytest.approx(1000 * few.prefill, rel=0.25)
    assert many.decode == pytest.approx(1000 * few.decode, rel=0.25)


@given(
    st.lists(st.tuples(seconds, seconds), min_size=1, max_size=30),
    st.tuples(st.floats(0.1, 1000), st.floats(0.1, 1000)),
)
def test_prices_descend_to_the_most_requests_that_fit(needs, there_s):
    needs_s, weights = np.array(needs), np.ones(len(needs))
    prices = (0.0, 0.0)
    bounds = []
    for _ in range(6):
        prices = fitting_prices(needs_s, weights, there_s, prices)
        bounds.append(np.maximum(0.0, 1 - needs_s @ prices).sum() + np.dot(prices, there_s))
    assert min(prices) >= 0
    assert all(after <= before * (1 + 1e-9) + 1e-9 for before, after in pairwise(bounds))
    assert bounds[-1] <= len(needs) + 1e-9
    # Admitted alone, those that cost less than 1 fit, but for the request at the margin.
    served = needs_s[needs_s @ prices < 1 - 1e-9]
    assert served[:, 1].sum() <= there_s[1] + needs_s[:, 1].max() + 1e-6


def outcome(cluster, make, **config):
    """Decide on a long prompt while short ones take 60 % of its TTFT, after more long ones than fit."""
    c = cluster(make.node("p", "prefill"), make.node("d", "decode", capacity_tokens=100_000), ttft_slo_s=10.0, **config)
    c.learn("p", per_token_s=1e-3, step_s=0.01)
    for i in range(60):
        assert isinstance(c.after(0.06).send(make.request(f"short{i}", prompt=100, new=10))[0], Place)
    long = [c.after(0.06).send(make.request(f"long{i}", prompt=2000, new=10))[0] for i in range(30)]
    placed = [i for i, decision in enumerate(long) if isinstance(decision, Place)]
    assert 0 < len(placed) < 3  # then the queue is full
    c.send(Tick())
    for i in placed:
        c.send(RequestCompleted(f"long{i}", 0, "finished"))
    return c.send(make.request("longer", prompt=2100, new=10))[0]


@pytest.mark.parametrize("mode", ["predicted-uniform", "predicted"])
def test_under_load_a_long_prompt_is_kept_out_if_it_costs_more_than_one_request(cluster, make, mode):
    rejected = outcome(cluster, make, admission_mode=mode)
    assert isinstance(rejected, Reject)
    assert rejected.reason == "ttft"
    assert isinstance(outcome(cluster, make, admission_mode=mode, ttft_reserve=0.0), Place)


def test_current_load_is_judged_without_prices(cluster, make):
    assert isinstance(outcome(cluster, make, admission_mode="early"), Place)


def test_requests_that_no_idle_node_would_serve_in_time_are_not_demand(cluster, make):
    c = cluster(
        make.node("p", "prefill"),
        make.node("d", "decode", capacity_tokens=100_000),
        ttft_slo_s=10.0,
        admission_mode="predicted",
    )
    c.learn("p", per_token_s=1e-3, step_s=0.01)
    for i in range(60):
        assert isinstance(c.after(0.06).send(make.request(f"short{i}", prompt=100, new=10))[0], Place)
    for i in range(30):
        impossible = make.request(f"long{i}", prompt=2000, new=10, ttft_objective_s=1.0)
        assert isinstance(c.after(0.06).send(impossible)[0], Reject)
    c.send(Tick())
    assert isinstance(c.send(make.request("longer", prompt=2100, new=10))[0], Place)
