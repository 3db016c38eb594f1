"""Client errors: status, OpenAI's shape, the field at fault; nothing else is affected."""

import asyncio
import json
from typing import Any

import pytest

from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import conductor_pb2, worker_pb2

PROMPT = {"prompt": "the fox", "max_tokens": 1}
USER = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

BAD_BODIES: list[tuple[str, Any, str | None]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, [], None),
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 1]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [340]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**70]}, "prompt"),
    (COMPLETIONS, {"prompt": {"text": "a"}}, "prompt"),
    (COMPLETIONS, {"prompt": ["a"] * 65}, "prompt"),
    (COMPLETIONS, PROMPT | {"max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": "16"}, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 1.5}, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": True}, "max_tokens"),
    (COMPLETIONS, PROMPT | {"max_tokens": 10**30}, "max_tokens"),
    (COMPLETIONS, PROMPT | {"temperature": -0.1}, "temperature"),
    (COMPLETIONS, PROMPT | {"temperature": "hot"}, "temperature"),
    (COMPLETIONS, PROMPT | {"temperature": float("nan")}, "temperature"),
    (COMPLETIONS, PROMPT | {"top_p": 0}, "top_p"),
    (COMPLETIONS, PROMPT | {"top_p": float("inf")}, "top_p"),
    (COMPLETIONS, PROMPT | {"top_k": -2}, "top_k"),
    (COMPLETIONS, PROMPT | {"seed": 2**64}, "seed"),
    (COMPLETIONS, PROMPT | {"seed": "x"}, "seed"),
    (COMPLETIONS, PROMPT | {"stop": ""}, "stop"),
    (COMPLETIONS, PROMPT | {"stop": ["a", ""]}, "stop"),
    (COMPLETIONS, PROMPT | {"stop": [str(i) for i in range(17)]}, "stop"),
    (COMPLETIONS, PROMPT | {"stop": "x" * 257}, "stop"),
    (COMPLETIONS, PROMPT | {"stop": 5}, "stop"),
    (COMPLETIONS, PROMPT | {"stop_token_ids": [-1]}, "stop_token_ids.0"),
    (COMPLETIONS, PROMPT | {"stream": "yes"}, "stream"),
    (COMPLETIONS, PROMPT | {"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    (COMPLETIONS, PROMPT | {"stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
    (COMPLETIONS, PROMPT | {"cache_salt": "s" * 513}, "cache_salt"),
    (COMPLETIONS, PROMPT | {"n": 0}, "n"),
    (COMPLETIONS, PROMPT | {"n": 129}, "n"),
    (COMPLETIONS, PROMPT | {"n": 10**40}, "n"),
    (COMPLETIONS, PROMPT | {"prompt": ["a"] * 50, "n": 3}, "n"),
    (COMPLETIONS, PROMPT | {"n": True}, "n"),
    (COMPLETIONS, PROMPT | {"best_of": 3}, "best_of"),
    (COMPLETIONS, PROMPT | {"best_of": 1, "n": 2}, "best_of"),
    (COMPLETIONS, PROMPT | {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, PROMPT | {"logprobs": True}, "logprobs"),
    (COMPLETIONS, PROMPT | {"prompt_logprobs": -1}, "prompt_logprobs"),
    (COMPLETIONS, PROMPT | {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    (COMPLETIONS, PROMPT | {"echo": 1}, "echo"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"five": 1}}, "logit_bias"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"٥": 1}}, "logit_bias"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"5": True}}, "logit_bias"),
    (COMPLETIONS, PROMPT | {"logit_bias": {"340": 1}}, "logit_bias"),
    (COMPLETIONS, PROMPT | {"logit_bias": [5]}, "logit_bias"),
    (COMPLETIONS, PROMPT | {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (COMPLETIONS, PROMPT | {"presence_penalty": 2.5}, "presence_penalty"),
    (COMPLETIONS, PROMPT | {"frequency_penalty": -3}, "frequency_penalty"),
    (COMPLETIONS, PROMPT | {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, PROMPT | {"min_p": 1.5}, "min_p"),
    (COMPLETIONS, PROMPT | {"min_tokens": 2}, "min_tokens"),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": -1, "max_tokens": 600}, "truncate_prompt_tokens"),
    (COMPLETIONS, PROMPT | {"suffix": "end"}, "suffix"),
    (COMPLETIONS, PROMPT | {"bad_words": ["x"]}, "bad_words"),
    (COMPLETIONS, PROMPT | {"allowed_token_ids": [5]}, "allowed_token_ids"),
    (COMPLETIONS, PROMPT | {"tools": [{}]}, "tools"),
    (COMPLETIONS, PROMPT | {"guided_json": "{"}, "guided_json"),
    (COMPLETIONS, PROMPT | {"guided_json": "[1]"}, "guided_json"),
    (COMPLETIONS, PROMPT | {"guided_json": '{"a": NaN}'}, "guided_json"),
    (COMPLETIONS, PROMPT | {"guided_json": "[" * 5000 + "]" * 5000}, "guided_json"),
    (COMPLETIONS, PROMPT | {"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    (COMPLETIONS, PROMPT | {"guided_regex": "a" * 200_000}, "guided_regex"),
    (COMPLETIONS, PROMPT | {"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    (COMPLETIONS, PROMPT | {"guided_regex": "a", "min_tokens": 1}, "min_tokens"),
    (COMPLETIONS, PROMPT | {"structured_outputs": {"choice": [5]}}, "structured_outputs.choice.0"),
    (COMPLETIONS, PROMPT | {"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role"),
    (CHAT, {"messages": [*USER, {"role": "system", "content": "late"}]}, "messages"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (CHAT, {"messages": USER, "logprobs": 5}, "logprobs"),
    (CHAT, {"messages": USER, "top_logprobs": 5}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "echo": True}, "echo"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.id"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
]


def check_error(status: int, body: Any, param: str | None) -> None:
    assert status == 400, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["param"] == param
    assert body["error"]["message"]


async def test_each_bad_body_is_refused_naming_its_field(cluster: Any, front: Any) -> None:
    for path, body, param in BAD_BODIES:
        status, answer = await front.post(path, body)
        try:
            check_error(status, answer, param)
        except AssertionError as error:
            raise AssertionError(f"{path} {json.dumps(body)[:100]}: {answer}") from error
    assert cluster.conductor.scheduled == []
    await front.quiet()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b"\xff\xfe",
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": 1e999, "max_tokens": 1}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "a", "other": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    ],
    ids=["empty", "open", "cut", "utf-16", "bad utf-8", "surrogate", "infinite", "deep", "deep and unknown"],
)
async def test_bytes_that_are_no_json_are_refused(front: Any, raw: bytes) -> None:
    async with front.http.post(front.url + COMPLETIONS, data=raw) as response:
        body = await response.json()
        assert response.status == 400
        assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": [{"type": "x" * 100_000}]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "x" * 100_000, "name": "f"}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": USER, "tools": [{"name": "f", "type": "x" * 100_000}]}),
        (COMPLETIONS, PROMPT | {"logit_bias": {"x" * 100_000: 1}}),
        (CHAT, {"messages": USER, "model": "x" * 100_000}),
    ],
)
async def test_an_error_does_not_repeat_all_that_was_sent(front: Any, path: str, body: Any) -> None:
    status, answer = await front.post(path, body)
    assert status in (400, 404)
    assert len(answer["error"]["message"]) < 2100
    assert len(answer["error"]["param"]) < 210


async def test_neutral_and_unknown_fields_are_accepted(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    neutral = {
        "n": 1,
        "best_of": None,
        "echo": False,
        "logprobs": None,
        "frequency_penalty": 0.0,
        "bad_words": [],
        "structured_outputs": {},
        "guided_choice": [],
        "logit_bias": {},
        "repetition_penalty": 1.0,
        "user": "somebody",
        "seed": None,
        "of_another_world": {"a": [1]},
    }
    assert (await front.post(COMPLETIONS, PROMPT | neutral))[0] == 200
    chat = {"messages": USER, "max_tokens": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}
    assert (await front.post(CHAT, chat))[0] == 200


async def test_text_with_nul_and_every_plane_of_unicode_is_served(cluster: Any, front: Any, prompt_of: Any) -> None:
    seen: list[list[int]] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(prompt_of(submit))
        return [20], worker_pb2.FINISH_LENGTH

    cluster.answer_with(answer)
    text = "a\x00b\u202e\ufeff𝄞👩‍👩‍👧\x7f"
    assert (await front.post(COMPLETIONS, {"prompt": text, "max_tokens": 1, "cache_salt": text}))[0] == 200
    assert (await front.post("/detokenize", {"tokens": seen[0][1:]}))[1]["prompt"] == text


async def test_a_prompt_over_the_context_is_refused_with_openais_code(front: Any) -> None:
    ids = [20] * 512
    for body in ({"prompt": ids, "max_tokens": 1}, {"prompt": ids}, {"prompt": ids[:500], "max_tokens": 13}):
        status, answer = await front.post(COMPLETIONS, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 512 tokens" in answer["error"]["message"]
    status, answer = await front.post(CHAT, {"messages": [{"role": "user", "content": "🎉" * 600}]})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(self: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
        raise AssertionError(f"{len(text)} characters tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "long " * 150_000
    for path, body in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        status, answer = await front.post(path, body)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert "or more tokens" in answer["error"]["message"]


async def test_default_of_max_tokens_shrinks_to_what_fits(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    assert (await front.post(COMPLETIONS, {"prompt": [20] * 505}))[0] == 200
    assert cluster.conductor.scheduled[0].max_new_tokens == 7


async def test_unknown_model_path_and_method_have_openais_shape(front: Any) -> None:
    status, body = await front.post(COMPLETIONS, PROMPT | {"model": "gpt-\x00"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    status, body = await front.post("/v1/embeddings", {})
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    async with front.http.get(front.url + COMPLETIONS) as response:
        assert response.status == 405
        assert (await response.json())["error"]["message"]


async def test_too_large_a_body_is_refused_declared_or_not(start_front: Any) -> None:
    async with start_front(max_body_nbytes=1000) as front:
        status, body = await front.post(COMPLETIONS, {"prompt": "a" * 2000})
        assert (status, body["error"]["code"]) == (413, "request_too_large")

        async def chunks() -> Any:
            for _ in range(100):
                yield b"a" * 100

        async with front.http.post(front.url + COMPLETIONS, data=chunks()) as response:
            assert response.status == 413


async def test_a_body_that_never_ends_is_given_up(start_front: Any) -> None:
    async with start_front(body_timeout_s=0.2) as front:
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf", "1e3", "1_000", "86400001", "0.0001", "9" * 400])
async def test_an_objective_that_is_no_time_is_refused(front: Any, header: str, value: str) -> None:
    status, body = await front.post(COMPLETIONS, PROMPT, headers={header: value})
    check_error(status, body, header)


@pytest.mark.parametrize("name", ["two words", "-first", "a" * 65, "a/b"])
async def test_a_class_whose_name_cannot_be_is_refused(front: Any, name: str) -> None:
    status, body = await front.post(COMPLETIONS, PROMPT, headers={"x-slo-class": name})
    check_error(status, body, "x-slo-class")
    status, body = await front.post(COMPLETIONS, {**PROMPT, "slo_class": name})
    check_error(status, body, "slo_class")


async def test_two_classes_for_one_request_are_refused(front: Any) -> None:
    status, body = await front.post(COMPLETIONS, {**PROMPT, "slo_class": "a"}, headers={"x-slo-class": "b"})
    check_error(status, body, "slo_class")


@pytest.mark.parametrize("priority", [2**31, -(2**31), 1.5, "1", True])
async def test_a_priority_that_is_no_whole_number_of_32_bits_is_refused(front: Any, priority: object) -> None:
    status, body = await front.post(COMPLETIONS, {**PROMPT, "priority": priority})
    check_error(status, body, "priority")


async def test_api_keys_are_asked_for_except_by_probes_and_metrics(cluster: Any, start_front: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(api_key=("secret-1", "sécret-2")) as front:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "secret-1"},
            {"authorization": "Bearer"},
        ):
            status, body = await front.post(COMPLETIONS, PROMPT, headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        assert cluster.conductor.scheduled == []
        tenants = set()
        for key in ("secret-1", "sécret-2"):
            headers = {"authorization": f"Bearer {key}"}
            assert (await front.post(COMPLETIONS, PROMPT, headers=headers))[0] == 200
            tenants.add(cluster.conductor.scheduled[-1].tenant)
        assert len(tenants) == 2
        assert not tenants & {"", "secret-1", "sécret-2"}
        assert (await front.get("/v1/models"))[0] == 401
        for path in ("/health", "/live", "/ready", "/metrics"):
            assert (await front.get(path))[0] == 200


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("ttft", 429, "ttft"),
        ("decode_capacity", 429, "decode_capacity"),
        ("no_nodes", 503, "no_nodes"),
        ("unknown_model", 404, "model_not_found"),
        ("unknown_class", 400, "unknown_class"),
        ("denied_class", 403, "denied_class"),
        ("too_long", 400, "context_length_exceeded"),
    ],
)
async def test_rejection_is_told_with_its_status(cluster: Any, front: Any, reason: str, status: int, code: str) -> None:
    rejection = conductor_pb2.Rejection(reason=reason, message=f"because of {reason}", retry_after_s=2.3)
    cluster.conductor.place = lambda request: conductor_pb2.ScheduleReply(rejection=rejection)
    for stream in (False, True):
        async with front.http.post(front.url + COMPLETIONS, json=PROMPT | {"stream": stream}) as response:
            assert response.status == status
            assert (await response.json())["error"] | {"type": ""} == {
                "message": f"because of {reason}",
                "type": "",
                "code": code,
                "param": {"unknown_model": "model", "unknown_class": "slo_class", "denied_class": "slo_class"}.get(
                    reason
                ),
            }
            assert response.headers.get("retry-after") == ("3" if status in (429, 503) else None)
    _, metrics = await front.get("/metrics")
    assert f'moonpool:requests_rejected_total{{model_name="tiny",reason="{reason}"}} 2.0' in metrics
    await front.quiet()


async def test_failure_that_another_attempt_cannot_cure_is_told_at_once(cluster: Any, front: Any) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        prefill.fail(submit, "bad_chain", retryable=False)

    prefill.on_submit = on_submit
    status, body = await front.post(COMPLETIONS, PROMPT)
    assert (status, body["error"]["code"]) == (500, "bad_chain")
    assert "scripted bad_chain" in body["error"]["message"]
    assert len(cluster.conductor.scheduled) == 1
    assert (await cluster.conductor.completion()).outcome == "failed"


async def test_failure_after_the_first_token_is_an_event_of_the_stream(cluster: Any, front: Any) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        prefill.send(submit, 0, [20])
        prefill.fail(submit, "internal", retryable=False)

    prefill.on_submit = on_submit
    *_, last = await front.events(COMPLETIONS, PROMPT | {"max_tokens": 5})
    assert last["error"]["code"] == "internal"
    _, metrics = await front.get("/metrics")
    assert 'vllm:request_success_total{finished_reason="error",model_name="tiny"} 1.0' in metrics


async def test_template_variables_of_the_client_reach_the_template(cluster: Any, front: Any) -> None:
    _, body = await front.post("/tokenize", {"messages": USER, "chat_template_kwargs": {"suffix": "<think>"}})
    _, text = await front.post("/detokenize", {"tokens": body["tokens"]})
    assert text["prompt"].endswith("assistant\n<think>")
    hostile = {"messages": USER, "chat_template_kwargs": {"messages": 5, "bos_token": {"a": 1}, "self": 1}}
    assert (await front.post("/tokenize", hostile))[0] == 200
