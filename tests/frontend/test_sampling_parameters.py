"""Fields that steer sampling and text, over real HTTP: what reaches the cluster and what the client sees of it."""

from collections.abc import Callable
from typing import Any

import pytest

from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import common_pb2, worker_pb2

STOP, LENGTH = worker_pb2.FINISH_STOP, worker_pb2.FINISH_LENGTH
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IdsOf = Callable[[str], list[int]]


async def sampling_for(cluster: Any, front: Any, fields: dict[str, Any]) -> common_pb2.Sampling:
    seen: list[common_pb2.Sampling] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit.sampling)
        return [20], LENGTH

    cluster.answer_with(answer)
    status, body = await front.post(COMPLETIONS, {"prompt": "a", "max_tokens": 9, **fields})
    assert status == 200, body
    return seen[0]


async def test_controls_reach_the_cluster(cluster: Any, front: Any) -> None:
    fields = {
        "min_p": 0.25,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"5": -100, "17": 2.5},
        "min_tokens": 3,
    }
    sampling = await sampling_for(cluster, front, fields)
    told = {name: getattr(sampling, name) for name in fields}
    assert told | {"logit_bias": dict(sampling.logit_bias)} == fields | {"logit_bias": {5: -100.0, 17: 2.5}}


async def test_controls_are_off_where_nothing_is_asked_for(cluster: Any, front: Any) -> None:
    neutral = {"presence_penalty": None, "repetition_penalty": 1, "logit_bias": {}, "min_p": 0, "logprobs": None}
    for fields in ({}, neutral):
        sampling = await sampling_for(cluster, front, fields)
        assert not any(
            sampling.HasField(name) for name in ("repetition_penalty", "logprobs", "prompt_logprobs", "grammar")
        )
        assert (sampling.min_p, sampling.presence_penalty, sampling.frequency_penalty) == (0, 0, 0)
        assert (dict(sampling.logit_bias), sampling.min_tokens, sampling.choice) == ({}, 0, 0)


@pytest.mark.parametrize("include", [False, True])
async def test_what_ended_an_answer_is_part_of_it_on_demand(
    cluster: Any, front: Any, ids_of: IdsOf, include: bool
) -> None:
    fox = ids_of(" fox")[0]
    cluster.answer_with(lambda submit: ([*ids_of(" the cat sat"), fox], STOP))
    body = {"prompt": "a", "max_tokens": 50, "include_stop_str_in_output": include}
    _, text = await front.post(COMPLETIONS, body | {"stop": "cat s"})
    assert text["choices"][0]["text"] == (" the cat s" if include else " the ")
    assert text["choices"][0]["stop_reason"] == "cat s"
    _, token = await front.post(COMPLETIONS, body | {"stop_token_ids": [fox]})
    assert token["choices"][0]["text"].startswith(" the cat sat ") == include
    assert token["choices"][0]["stop_reason"] == fox


async def test_no_stop_text_is_found_before_the_least_number_of_tokens(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    ids = ids_of("the") * 4
    cluster.answer_with(lambda submit: (ids, LENGTH))
    body = {"prompt": "a", "max_tokens": len(ids), "stop": "the", "min_tokens": 2 * len(ids_of("the"))}
    _, whole = await front.post(COMPLETIONS, body)
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("thethe", "stop")


async def test_special_tokens_show_their_text_on_demand(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    cluster.answer_with(lambda submit: ([*ids_of(" cat"), 2, *ids_of(" sat")], LENGTH))
    body = {"prompt": "a", "max_tokens": 50}
    _, skipped = await front.post(COMPLETIONS, body)
    _, shown = await front.post(COMPLETIONS, body | {"skip_special_tokens": False})
    assert skipped["choices"][0]["text"] == " cat sat"
    assert shown["choices"][0]["text"] == " cat<|im_start|> sat"


async def test_a_prompt_is_cut_to_its_last_tokens(cluster: Any, front: Any, prompt_of: Any) -> None:
    seen: list[list[int]] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(prompt_of(submit))
        return [20], LENGTH

    cluster.answer_with(answer)
    ids = [4 + at % 300 for at in range(700)]
    for keep, length in ((5, 5), (-1, 512 - 10)):
        body = {"prompt": ids, "max_tokens": 10, "truncate_prompt_tokens": keep}
        _, whole = await front.post(COMPLETIONS, body)
        assert seen[-1] == ids[-length:]
        assert whole["usage"]["prompt_tokens"] == length
    assert (await front.post(COMPLETIONS, {"prompt": ids[:3], "truncate_prompt_tokens": 50}))[0] == 200
    assert seen[-1] == ids[:3]


async def test_usage_comes_with_every_chunk_on_demand(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21, 22], LENGTH))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await front.events(COMPLETIONS, {"prompt": [5, 6], "max_tokens": 3, "stream_options": options})
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert (told[0] >= 1, told[-1]) == (True, 3)
    assert all(chunk["usage"]["prompt_tokens"] == 2 for chunk in chunks)


async def test_a_chat_opens_the_assistants_turn_or_goes_on_with_the_last_message(
    front: Any, tokenizer: Tokenizer
) -> None:
    async def shown(messages: list[dict[str, str]], **fields: Any) -> str:
        status, body = await front.post("/tokenize", {"messages": messages, **fields})
        assert status == 200, body
        return tokenizer.decode(body["tokens"], skip_special_tokens=False)

    user = {"role": "user", "content": "hi"}
    begun = {"role": "assistant", "content": "the quick "}
    head = "<|bos|><|im_start|>user\nhi<|im_end|>\n"
    assert await shown([user]) == head + "<|im_start|>assistant\n"
    assert await shown([user], add_generation_prompt=False) == head
    assert await shown([user, begun], continue_final_message=True) == head + "<|im_start|>assistant\nthe quick "
    for content in ("e", "m", "i", "<|im", "the\n"):  # the template puts them after the message, too
        last = begun | {"content": content}
        told = await shown([user, last], continue_final_message=True)
        assert told == head + "<|im_start|>assistant\n" + content
    for path in ("/tokenize", CHAT):
        both = {"messages": [user, begun], "continue_final_message": True, "add_generation_prompt": True}
        status, body = await front.post(path, both)
        assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_a_message_that_cannot_be_gone_on_with_is_refused(front: Any) -> None:
    for content in ("", " \n"):
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
        status, body = await front.post("/tokenize", {"messages": messages, "continue_final_message": True})
        assert (status, body["error"]["param"]) == (400, "continue_final_message")


async def test_a_chat_goes_by_the_newer_name_of_its_limit(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    cluster.answer_with(lambda submit: (ids_of(" cat"), LENGTH))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 30, "max_tokens": 0}
    _, whole = await front.post(CHAT, body)
    assert whole["choices"][0]["message"]["content"] == " cat"


async def test_a_continued_message_is_answered_with_its_rest(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    cluster.answer_with(lambda submit: (ids_of(" brown fox"), LENGTH))
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the quick"}]
    body = {"messages": chat, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 30}
    _, whole = await front.post(CHAT, body)
    assert whole["choices"][0]["message"]["content"] == " brown fox"
