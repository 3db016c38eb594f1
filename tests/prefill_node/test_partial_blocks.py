"""A conversation's partial last block: the next turn computes nothing that was computed before, to the token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine import Model
from kvpool import node_metrics

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]
BLOCK = 8


@pytest.mark.parametrize("forget", [False, True], ids=["blocks still here", "all from the pool"])
async def test_each_turn_reuses_all_before_it_to_the_token(
    forget: bool, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    history = prompt(5)  # not even one block
    computed = 0
    for turn, num_answer in enumerate([2, 1, 3, 12, 8, 5, 13, 9]):
        answer = await pair.ask(history, f"turn {turn}", max_tokens=num_answer)
        assert answer.token_ids == greedy(model, history, num_answer)
        assert answer.cached_tokens == computed
        computed = len(history) + num_answer - 1  # an answer's last token is never fed back
        history = [*history, *answer.token_ids, *prompt(1 + 5 * turn, seed=turn)]
        if forget:
            pair.forget()
    assert "digest_mismatches" not in pair.prefill.node.counters.snapshot()


async def test_a_tail_of_another_course_is_not_used(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    first = await pair.ask(prompt(20), "first")
    history = [*prompt(20), *first.token_ids]
    for name, edited in (("an answer edited", [*history[:-3], 7]), ("a question edited", [*history[:18], 9])):
        turn = [*edited, *prompt(4, seed=1)]
        answer = await pair.ask(turn, name)
        assert answer.token_ids == greedy(model, turn, 12)
        assert answer.cached_tokens == (len(edited) - 1) // BLOCK * BLOCK


async def test_several_turns_may_go_on_from_one_tail_at_once(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    first = await pair.ask(prompt(20), "first")
    turns = [[*prompt(20), *first.token_ids, *prompt(3 + i, seed=i)] for i in range(3)]
    answers = [await pair.frontend.submit(pair.submit(turn, f"turn {i}")) for i, turn in enumerate(turns)]
    for turn, answer in zip(turns, answers, strict=True):
        await answer.ended.wait()
        assert answer.token_ids == greedy(model, turn, 12)
        assert answer.cached_tokens == 31
    await pair.at_rest()


async def test_a_tail_that_a_longer_one_replaces_leaves_the_pool(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True)
    history = prompt(17)
    for turn in range(3):
        answer = await pair.ask(history, f"turn {turn}", max_tokens=2)
        history = [*history, *answer.token_ids, 3]
    await pair.at_rest()  # the last one is stored
    # 17 + 2, 20 + 2, 23 + 2 tokens, but for the last one: three whole blocks, and no partial one is left.
    assert node_metrics.validate(pair.pool)["counts"]["blocks"] == 3


async def test_the_same_prompt_again_computes_its_last_token_alone(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    for time, cached in enumerate((0, 20, 20, 20)):
        answer = await pair.ask(prompt(21), f"time {time}", max_tokens=1)  # nothing is decoded elsewhere
        assert answer.token_ids == greedy(model, prompt(21), 1)
        assert answer.cached_tokens == cached


async def test_a_scored_prompt_uses_no_tail(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True)
    await pair.ask(prompt(21), "first", max_tokens=1)
    submit = pair.submit(prompt(21), "scored", max_tokens=1)
    submit.sampling.prompt_logprobs = 0
    scored = await pair.frontend.submit(submit)
    await scored.ended.wait()
    assert scored.failures == []
    assert scored.cached_tokens == 0
    assert len(scored.messages[0].prompt_logprobs.logprobs) == 4 * 20


async def test_any_number_of_dialogues_may_end_after_one_shared_block(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True)
    histories = [[*prompt(10), *prompt(2, seed=i)] for i in range(9)]
    for i, history in enumerate(histories):
        first = await pair.ask(history, f"first {i}", max_tokens=3)
        history += [*first.token_ids, 7]
    for i, history in enumerate(histories):
        submit = pair.submit(history, f"second {i}", max_tokens=2)
        submit.placement.reuse_blocks = 1  # as the conductor knows
        second = await pair.frontend.submit(submit)
        await second.ended.wait()
        assert second.failures == []
        assert second.cached_tokens == 14
    await pair.at_rest()


async def test_a_holder_that_has_lost_its_blocks_hides_no_tail(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True)
    await pair.ask(prompt(5, seed=9), "short", max_tokens=1)  # a tail that begins a prompt
    first = await pair.ask(prompt(17), "first", max_tokens=3)
    pair.forget()
    submit = pair.submit([*prompt(17), *first.token_ids, *prompt(20, seed=1)], "second")
    stale = submit.placement.holders.add(first_block=0, num_blocks=4)
    stale.pool.node_id, stale.pool.target = "other", pair.prefill.node.config.pool_target
    second = await pair.frontend.submit(submit)
    await second.ended.wait()
    assert second.failures == []
    assert second.cached_tokens == 19
    await pair.at_rest()


async def test_a_turn_that_is_given_up_leaves_the_tail_it_went_on_from(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True)
    first = await pair.ask(prompt(17), "first", max_tokens=3)
    history = [*prompt(17), *first.token_ids]
    for name in ("given up", "again"):
        request = await pair.frontend.submit(pair.submit([*history, 7], name, max_tokens=200))
        await request.reaches(5)
        assert request.cached_tokens == 19
        for node in ("prefill", "decode"):
            await pair.frontend.cancel(node, name, 1)
        await pair.at_rest()


async def test_an_answer_is_stored_where_its_prompt_is(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True, pool_target="")  # the decode node's host has no pool node at all
    history = prompt(17)
    computed = 0
    for turn in range(3):
        submit = pair.submit(history, f"turn {turn}", max_tokens=12)
        submit.placement.pool.node_id = "pool"
        submit.placement.pool.target = pair.prefill.node.config.pool_target
        answer = await pair.frontend.submit(submit)
        await answer.ended.wait()
        await pair.at_rest()
        assert answer.failures == []
        assert answer.cached_tokens == computed
        computed = len(history) + 11
        history = [*history, *answer.token_ids, 3]


async def test_the_pool_is_told_what_its_blocks_cost(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True)
    await pair.ask(prompt(17), "first", max_tokens=12)
    costs = [block.dram.cost_s for block in pair.pool.core.store.index]
    assert len(costs) == 4  # two whole ones of the prompt, a third with the answer's begin, and its end
    assert all(0 < cost < 60 for cost in costs)
