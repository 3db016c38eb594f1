"""Requests that other conductors placed, as far as the nodes' reports describe them."""

import pytest

from conductor.policy.events import NS, Held
from conductor.policy.replication import SeenShare


def queue_s(c, node_id="prefill-0"):
    return next(seconds for node, seconds, _ in c.conductor.loads_of_nodes() if node.node_id == node_id)


def other(name="other", *, prompt=4000, remaining=4000):
    return Held(name, 0, remaining_prefill_tokens=remaining, prompt_tokens=prompt, decode_node="decode-0")


def test_a_request_of_another_conductor_takes_the_time_of_the_tokens_that_it_computes(cluster):
    found = []
    for remaining in (4000, 200):
        c = cluster()
        c.learn("prefill-0")
        c.holds("prefill-0", other(remaining=remaining))
        found.append(queue_s(c))
    assert found[0] == pytest.approx(4.0, rel=0.1)
    assert found[1] == pytest.approx(0.2, rel=0.1)


def test_requests_for_each_own_one_are_those_of_all_conductors():
    seen = SeenShare(60.0)
    assert (seen.requests_per_own, seen.has_others(NS)) == (1.0, False)
    for _ in range(10):
        seen.placed_here(NS)
    for _ in range(30):
        seen.placed_elsewhere(NS)
    assert seen.requests_per_own == pytest.approx(4.0)
    assert seen.has_others(NS)
    seen.placed_here(601 * NS)
    assert seen.requests_per_own == pytest.approx(1.0, abs=0.01)
    assert not seen.has_others(601 * NS)


def test_a_conductor_without_requests_of_its_own_assumes_a_bounded_number():
    seen = SeenShare(60.0)
    for _ in range(1000):
        seen.placed_elsewhere(NS)
    assert seen.requests_per_own == 17.0
