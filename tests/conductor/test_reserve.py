"""The price above which requests leave room to cheaper ones: whom it keeps out, and how it follows the demand."""

from hypothesis import given
from hypothesis import strategies as st

from conductor.policy.decisions import Place, Reject
from conductor.policy.reserve import Price

shares = st.floats(0, 1)


def is_admitted(price, cost, load, idle=0.0, bound=1.0, share=0.5):
    return load <= bound - price.reserved(share, cost, load, idle, bound)


@given(st.lists(st.tuples(shares, st.floats(1e-6, 1e6), st.floats(0, 2), shares, shares), min_size=1))
def test_nobody_is_kept_out_of_an_idle_cluster_and_nobody_gets_more_than_the_bound(history):
    price = Price()
    for share, cost, load, idle, bound in history:
        reserved = price.reserved(share, cost, load, idle, bound)
        assert 0 <= reserved <= share * max(0.0, bound - idle)
        assert idle > bound or idle <= bound - reserved + 1e-12


def test_a_price_falls_until_the_cheap_requests_just_fill_the_room():
    price = Price()
    is_admitted(price, 1000.0, 0.9)  # the first request sets the price
    assert is_admitted(price, 100.0, 0.9)
    for _ in range(100):
        is_admitted(price, 5.0, 1.1)  # the cheap ones find no room
    assert not is_admitted(price, 100.0, 0.9)
    assert is_admitted(price, 1.0, 0.9)


def test_a_price_rises_while_requests_are_kept_out_that_would_have_had_room():
    price = Price()
    is_admitted(price, 1.0, 0.5)
    found = [is_admitted(price, 10.0, 0.9) for _ in range(1000)]
    assert not found[0]
    assert found[-1]


def test_a_price_does_not_follow_requests_that_would_not_have_had_room_anyway():
    price = Price()
    is_admitted(price, 1.0, 0.5)
    for _ in range(1000):
        assert not is_admitted(price, 10.0, 1.1)
    assert not is_admitted(price, 10.0, 0.9)


def outcomes(cluster, make, **config):
    """Decisions on a long prompt after short ones have filled 60 % of the objective with waiting prefills."""
    c = cluster(make.node("p", "prefill"), make.node("d", "decode", capacity_tokens=100_000), ttft_slo_s=10.0, **config)
    c.learn("p", per_token_s=1e-3, step_s=0.01)
    for i in range(60):
        assert isinstance(c.send(make.request(f"r{i}", prompt=100, new=10))[0], Place)
    return c.send(make.request("long", prompt=2000, new=10))[0]


def test_under_load_learned_lengths_keep_a_long_prompt_out_and_uniform_ones_do_not(cluster, make):
    rejected = outcomes(cluster, make, admission_mode="predicted")
    assert isinstance(rejected, Reject)
    assert rejected.reason == "ttft"
    assert isinstance(outcomes(cluster, make, admission_mode="predicted", prefill_reserve=0.0), Place)
    assert isinstance(outcomes(cluster, make, admission_mode="predicted-uniform"), Place)
