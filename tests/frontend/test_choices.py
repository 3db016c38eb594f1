"""Several answers per prompt: their order, what they share, when they begin."""

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from moonpool_proto.v1 import conductor_pb2, worker_pb2

LENGTH = worker_pb2.FINISH_LENGTH
IdsOf = Callable[[str], list[int]]


async def test_answers_are_ordered_by_prompt_then_by_choice(
    cluster: Any, front: Any, ids_of: IdsOf, prompt_of: Any
) -> None:
    words = {ids_of("the fox")[-1]: ids_of(" jumps"), ids_of("the cat")[-1]: ids_of(" sat")}

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        ids = words[prompt_of(submit)[-1]]
        return ids * (submit.sampling.choice + 1), LENGTH

    cluster.answer_with(answer)
    body = {"prompt": ["the fox", "the cat"], "n": 2, "best_of": 2, "max_tokens": 30, "seed": 5}
    status, whole = await front.post("/v1/completions", body)
    assert status == 200, whole
    told = [(choice["index"], choice["text"]) for choice in whole["choices"]]
    assert told == [(0, " jumps"), (1, " jumps jumps"), (2, " sat"), (3, " sat sat")]
    assert len({stats["request_id"] for stats in whole["moonpool"]}) == 4
    texts = dict.fromkeys(range(4), "")
    for chunk in await front.events("/v1/completions", body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.items()) == told
    await front.quiet()


async def test_usage_counts_a_prompt_once_and_every_answer(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    cluster.answer_with(lambda submit: ([20, 21, 22], LENGTH))
    prompt = ids_of("the quick brown fox jumps over")
    body = {"prompt": prompt, "n": 3, "max_tokens": 3, "stream_options": {"include_usage": True}}
    _, whole = await front.post("/v1/completions", body)
    assert whole["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 9,
        "total_tokens": len(prompt) + 9,
        "prompt_tokens_details": {"cached_tokens": min(8, len(prompt))},
    }
    *_, last = await front.events("/v1/completions", body)
    assert last["usage"] == whole["usage"]


async def test_answers_have_one_seed_and_a_number_each(cluster: Any, front: Any) -> None:
    seen: list[tuple[int, int]] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append((submit.sampling.seed, submit.sampling.choice))
        return [20], LENGTH

    cluster.answer_with(answer)
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 1}
    _, whole = await front.post("/v1/chat/completions", chat)
    seeds = {seed for seed, _ in seen}
    assert len(seeds) == 1
    assert sorted(choice for _, choice in seen) == [0, 1, 2]
    assert {stats["seed"] for stats in whole["moonpool"]} == seeds
    assert [choice["message"]["role"] for choice in whole["choices"]] == ["assistant"] * 3


@pytest.mark.parametrize("stream", [False, True])
async def test_further_answers_begin_when_the_first_has_a_token(cluster: Any, front: Any, stream: bool) -> None:
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    body = {"prompt": "the cat", "n": 3, "max_tokens": 2, "stream": stream}
    asking = asyncio.create_task(front.http.post(front.url + "/v1/completions", json=body))
    first = await prefill.submitted()
    assert first.sampling.choice == 0
    assert prefill.submits.empty()
    assert len(cluster.conductor.scheduled) == 1
    prefill.send(first, 0, [20], cached=0)
    others = [await prefill.submitted() for _ in range(2)]
    assert sorted(submit.sampling.choice for submit in others) == [1, 2]
    for submit in others:
        prefill.send(submit, 0, [20], cached=4)
    for submit in (first, *others):
        decode.send(submit, 1, [21], finish=LENGTH)
    async with await asking as response:
        assert response.status == 200
        await response.read()
    await front.quiet()


async def test_further_answers_wait_for_a_place_where_the_first_has_one(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20], LENGTH))
    refusals = iter([True, True, False])

    def place(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        if len(cluster.conductor.scheduled) > 1 and next(refusals):
            return conductor_pb2.ScheduleReply(rejection=conductor_pb2.Rejection(reason="ttft", retry_after_s=1.0))
        return cluster.placement("p0", "d0")

    cluster.conductor.place = place
    status, whole = await front.post("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 1})
    assert (status, len(whole["choices"])) == (200, 2)
    assert len(cluster.conductor.scheduled) == 4


async def test_a_client_that_leaves_ends_all_its_answers(cluster: Any, front: Any) -> None:
    prefill = cluster.workers["p0"]
    opening = front.open_stream("/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 9})
    first = await prefill.submitted()
    prefill.send(first, 0, [20], cached=0)
    stream = await opening
    others = [await prefill.submitted() for _ in range(2)]
    stream.close()
    cancelled = {await prefill.cancelled() for _ in range(3)}
    assert cancelled == {submit.request_id for submit in (first, *others)}
    await front.quiet()


async def test_the_wait_for_the_first_answer_is_not_told_as_the_clusters_time(cluster: Any, front: Any) -> None:
    prefill = cluster.workers["p0"]
    begun_s = monotonic()
    asking = asyncio.create_task(front.post("/v1/completions", {"prompt": "a", "n": 2, "max_tokens": 1}))
    first = await prefill.submitted()
    await asyncio.sleep(0.5)  # the first answer's prefill takes its time
    prefill.send(first, 0, [20], finish=LENGTH, cached=0)
    prefill.send(await prefill.submitted(), 0, [20], finish=LENGTH, cached=4)
    await asking
    told = [(await cluster.conductor.completion()).ttft_s for _ in range(2)]
    assert max(told) >= 0.5
    assert sum(told) <= monotonic() - begun_s
