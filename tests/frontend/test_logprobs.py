"""Log-probabilities and echoes over real HTTP, in OpenAI's and vLLM's shapes, streamed and whole."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from frontend.api.generate import _takes_long
from frontend.output import OutputChunk
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import worker_pb2

STOP, LENGTH = worker_pb2.FINISH_STOP, worker_pb2.FINISH_LENGTH
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
IdsOf = Callable[[str], list[int]]
LogprobOf = Callable[[int, int], float]
NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(chunks: list[Any]) -> dict[str, list[Any]]:
    """A completion stream's log-probabilities as one object."""
    parts = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    return {name: [value for part in parts for value in part[name]] for name in NAMES}


async def test_a_completions_tokens_have_openais_four_lists(
    cluster: Any, front: Any, tokenizer: Tokenizer, ids_of: IdsOf, logprob_of: LogprobOf
) -> None:
    ids = ids_of(" the cat sat")
    cluster.answer_with(lambda submit: ([*ids, 1], STOP))
    body = {"prompt": "the fox", "max_tokens": 30, "logprobs": 1}
    _, whole = await front.post(COMPLETIONS, body)
    told = whole["choices"][0]["logprobs"]
    words = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
    assert set(told) == set(NAMES)
    assert told["tokens"] == [*words, "<|eos|>"]
    assert told["token_logprobs"] == [logprob_of(token_id, 2) for token_id in [*ids, 1]]
    assert told["text_offset"] == [len("".join(words[:count])) for count in range(len(ids) + 1)]
    # The likeliest, and the token itself, which is not it.
    successor = tokenizer.decode([ids[0] + 1], skip_special_tokens=False)
    assert told["top_logprobs"][0] == {successor: logprob_of(ids[0] + 1, 1), words[0]: logprob_of(ids[0], 2)}
    assert len(told["tokens"]) == whole["usage"]["completion_tokens"]
    assert joined(await front.events(COMPLETIONS, body)) == told
    _, bare = await front.post(COMPLETIONS, body | {"logprobs": 0})
    assert bare["choices"][0]["logprobs"]["top_logprobs"][0] == {words[0]: logprob_of(ids[0], 2)}


async def test_a_chats_tokens_have_bytes_and_as_many_likeliest_as_asked_for(
    cluster: Any, front: Any, ids_of: IdsOf, logprob_of: LogprobOf
) -> None:
    ids = ids_of(" 你好 🎉 fox")
    cluster.answer_with(lambda submit: (ids, LENGTH))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "logprobs": True, "top_logprobs": 3}
    _, whole = await front.post(CHAT, body)
    told = whole["choices"][0]["logprobs"]
    content = told["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == " 你好 🎉 fox"
    assert [entry["logprob"] for entry in content] == [logprob_of(token_id, 2) for token_id in ids]
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["top_logprobs"][1] | {"top_logprobs": 0} == entry | {"top_logprobs": 0} for entry in content)
    whole_characters = [entry for entry in content if "\\x" not in entry["token"]]
    assert all(entry["token"].encode() == bytes(entry["bytes"]) for entry in whole_characters)
    chunks = await front.events(CHAT, body)
    deltas = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
    assert [entry for delta in deltas for entry in delta["content"]] == content


