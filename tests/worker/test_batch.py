"""Planning a step: decodes first, then prompts in order, chunks that end on block borders."""

from hypothesis import given
from hypothesis import strategies as st

from worker.policy import BatchLimits, plan_step

LIMITS = BatchLimits(max_batch=4, chunk_tokens=32, block_tokens=8)


def test_a_step_while_kv_arrives_has_as_many_tokens_as_are_reused_within_bounds() -> None:
    assert [LIMITS.while_arriving(reused).chunk_tokens for reused in (8, 32, 100, 256, 999)] == [32, 32, 100, 256, 256]


def test_nothing_to_do_is_an_empty_plan() -> None:
    assert plan_step([], [], LIMITS).is_empty


def test_decodes_and_a_prompt_share_a_step() -> None:
    plan = plan_step([5, 3], [(0, 20)], LIMITS)
    assert plan.decode == (0, 1)
    assert [(c.start, c.end, c.last) for c in plan.prefill] == [(0, 20, True)]


def test_a_full_batch_of_decodes_leaves_prompts_waiting() -> None:
    plan = plan_step([9] * 6, [(0, 8)], LIMITS)
    assert plan.decode == (0, 1, 2, 3)
    assert plan.prefill == ()


def test_pure_decode_may_be_repeated_until_the_first_end() -> None:
    assert plan_step([5, 3, 7], [], LIMITS).valid_steps == 3


def test_a_chunk_that_is_not_the_last_ends_on_a_block_border() -> None:
    limits = BatchLimits(max_batch=4, chunk_tokens=30, block_tokens=8)
    assert [(c.start, c.end) for c in plan_step([], [(0, 100)], limits).prefill] == [(0, 24)]


def test_a_budget_smaller_than_a_block_still_advances() -> None:
    limits = BatchLimits(max_batch=4, chunk_tokens=3, block_tokens=8)
    assert [(c.start, c.end) for c in plan_step([], [(8, 100)], limits).prefill] == [(8, 16)]


@given(
    prompts=st.lists(st.integers(1, 200), max_size=6),
    decodes=st.lists(st.integers(1, 50), max_size=6),
    chunk=st.integers(1, 64),
    block=st.sampled_from([1, 4, 8, 16]),
)
def test_every_prompt_is_computed_once_and_in_order(
    prompts: list[int], decodes: list[int], chunk: int, block: int
) -> None:
    limits = BatchLimits(max_batch=8, chunk_tokens=chunk, block_tokens=block)
    waiting = [(0, n) for n in prompts]
    for _ in range(sum(prompts) + 1):
        if not waiting:
            break
        plan = plan_step(decodes, waiting, limits)
        assert len(plan.decode) + len(plan.prefill) <= limits.max_batch
        assert plan.prefill
        assert [c.index for c in plan.prefill] == list(range(len(plan.prefill)))
        for c in plan.prefill:
            done, total = waiting[c.index]
            assert c.start == done < c.end <= total
            assert c.last == (c.end == total)
            assert c.last or c.end % block == 0
            waiting[c.index] = (c.end, total)
        waiting = [(d, n) for d, n in waiting if d < n]
    assert not waiting
