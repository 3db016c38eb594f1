"""Requests with a rolling window are predicted and charged by what their tokens see, not by the whole prompt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from conductor.policy.costs import prefill_s
from conductor.policy.decisions import Place
from conductor.policy.events import Held, NodeReported, PrefillSample, RequestCompleted
from conductor.policy.fairness import NS, Charge, Prices, Shares

PROMPT = 100_000
WINDOW = 1_024


def brute_force(fixed: float, per_token: float, per_pair: float, prompt: int, window: int) -> float:
    """Sum over the tokens of what each sees; as in the formula, a token among the first ones sees half of itself."""
    return fixed + sum(per_token + per_pair * min(token + 0.5, window) for token in range(prompt))


@pytest.mark.parametrize(("prompt", "window"), [(300, 0), (300, 500), (300, 300), (300, 100), (1000, 64)])
def test_the_formula_is_the_sum_over_the_tokens(prompt: int, window: int) -> None:
    cost = 0.1, 1e-3, 1e-5
    assert prefill_s(*cost, prompt, 0, window) == pytest.approx(brute_force(*cost, prompt, window or prompt))


def learned(cluster: Any, **config: Any) -> Any:
    """A cluster whose prefills take 1 ms per token and 1 µs per pair."""
    c = cluster(**config)
    prefills = tuple(
        PrefillSample(new, reused, prefill_s(0, 1e-3, 1e-6, new + reused, reused))
        for new in (64, 512, 4096)
        for reused in (0, 1024, 4096)
    )
    c.send(NodeReported("prefill-0", prefills=prefills * 40))
    c.send(NodeReported("prefill-1", prefills=prefills * 40))
    return c


def test_a_long_prompt_takes_as_long_as_its_window_makes_each_token(cluster: Any, make: Any) -> None:
    c = learned(cluster, admission_mode="none")
    request = make.request(prompt=PROMPT, new=8, window_tokens=WINDOW, endless=True)
    (placed,) = c.send(request)
    assert isinstance(placed, Place)
    assert placed.predicted_ttft_s == pytest.approx(brute_force(0, 1e-3, 1e-6, PROMPT, WINDOW), rel=0.1)
    assert "prefill" not in placed.extrapolated  # no token sees more than was measured
    c.send(RequestCompleted("r", 0, "cancelled"))


def queued_s(cluster: Any, held: Held) -> float:
    c = learned(cluster)
    c.holds("prefill-0", held)
    (found,) = (seconds for node, seconds, _ in c.conductor.loads_of_nodes() if node.node_id == "prefill-0")
    c.holds("prefill-0")
    return float(found)


@pytest.mark.parametrize("computed", [0, 50_000, PROMPT - WINDOW - 1])
def test_a_prompt_that_another_conductor_placed_takes_as_long(cluster: Any, computed: int) -> None:
    """A worker reports how much is left of it, and how much of it it holds at most."""
    left = PROMPT - computed
    held = Held("theirs", 0, remaining_prefill_tokens=left, prompt_tokens=WINDOW, decode_node="decode-0")
    assert queued_s(cluster, held) == pytest.approx(brute_force(0, 1e-3, 1e-6, left, WINDOW), rel=0.1)


def test_a_tenant_is_charged_for_what_is_visible() -> None:
    prices = Prices((0.0, 1e-3, 1e-6), (0.01, 0.0, 1e-6), 0.01, max_batch=4, num_blocks=1000)

    def charged_s(window: int) -> float:
        shares = Shares(itertools.count(), 4, lambda _: None)
        account = shares.account("a", lambda _: False)
        charge = Charge(shares, account, prices, PROMPT, 0, 0, num_blocks=64, is_endless=True, window_tokens=window)
        charge.open(0, 0)
        charge.begin(0)
        charge.close(100 * NS, generated=1000, cached_tokens=None, is_lost=False)
        return charge.charged_ns / NS

    step_s = (0.01 + 4 * WINDOW * 1e-6) / 4
    expected = brute_force(0, 1e-3, 1e-6, PROMPT, WINDOW) + 1000 * step_s + 64 * 100 / 1000
    assert charged_s(WINDOW) == pytest.approx(expected, rel=1e-3)
    assert charged_s(0) > 20 * expected