async def test_a_part_of_a_character_is_told_as_its_bytes(cluster: Any, front: Any, tokenizer: Tokenizer) -> None:
    raw = "𝄞".encode()
    ids = [next(i for i in range(4, 340) if tokenizer.token_bytes(i) == bytes([byte])) for byte in raw]
    cluster.answer_with(lambda submit: (ids, LENGTH))
    body = {"prompt": "a", "max_tokens": 4, "logprobs": 0}
    _, whole = await front.post(COMPLETIONS, body)
    assert whole["choices"][0]["text"] == "𝄞"
    assert whole["choices"][0]["logprobs"]["tokens"] == [f"bytes:\\x{byte:02x}" for byte in raw]
    assert whole["choices"][0]["logprobs"]["text_offset"] == [0] * 4
    _, chat = await front.post(
        CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "logprobs": True}
    )
    content = chat["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [(f"\\x{byte:02x}", [byte]) for byte in raw]


async def test_tokens_are_told_as_ids_on_demand(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    body = {"prompt": "a", "max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    _, whole = await front.post(COMPLETIONS, body)
    told = whole["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:20", "token_id:21"]
    assert set(told["top_logprobs"][0]) == {"token_id:21", "token_id:20"}


async def test_lm_eval_finds_its_continuations_log_probabilities(
    cluster: Any, front: Any, ids_of: IdsOf, logprob_of: LogprobOf
) -> None:
    cluster.answer_with(lambda submit: ([1], STOP))  # the model's end: counted all the same
    prompts = [ids_of("the cat sat on the mat"), ids_of("the fox")]
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
    _, whole = await front.post(COMPLETIONS, body)
    for prompt, choice in zip(prompts, whole["choices"], strict=True):
        told = choice["logprobs"]
        assert len(told["token_logprobs"]) == len(prompt) + 1
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:-1] == [logprob_of(token_id, 9) for token_id in prompt[1:]]
        # Greedy where the token is the likeliest: here nowhere.
        pairs = zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True)
        assert all(max(top.values()) > own for own, top in pairs)


async def test_an_echo_stands_before_the_answer_with_offsets_into_both(
    cluster: Any, front: Any, ids_of: IdsOf, tokenizer: Tokenizer
) -> None:
    ids = ids_of(" naïve 🎉")
    cluster.answer_with(lambda submit: (ids, LENGTH))
    body = {"prompt": "你好 the fox", "max_tokens": 30, "echo": True, "logprobs": 2}
    _, whole = await front.post(COMPLETIONS, body)
    choice = whole["choices"][0]
    assert choice["text"] == "你好 the fox naïve 🎉"
    told, tokens = choice["logprobs"], [0, *ids_of("你好 the fox"), *ids]
    assert told["tokens"][0] == "<|bos|>"
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in tokens[1:])
    assert data.decode() == choice["text"]
    for at, offset in enumerate(told["text_offset"][1:], start=1):
        before = b"".join(tokenizer.token_bytes(token_id) for token_id in tokens[1:at])
        assert offset == len(before.decode(errors="ignore"))
    assert whole["usage"]["completion_tokens"] == len(ids)
    chunks = await front.events(COMPLETIONS, body)
    assert joined(chunks) == told
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
    assert chunks[0]["choices"][0]["text"].startswith("你好 the fox")
    # Stop strings are looked for in the answer alone.
    _, stopped = await front.post(COMPLETIONS, body | {"stop": ["fox", "ïv"]})
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["stop_reason"]) == ("你好 the fox na", "ïv")


@pytest.mark.parametrize("logprobs", [None, 1])
async def test_an_echo_alone_shows_and_counts_no_token(
    cluster: Any, front: Any, ids_of: IdsOf, logprobs: int | None
) -> None:
    seen: list[int] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit.sampling.max_tokens)
        return [20], LENGTH

    cluster.answer_with(answer)
    prompt = ids_of("the cat 𝄞")[:-1]  # ends within a character
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": logprobs, "return_token_ids": True}
    _, whole = await front.post(COMPLETIONS, body)
    choice = whole["choices"][0]
    assert choice["text"] == "the cat \ufffd"
    assert (choice["finish_reason"], choice["token_ids"]) == ("length", [])
    assert whole["usage"]["completion_tokens"] == 0
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    assert seen == [1]
    if logprobs is not None:
        assert len(choice["logprobs"]["tokens"]) == len(prompt)
    (chunk,) = await front.events(COMPLETIONS, body)
    assert chunk["choices"] == whole["choices"]


async def test_a_character_begun_by_the_prompt_is_ended_by_the_answer(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    ids = ids_of("𝄞")
    assert len(ids) > 1
    cluster.answer_with(lambda submit: (ids[-1:], LENGTH))
    _, whole = await front.post(COMPLETIONS, {"prompt": [*ids_of("the"), *ids[:-1]], "max_tokens": 1, "echo": True})
    assert whole["choices"][0]["text"] == "the𝄞"


async def test_the_prompts_log_probabilities_are_vllms_list(
    cluster: Any, front: Any, ids_of: IdsOf, logprob_of: LogprobOf, tokenizer: Tokenizer
) -> None:
    cluster.answer_with(lambda submit: ([20], LENGTH))
    prompt = ids_of("the cat sat")
    _, whole = await front.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 1})
    choice = whole["choices"][0]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert choice["logprobs"] is None
    for token_id, told in zip(prompt[1:], rest, strict=True):
        assert list(told) == [str(token_id + 1), str(token_id)]
        word = tokenizer.decode([token_id], skip_special_tokens=False)
        assert told[str(token_id)] == {"logprob": logprob_of(token_id, 9), "rank": 9, "decoded_token": word}
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "prompt_logprobs": 0}
    _, chat = await front.post(CHAT, body)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_all_answers_of_a_prompt_echo_what_was_computed_once(cluster: Any, front: Any, ids_of: IdsOf) -> None:
    asked: list[bool] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        asked.append(submit.sampling.HasField("prompt_logprobs"))
        return [20], LENGTH

    cluster.answer_with(answer)
    body = {"prompt": ids_of("the cat"), "n": 3, "max_tokens": 1, "echo": True, "logprobs": 0}
    _, whole = await front.post(COMPLETIONS, body)
    assert sorted(asked) == [False, False, True]
    assert [choice["logprobs"] for choice in whole["choices"]] == [whole["choices"][0]["logprobs"]] * 3


