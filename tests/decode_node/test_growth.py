"""Answers that begin with fewer pages than they may need get more as they go on: right tokens, and nobody stuck."""

from collections.abc import Callable
from typing import Any

import pytest

BLOCK = 8


@pytest.mark.parametrize("reserve_tokens", [1, 80])
async def test_an_answer_that_takes_more_than_was_reserved_has_the_references_tokens(
    reserve_tokens: int, start_pair: Callable[..., Any], prompt: Any, greedy: Any, model: Any
) -> None:
    pair = await start_pair()
    ids = prompt(61)
    submit = pair.submit(ids, "r", max_tokens=60)
    submit.placement.reserve_tokens = reserve_tokens
    request = await pair.frontend.submit(submit)
    await request.ended.wait()
    assert request.failures == []
    assert request.token_ids == greedy(model, ids, 60)
    await pair.at_rest()


async def test_more_answers_than_there_are_pages_for_all_end(
    start_pair: Callable[..., Any], prompt: Any, greedy: Any, model: Any
) -> None:
    pair = await start_pair(capacity_tokens=40 * BLOCK)
    asked = [prompt(20 + i, seed=i) for i in range(8)]  # 3 or 4 pages each, and up to 12 or 13: 100 of 40 at the worst
    submits = [pair.submit(ids, f"r{i}", max_tokens=80) for i, ids in enumerate(asked)]
    for submit in submits:
        submit.placement.reserve_tokens = 1
    requests = [await pair.frontend.submit(submit) for submit in submits]
    for ids, request in zip(asked, requests, strict=True):
        await request.ended.wait()
        assert request.failures == []
        assert request.token_ids == greedy(model, ids, 80)
    counted = pair.decode.node.counters.snapshot()
    assert counted["kv_growth_waits"] > 0
    await pair.at_rest()
