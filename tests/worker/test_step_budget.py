"""Prompt tokens of steps beside decoding sequences: as many as a bound on the step's time allows."""

from hypothesis import given
from hypothesis import strategies as st

from worker.policy import StepBudget

BLOCK = 16


def test_without_a_bound_or_knowledge_all_are_allowed() -> None:
    assert StepBudget(0.0, BLOCK).tokens(512) == 512
    assert StepBudget(0.05, BLOCK).tokens(512) == 512
    free = StepBudget(0.0, BLOCK)
    free.observe(1, 512, 10.0)
    assert free.tokens(512) == 512


@given(
    decode_ms=st.floats(0.1, 40), token_us=st.floats(1, 2000), bound_ms=st.floats(1, 100), most=st.integers(16, 4096)
)
def test_a_step_keeps_the_bound_or_has_one_block(decode_ms: float, token_us: float, bound_ms: float, most: int) -> None:
    budget = StepBudget(bound_ms / 1e3, BLOCK)
    for _ in range(20):
        budget.observe(4, 0, decode_ms / 1e3)
        budget.observe(4, 64, decode_ms / 1e3 + 64 * token_us / 1e6)
    tokens = budget.tokens(most)
    assert BLOCK <= tokens <= most
    assert tokens == most or tokens % BLOCK == 0
    took_ms = decode_ms + tokens * token_us / 1e3
    assert tokens == BLOCK or took_ms <= bound_ms * 1.001
    if tokens < most:
        assert decode_ms + (tokens + BLOCK) * token_us / 1e3 > bound_ms * 0.999, "no more would have kept it"


def test_what_becomes_slower_counts_at_once_and_what_becomes_faster_by_and_by() -> None:
    budget = StepBudget(0.1, BLOCK)
    budget.observe(0, 100, 0.1)  # 1 ms per token
    assert budget.tokens(4096) == 96
    budget.observe(0, 100, 0.2)
    assert budget.tokens(4096) == 48
    budget.observe(0, 100, 0.1)
    assert 48 <= budget.tokens(4096) < 96
    for _ in range(20):
        budget.observe(0, 100, 0.1)
    assert budget.tokens(4096) == 96
