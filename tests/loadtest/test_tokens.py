"""Text per block id: the same for ever, real, exact in tokens; prompts that share beginnings as the trace's do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.errors import PromptPlanError
from loadtest.plan import PlannedRequest, PlanSettings, plan_requests, scaled_output_tokens, scaled_prompt_tokens
from loadtest.tokens import ModelTokens, TextBook, block_text
from traces import Trace, TraceRow, load_conversation, sample_families, token_hit_rate


def settings_of(tokens: ModelTokens, **changes: object) -> PlanSettings:
    values = {"tokens_per_block": 8, "max_model_len": 2048, "bos": tokens.bos}
    return PlanSettings(**(values | changes))  # type: ignore[arg-type]


def test_the_text_of_an_id_never_changes() -> None:
    assert block_text(0, 1, 8).startswith(" Vacant, soft sheep gather jokes; lakes respect quiet pupils.")
    assert block_text(1, 1, 8) != block_text(0, 1, 8)


@given(st.integers(0, 2**40), st.integers(0, 9), st.integers(1, 60), st.integers(1, 60))
def test_text_for_fewer_words_begins_the_text_for_more(block_id: int, seed: int, a: int, b: int) -> None:
    short, long = sorted((block_text(seed, block_id, a), block_text(seed, block_id, b)), key=len)
    assert long.startswith(short)
    assert len(block_text(seed, block_id, a).split()) >= a


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=8), st.sampled_from([2, 8, 16, 64]))
def test_equal_ids_are_equal_tokens_in_any_order_of_making(
    tokens: ModelTokens, block_ids: list[int], tokens_per_block: int
) -> None:
    together = TextBook(tokens, tokens_per_block=tokens_per_block, seed=0)
    together.prepare(block_ids)
    alone = TextBook(tokens, tokens_per_block=tokens_per_block, seed=0)
    for block_id in reversed(block_ids):
        assert len(alone.block(block_id)) == tokens_per_block
        assert np.array_equal(together.block(block_id), alone.block(block_id))


def test_tokens_decode_to_the_text(tokens: ModelTokens) -> None:
    book = TextBook(tokens, tokens_per_block=32, seed=0)
    text = tokens.tokenizer.decode(book.block(5).tolist())
    assert block_text(0, 5, 32).strip().startswith(text.strip())


def test_a_tokenizer_that_swallows_words_is_refused() -> None:
    class Silent:
        def encode_all(self, texts: list[str]) -> list[list[int]]:
            return [[1] for _ in texts]

    with pytest.raises(PromptPlanError, match="fewer than 8 tokens"):
        TextBook(Silent(), tokens_per_block=8, seed=0).block(1)


@given(st.integers(1, 200_000), st.sampled_from([2, 8, 16, 512]))
def test_scaling_keeps_full_blocks_full_and_partial_ones_partial(length: int, tokens_per_block: int) -> None:
    scaled = scaled_prompt_tokens(length, 512, tokens_per_block)
    assert scaled // tokens_per_block == length // 512
    assert (scaled % tokens_per_block > 0) == (length % 512 > 0)
    assert abs(scaled - length * tokens_per_block / 512) <= 1
    assert scaled_output_tokens(length, 512, tokens_per_block) >= 1


def test_at_512_tokens_per_block_lengths_are_the_traces_own() -> None:
    assert scaled_prompt_tokens(12_345, 512, 512) == 12_345
    assert scaled_output_tokens(343, 512, 512) == 343


def hit_rate_of_tokens(requests: list[PlannedRequest], block: int) -> float:
    """Reuse by the prompts' own bytes, as a paged cache would find it."""
    seen: set[bytes] = set()
    reused = 0
    for request in requests:
        prompt, known = request.prompt, 0
        while known < (len(prompt) - 1) // block and prompt[: block * (known + 1)].tobytes() in seen:
            known += 1
        reused += block * known
        seen.update(prompt[:end].tobytes() for end in range(block, len(prompt) + 1, block))
    return reused / sum(len(r.prompt) for r in requests)


