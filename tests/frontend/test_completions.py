"""Completions and chats over real HTTP: what is answered, streamed and not."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from frontend.tokenizer import Tokenizer
from kvpool import chain_keys, chain_seed
from moonpool_proto.v1 import worker_pb2

STOP, LENGTH = worker_pb2.FINISH_STOP, worker_pb2.FINISH_LENGTH
IdsOf = Callable[[str], list[int]]


async def test_an_end_that_only_a_newer_worker_knows_ends_the_answer(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    cluster.answer_with(lambda submit: (ids_of(" and the cat"), 99))
    status, body = await front.post("/v1/completions", {"prompt": "the quick brown fox", "max_tokens": 40})
    assert (status, body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (200, " and the cat", "length")


async def test_completion_returns_text_usage_and_facts(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    cluster.answer_with(lambda submit: ([*ids_of(" and the cat"), 1], STOP))
    status, body = await front.post(
        "/v1/completions", {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 40, "seed": 7}
    )
    assert status == 200
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (" and the cat", "stop", None)
    num_prompt = 1 + len(ids_of("the quick brown fox"))
    num_new = len(ids_of(" and the cat")) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": min(8, num_prompt)},
    }
    stats = body["moonpool"]
    assert (stats["attempts"], stats["prefill_node"], stats["decode_node"], stats["seed"]) == (1, "p0", "d0", 7)
    assert (stats["queue_s"], stats["load_s"], stats["prefill_s"]) == (0.5, 0.25, 0.125)
    assert [stats[f"cached_{tier}_tokens"] for tier in ("dram", "ssd", "remote")] == [4, 2, 1]
    assert body["object"] == "text_completion"
    assert "prompt_token_ids" not in choice
    completion = await cluster.conductor.completion()
    assert (completion.outcome, completion.generated, completion.attempt) == ("finished", num_new, 0)


async def test_the_cluster_is_asked_with_chain_keys_and_sampling(
    cluster: Any, front: Any, prompt_of: Any, tokenizer: Tokenizer
) -> None:
    seen: list[worker_pb2.Submit] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit)
        return [20], LENGTH

    cluster.answer_with(answer)
    body = {
        "prompt": list(range(10, 21)),
        "max_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "seed": -1,
        "stop_token_ids": [30],
        "cache_salt": "tenant-a",
        "priority": -3,
    }
    headers = {"x-slo-ttft-ms": "1500", "x-slo-class": "batch"}
    status, _ = await front.post("/v1/completions", body, headers=headers)
    assert status == 200
    submit, schedule = seen[0], cluster.conductor.scheduled[0]
    assert prompt_of(submit) == list(range(10, 21))
    seed = chain_seed("tenant-a", tokenizer.identity, 4)
    assert submit.chain_seed == seed
    assert submit.chain == chain_keys(seed, np.arange(10, 21, dtype=np.int32), 4).tobytes()
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert sampling.seed == 2**64 - 1
    assert list(sampling.stop_token_ids) == [1, 3, 30]
    assert (schedule.prompt_tokens, schedule.max_new_tokens, schedule.ttft_objective_s) == (11, 1, 1.5)
    assert (schedule.slo_class, schedule.priority) == ("batch", -3)
    assert schedule.chain == submit.chain


async def test_stream_sends_each_token_and_ends_with_usage_and_facts(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    ids = ids_of(" jumps over the lazy dog")
    cluster.answer_with(lambda submit: (ids, LENGTH))
    body = {"prompt": "the quick", "max_tokens": len(ids), "stream_options": {"include_usage": True}}
    *chunks, last = await front.events("/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " jumps over the lazy dog"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == len(ids)
    assert last["moonpool"]["attempts"] == 1
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1


async def test_stream_without_usage_tells_facts_in_its_last_chunk(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    chunks = await front.events("/v1/completions", {"prompt": "the", "max_tokens": 2})
    assert ["moonpool" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all("usage" not in chunk for chunk in chunks)


async def test_token_ids_are_returned_when_asked_for(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    ids = [*ids_of("你好"), 3]
    cluster.answer_with(lambda submit: (ids, STOP))
    prompt = [0, *ids_of("the fox")]
    body = {"prompt": "the fox", "max_tokens": 20, "return_token_ids": True}
    _, whole = await front.post("/v1/completions", body)
    assert whole["choices"][0]["token_ids"] == ids
    assert whole["choices"][0]["prompt_token_ids"] == prompt
    assert whole["choices"][0]["text"] == "你好"
    chunks = [chunk["choices"][0] for chunk in await front.events("/v1/completions", body)]
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == ids
    assert chunks[0]["prompt_token_ids"] == prompt
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


async def test_a_seed_is_drawn_and_told_where_none_is_given(cluster: Any, front: Any) -> None:
    seeds: list[int] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seeds.append(submit.sampling.seed)
        return [20], LENGTH

    cluster.answer_with(answer)
    told = [
        (await front.post("/v1/completions", {"prompt": "a", "max_tokens": 1}))[1]["moonpool"]["seed"] for _ in "ab"
    ]
    assert told == seeds
    assert told[0] != told[1]
    assert all(0 <= seed < 2**63 for seed in told)


async def test_several_prompts_give_a_choice_each(cluster: Any, front: Any, ids_of: IdsOf, prompt_of: Any) -> None:
    answers = {(0, *ids_of("the cat")): ids_of(" sat"), (0, *ids_of("the fox")): ids_of(" jumps over")}
    cluster.answer_with(lambda submit: (answers[tuple(prompt_of(submit))], LENGTH))
    body = {"prompt": ["the cat", "the fox"], "max_tokens": 30}
    _, whole = await front.post("/v1/completions", body)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, " sat"), (1, " jumps over")]
    assert whole["usage"]["prompt_tokens"] == sum(map(len, answers))
    assert len(whole["moonpool"]) == 2
    texts = {0: "", 1: ""}
    for chunk in await front.events("/v1/completions", body):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: " sat", 1: " jumps over"}
    await front.quiet()


async def test_chat_is_rendered_with_the_models_template(
    cluster: Any, front: Any, prompt_of: Any, tokenizer: Tokenizer
) -> None:
    prompts: list[list[int]] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        prompts.append(prompt_of(submit))
        return [20, 3], STOP

    cluster.answer_with(answer)
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "fox"}]},
    ]
    status, body = await front.post("/v1/chat/completions", {"messages": messages})
    assert status == 200
    assert body["choices"][0]["message"]["role"] == "assistant"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert tokenizer.decode(prompts[0], skip_special_tokens=False) == (
        "<|bos|><|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nthe\nfox<|im_end|>\n<|im_start|>assistant\n"
    )
    # As much as fits, where the client names no limit.
    assert cluster.conductor.scheduled[0].max_new_tokens == 512 - len(prompts[0])


async def test_stop_string_ends_the_text_and_cancels_the_workers(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    ids = ids_of(" the cat sat on the mat and")
    cluster.answer_with(lambda submit: (ids, 0))  # no finish: workers would go on
    body = {"prompt": "look:", "max_tokens": 100, "stop": ["sat on", "mat"]}
    chunks = await front.events("/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " the cat "
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"][0]["stop_reason"] == "sat on"
    request_id = chunks[-1]["moonpool"]["request_id"]
    assert await cluster.workers["p0"].cancelled() == request_id
    assert await cluster.workers["d0"].cancelled() == request_id
    assert (await cluster.conductor.completion()).outcome == "finished"


async def test_stop_token_of_the_client_is_counted_named_and_not_shown(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    ids = ids_of(" cat")
    stop_id = ids_of(" fox")[0]
    cluster.answer_with(lambda submit: ([*ids, stop_id], STOP))
    _, body = await front.post(
        "/v1/completions", {"prompt": "a", "stop_token_ids": [stop_id], "return_token_ids": True}
    )
    choice = body["choices"][0]
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == (" cat", stop_id, "stop")
    assert choice["token_ids"] == [*ids, stop_id]


@pytest.mark.parametrize("own", [[], [30]])
async def test_ignore_eos_leaves_only_the_clients_stop_tokens(cluster: Any, front: Any, own: list[int]) -> None:
    cluster.workers["p0"].on_submit = None
    seen: list[Any] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit.sampling)
        return [20], LENGTH

    cluster.answer_with(answer)
    await front.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "ignore_eos": True, "stop_token_ids": own})
    assert list(seen[0].stop_token_ids) == own


async def test_openai_client_completes_and_streams(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    cluster.answer_with(lambda submit: ([*ids_of(" naïve 🎉"), 1], STOP))
    async with openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(model="tiny", prompt="a", max_tokens=50)
        assert whole.choices[0].text == " naïve 🎉"
        chat = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hi"}])
        assert chat.choices[0].message.content == " naïve 🎉"
        assert chat.usage is not None
        assert chat.usage.prompt_tokens_details is not None
        assert chat.usage.prompt_tokens_details.cached_tokens == 8
        texts, roles, usage = [], [], None
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                roles.append(choice.delta.role)
                texts.append(choice.delta.content or "")
        assert "".join(texts) == " naïve 🎉"
        assert roles[0] == "assistant"
        assert usage is not None
        assert usage.completion_tokens == len(ids_of(" naïve 🎉")) + 1
        assert [model.id async for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError, match="not served here"):
            await client.completions.create(model="huge", prompt="a")


async def test_models_tell_the_clusters_limit(front: Any) -> None:
    status, text = await front.get("/v1/models")
    assert status == 200
    assert json.loads(text)["data"][0]["max_model_len"] == 512
    assert (await front.get("/v1/models/tiny"))[0] == 200
    assert (await front.get("/v1/models/other/one"))[0] == 404


async def test_tokenize_and_detokenize_are_inverse(front: Any, ids_of: IdsOf) -> None:
    text = "naïve 你好 🎉\x00 the fox"
    _, body = await front.post("/tokenize", {"prompt": text, "add_special_tokens": False, "return_token_strs": True})
    assert body["tokens"] == ids_of(text)
    assert (body["count"], body["max_model_len"]) == (len(body["tokens"]), 512)
    assert len(body["token_strs"]) == body["count"]
    _, back = await front.post("/detokenize", {"tokens": body["tokens"]})
    assert back["prompt"] == text
    _, chat = await front.post("/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    _, shown = await front.post("/detokenize", {"tokens": chat["tokens"]})
    assert shown["prompt"].startswith("<|bos|><|im_start|>user\nhi<|im_end|>")


async def test_aggregated_placement_takes_all_tokens_from_one_worker(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    worker = await cluster.add("a0")
    cluster.conductor.place = lambda request: cluster.placement("a0")
    ids = ids_of(" sat on the mat")

    async def on_submit(submit: worker_pb2.Submit) -> None:
        assert not submit.placement.HasField("decode")
        worker.send(submit, 0, ids, finish=LENGTH, cached=0)

    worker.on_submit = on_submit
    _, body = await front.post("/v1/completions", {"prompt": "the cat", "max_tokens": 30})
    assert body["choices"][0]["text"] == " sat on the mat"
    assert (body["moonpool"]["prefill_node"], body["moonpool"]["decode_node"]) == ("a0", "a0")


async def test_requests_share_one_stream_per_worker(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21, 22], LENGTH))
    for _ in range(3):
        assert (await front.post("/v1/completions", {"prompt": "a", "max_tokens": 3}))[0] == 200
    assert [len(worker.hellos) for worker in cluster.workers.values()] == [1, 1]
    assert cluster.workers["d0"].hellos[0].frontend_id == "fe-0"


async def test_request_id_of_the_client_is_given_back_but_not_used_inside(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20], LENGTH))
    body = {"prompt": "a", "max_tokens": 1}
    async with front.http.post(front.url + "/v1/completions", json=body, headers={"x-request-id": "mine"}) as response:
        assert response.headers["x-request-id"] == "mine"
    assert cluster.conductor.scheduled[0].request_id.startswith("cmpl-")


async def test_request_id_of_the_client_is_given_back_with_errors_too(front: Any) -> None:
    headers = {"x-request-id": "mine"}
    for path, status in (("/v1/completions", 400), ("/nowhere", 404)):
        async with front.http.post(front.url + path, json={"prompt": ""}, headers=headers) as response:
            assert (response.status, response.headers["x-request-id"]) == (status, "mine")
