"""Running answers make room for requests of a more urgent class, and go on later with the same tokens."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from moonpool_proto.v1.worker_pb2 import Submit
from tests.worker.node_pair import Pair

BLOCK = 8
CAPACITY = 40  # pages: one of these answers takes 35
LENGTH, TOKENS = 40, 240  # so many that no answer ends before the next request arrives


def asked(pair: Pair, prompt: list[int], name: str, level: int, **options: Any) -> Submit:
    submit = pair.submit(prompt, name, max_tokens=TOKENS, **options)
    submit.preemptible = True
    submit.placement.turn.level, submit.placement.turn.ages_in_s = level, 60.0
    return submit


@pytest.mark.parametrize("reserve_tokens", [0, 1])
async def test_a_preempted_answer_goes_on_from_its_saved_kv_with_the_same_tokens(
    reserve_tokens: int, start_pair: Callable[..., Any], prompt: Any, greedy: Any, model: Any
) -> None:
    pair = await start_pair(pool=True, capacity_tokens=CAPACITY * BLOCK)
    slow, urgent = prompt(LENGTH), prompt(LENGTH, seed=1)
    submit = asked(pair, slow, "slow", 2)
    submit.placement.reserve_tokens = reserve_tokens * (LENGTH + TOKENS)
    first = await pair.frontend.submit(submit)
    await first.reaches(5)
    second = await pair.frontend.submit(asked(pair, urgent, "urgent", 1))
    await first.ended.wait()
    assert [failure.code for failure in first.failures] == ["preempted"]
    assert first.failures[0].retryable
    generated = first.token_ids
    assert 5 <= len(generated) < TOKENS
    await second.ended.wait()
    assert second.token_ids == greedy(model, urgent, TOKENS)
    assert pair.decode.node.counters.snapshot()["preemptions"] == 1
    await pair.at_rest()
    pair.forget()  # so that its KV can only come from the pool
    again = asked(pair, slow + generated, "slow", 2, attempt=2, generated=len(generated))
    rest = await pair.frontend.submit(again)
    await rest.ended.wait()
    assert rest.failures == []
    tokens = generated + [rest.tokens[i] for i in sorted(rest.tokens)]
    assert tokens == greedy(model, slow, TOKENS)
    # All but the last token, whose KV had not been computed.
    assert rest.cached_tokens >= LENGTH + len(generated) - 2
    await pair.at_rest()


@pytest.mark.parametrize(
    "change",
    [
        {"level": 1},  # the same class
        {"level": 2, "preemptible": False},  # an older frontend
        {"level": 2, "ages_in_s": 0.0},  # it has waited so long that nothing precedes it
        {"level": 2, "preemption": "off"},
    ],
)
async def test_other_answers_are_not_preempted(
    change: dict[str, Any], start_pair: Callable[..., Any], prompt: Any
) -> None:
    pair = await start_pair(capacity_tokens=CAPACITY * BLOCK, preemption=change.get("preemption", "on"))
    submit = asked(pair, prompt(LENGTH), "slow", change["level"])
    submit.preemptible = change.get("preemptible", True)
    submit.placement.turn.ages_in_s = change.get("ages_in_s", 60.0)
    first = await pair.frontend.submit(submit)
    await first.reaches(5)
    second = await pair.frontend.submit(asked(pair, prompt(LENGTH, seed=1), "urgent", 1))
    await asyncio.gather(first.ended.wait(), second.ended.wait())
    assert first.failures == second.failures == []
    assert "preemptions" not in pair.decode.node.counters.snapshot()
    await pair.at_rest()


async def test_nobody_is_preempted_for_a_request_that_would_not_fit(
    start_pair: Callable[..., Any], prompt: Any
) -> None:
    """One answer has aged, so that the pages of the other one, which ends first, are not enough."""
    pair = await start_pair(capacity_tokens=56 * BLOCK)
    for name, seed, tokens, ages_in_s in (("old", 0, TOKENS, 0.0), ("slow", 1, 30, 60.0)):  # 35 and 9 pages
        submit = asked(pair, prompt(LENGTH, seed=seed), name, 2)
        submit.sampling.max_tokens = tokens
        submit.placement.turn.ages_in_s = ages_in_s
        await (await pair.frontend.submit(submit)).reaches(3)
    urgent = pair.submit(prompt(LENGTH, seed=2), "urgent", max_tokens=190)  # 29 pages
    urgent.placement.turn.level, urgent.placement.turn.ages_in_s = 1, 60.0
    third = await pair.frontend.submit(urgent)
    await third.ended.wait()
    assert all(not request.failures for request in pair.frontend.requests.values())
    assert "preemptions" not in pair.decode.node.counters.snapshot()
    await pair.at_rest()