def test_prompts_share_beginnings_exactly_where_the_trace_does(tokens: ModelTokens) -> None:
    trace = sample_families(load_conversation(), 0.1)
    requests = plan_requests(trace, TextBook(tokens, tokens_per_block=8, seed=0), settings_of(tokens))
    ideal = token_hit_rate([(r.block_ids, len(r.prompt)) for r in requests], 8)
    assert ideal == pytest.approx(0.372, abs=0.001)
    assert hit_rate_of_tokens(requests, 8) == ideal


def test_bos_comes_first_and_shifts_no_later_block(tokens: ModelTokens) -> None:
    trace = Trace("t", (TraceRow(0, 0, 512 * 3, 1, (0, 1, 2)),))
    book = TextBook(tokens, tokens_per_block=8, seed=0)
    with_bos = plan_requests(trace, book, settings_of(tokens))[0].prompt
    without = plan_requests(trace, book, settings_of(tokens, bos=()))[0].prompt
    assert tokens.bos == (0,)
    assert with_bos[0] == 0
    assert np.array_equal(with_bos[1:8], without[:7])
    assert np.array_equal(with_bos[8:], without[8:])
    assert len(with_bos) == len(without) == 24


def test_partial_tails_of_different_rows_differ(tokens: ModelTokens) -> None:
    rows = (TraceRow(0, 0, 812, 1, (0, 1)), TraceRow(1, 0, 812, 1, (0, 2)))
    first, second = plan_requests(
        Trace("t", rows), TextBook(tokens, tokens_per_block=16, seed=0), settings_of(tokens, tokens_per_block=16)
    )
    assert len(first.prompt) == len(second.prompt) == 25
    assert np.array_equal(first.prompt[:16], second.prompt[:16])
    assert not np.array_equal(first.prompt[16:], second.prompt[16:])


def test_overlong_prompts_keep_their_head_and_are_marked(tokens: ModelTokens) -> None:
    trace = Trace("t", (TraceRow(0, 0, 512 * 20, 640, tuple(range(20))),))
    book = TextBook(tokens, tokens_per_block=8, seed=0)
    (whole,) = plan_requests(trace, book, settings_of(tokens))
    (cut,) = plan_requests(trace, book, settings_of(tokens, max_model_len=100))
    assert (whole.overlong, cut.overlong) == (False, True)
    assert len(cut.prompt) + cut.max_tokens == 100
    assert np.array_equal(cut.prompt, whole.prompt[:90])
    assert cut.block_ids == whole.block_ids[:11]


def test_the_plan_is_the_same_every_time_and_seeds_differ(tokens: ModelTokens, small_trace: Trace) -> None:
    def plan(**changes: object) -> list[PlannedRequest]:
        return plan_requests(small_trace, TextBook(tokens, tokens_per_block=8, seed=0), settings_of(tokens, **changes))

    first, again = plan(), plan()
    assert [(r.seed, r.temperature, r.prompt.tolist()) for r in first] == [
        (r.seed, r.temperature, r.prompt.tolist()) for r in again
    ]
    assert len({r.seed for r in first}) == len(first)
    assert all(0 <= r.seed < 2**31 for r in first)
    assert 0 < sum(r.temperature > 0 for r in first) < len(first)
    assert all(r.temperature == 0 for r in plan(sampled_fraction=0.0))
    assert all(r.temperature == 0.8 for r in plan(sampled_fraction=1.0))


@pytest.mark.parametrize(
    ("changes", "said"), [({"tokens_per_block": 2}, "at least 3"), ({"max_model_len": 15}, "room")]
)
def test_settings_without_room_are_refused(
    tokens: ModelTokens, small_trace: Trace, changes: dict[str, int], said: str
) -> None:
    book = TextBook(tokens, tokens_per_block=changes.get("tokens_per_block", 8), seed=0)
    with pytest.raises(PromptPlanError, match=said):
        plan_requests(small_trace, book, settings_of(tokens, **changes))


def test_a_block_is_made_once(tokens: ModelTokens) -> None:
    calls: list[int] = []

    class Counting:
        def encode_all(self, texts: list[str]) -> list[list[int]]:
            calls.append(len(texts))
            return tokens.encode_all(texts)

    book = TextBook(Counting(), tokens_per_block=8, seed=0)
    book.prepare([1, 2, 1])
    book.prepare([2, 1])
    book.block(2)
    assert calls == [2]