@pytest.mark.parametrize("field", [{"logprobs": 1}, {"prompt_logprobs": 1}])
async def test_a_worker_that_tells_none_is_an_error_and_no_wrong_answer(
    cluster: Any, front: Any, field: dict[str, int]
) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        submit.sampling.ClearField("logprobs")
        submit.sampling.ClearField("prompt_logprobs")
        prefill.send(submit, 0, [20], finish=LENGTH, cached=0)

    prefill.on_submit = on_submit
    status, body = await front.post(COMPLETIONS, {"prompt": "the fox", "max_tokens": 1} | field)
    assert (status, body["error"]["code"]) == (500, "no_logprobs")
    await front.quiet()


async def test_minus_infinity_is_told_as_a_number_that_json_has(cluster: Any, front: Any) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        message = worker_pb2.WorkerMessage()
        token = message.tokens.add(request_id=submit.request_id, token_id=20, finish=LENGTH)
        token.logprobs.logprob, token.logprobs.rank = float("-inf"), 300
        prefill._outbox.put_nowait(message)

    prefill.on_submit = on_submit
    _, body = await front.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1, "logprobs": 0})
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


async def test_log_probabilities_go_on_after_a_worker_was_lost(
    cluster: Any, front: Any, second_pair: Any, ids_of: IdsOf, logprob_of: LogprobOf
) -> None:
    prompt, ids = ids_of("the cat"), ids_of(" jumps over the lazy dog and sat")
    body = {"prompt": prompt, "max_tokens": len(ids), "echo": True, "logprobs": 1}
    places = iter([("p0", "d0"), ("p1", "d0"), ("p1", "d1")])
    cluster.conductor.place = lambda request: cluster.placement(*next(places))
    asking = asyncio.create_task(front.post(COMPLETIONS, body))
    p0, (p1, d1) = cluster.workers["p0"], second_pair
    p0.fail(await p0.submitted(), "internal", retryable=True)  # before the prompt's are told
    second = await p1.submitted()
    p1.send(second, 0, ids[:1], cached=0)
    cluster.workers["d0"].send(second, 1, ids[1:2])
    await front.has_generated(2)
    cluster.workers["d0"].end_stream()
    third = await p1.submitted()
    assert third.generated == 2
    p1.send(third, 2, ids[2:3], cached=0)
    d1.send(third, 3, ids[3:], finish=LENGTH)
    status, whole = await asking
    assert status == 200, whole
    expected = [None, *(logprob_of(i, 9) for i in prompt[1:]), *(logprob_of(i, 2) for i in ids)]
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == expected


async def test_no_more_of_prompts_is_told_than_one_answer_may_hold(
    cluster: Any, start_front: Any, ids_of: IdsOf
) -> None:
    ids = ids_of("the cat sat")
    cluster.answer_with(lambda submit: (ids_of(" fox")[:1], LENGTH))
    body = {"prompt": [ids, ids], "max_tokens": 1, "echo": True, "logprobs": 2, "n": 2}
    async with start_front(max_prompt_scores=2 * 2 * 3 * len(ids)) as front:
        status, whole = await front.post(COMPLETIONS, body)
        assert (status, len(whole["choices"])) == (200, 4)
        for more, param in (({"logprobs": 3}, "logprobs"), ({"n": 3}, "logprobs"), ({"prompt_logprobs": 4}, "prompt_")):
            status, refused = await front.post(COMPLETIONS, body | more)
            assert (status, refused["error"]["param"].startswith(param)) == (400, True)
        assert (await front.post(COMPLETIONS, body | {"n": 3, "echo": False}))[0] == 200
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "n": 3}
        assert (await front.post(CHAT, chat | {"prompt_logprobs": 0}))[0] == 200
        assert (await front.post(CHAT, chat | {"prompt_logprobs": 20}))[0] == 400


def test_long_answers_are_written_down_off_the_event_loop() -> None:
    assert not _takes_long([OutputChunk((1,) * 8, "a")] * 128, [])
    assert _takes_long([OutputChunk((1,) * 9, "a")] * 128, [])
