"""Anthropic's Messages API over real HTTP, with Anthropic's own client."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from frontend.api.messages.request import MessagesBody
from frontend.api.request_models import NamedTool
from frontend.errors import InvalidRequest
from moonpool_proto.v1 import worker_pb2

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
LENGTH = worker_pb2.FINISH_LENGTH
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "weather", "description": "Tells it.", "input_schema": SCHEMA}, {"name": "now"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Rom"}}\n</tool_call>'


@asynccontextmanager
async def client_of(front: Any, key: str = "none") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=front.url, api_key=key, max_retries=0) as client:
        yield client


async def test_an_answer_has_reasoning_text_and_calls_as_blocks(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers(f"<think>\nwhy\n</think>\n\nlook:{CALL}")
        message = await client.messages.create(
            model="tiny",
            max_tokens=99,
            messages=USER,
            tools=TOOLS,
            system="Be kind.",
            stop_sequences=["@"],
            extra_body={"top_k": 5},
        )
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = message.content
    assert (thinking.thinking, text.text, call.name, call.input) == ("why", "look:", "weather", {"city": "Rom"})
    assert message.stop_reason == "tool_use"
    assert message.id.startswith("msg_")
    [submit] = seen
    assert submit.request_id == message.id
    assert "<|im_start|>system\nBe kind.<|im_end|>" in model.prompt(submit)
    assert '"description": "Tells it."' in model.prompt(submit)
    assert (submit.sampling.max_tokens, submit.sampling.top_k) == (99, 5)
    num_prompt = len(submit.prompt_ids) // 4
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == num_prompt
    assert message.usage.output_tokens_details.thinking_tokens == 7


async def test_a_stream_ends_with_the_same_message(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers(f"<think>\nwhy\n</think>\n\nlook:{CALL}\n{CALL.replace('Rom', 'Bonn')}")
        names, partial_json = [], ""
        async with client.messages.stream(model="tiny", max_tokens=999, messages=USER, tools=TOOLS) as stream:
            async for event in stream:
                if event.type in ("text", "thinking", "input_json"):  # the client's own
                    continue
                names.append(event.type)
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    partial_json += event.delta.partial_json
            message = await stream.get_final_message()
        whole = await client.messages.create(model="tiny", max_tokens=999, messages=USER, tools=TOOLS)

    def parts(answered: anthropic.types.Message) -> list[Any]:
        blocks = [block.model_dump(exclude={"id"}) for block in answered.content]
        return [*blocks, answered.role, answered.stop_reason, answered.usage.input_tokens, answered.usage.output_tokens]

    assert parts(message) == parts(whole)
    assert [block.input for block in message.content[2:]] == [{"city": "Rom"}, {"city": "Bonn"}]
    assert partial_json == '{"city":"Rom"}{"city":"Bonn"}'
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop") == 4


async def test_the_next_turn_has_the_calls_and_their_results_in_the_prompt(serve_family: Any) -> None:
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": ""},
                {"type": "text", "text": "look:"},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rom"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers("warm")
        await client.messages.create(model="tiny", max_tokens=9, messages=turns, tools=TOOLS)
    prompt = model.prompt(seen[0])
    assert "<think>\nwhy\n</think>\n\nlook:<|im_end|>" in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>\n<|im_start|>user\nso?<|im_end|>" in prompt
    assert seen[0].hints.lifetime_s == 300


def test_a_body_becomes_the_chat_that_openais_api_would_be_sent() -> None:
    body = MessagesBody.model_validate(
        {
            "model": "tiny",
            "max_tokens": 5,
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "now", "input": {"a": [1, "é"]}}],
                },
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
            ],
            "tools": TOOLS,
            "tool_choice": {"type": "tool", "name": "now", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
            "session_id": "s1",
        }
    )
    converted = body.to_chat()
    assert isinstance(converted.tool_choice, NamedTool)
    assert converted.tool_choice.name == "now"
    chat = converted.model_dump(exclude_none=True, by_alias=True, exclude={"tool_choice"})
    assert chat["messages"][1]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": [1, "é"]}'}
    assert chat["messages"][2] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": ""}],
    }
    assert chat["parallel_tool_calls"] is False
    assert chat["reasoning_effort"] == "low"
    assert chat["response_format"]["json_schema"]["schema"] == SCHEMA
    assert chat["session_id"] == "s1"
    choices = {"auto": "auto", "any": "required", "none": "none"}
    for theirs, ours in choices.items():
        changed = body.model_copy(update={"tool_choice": body.tool_choice.model_copy(update={"type": theirs})})
        assert changed.to_chat().tool_choice == ours


@pytest.mark.parametrize(
    ("finish", "text", "stop", "expected"),
    [
        (LENGTH, "abc", [], ("max_tokens", None, "abc")),
        (worker_pb2.FINISH_STOP, "ab@c", ["@"], ("stop_sequence", "@", "ab")),
        (worker_pb2.FINISH_STOP, "ab", [], ("end_turn", None, "ab")),
    ],
)
async def test_the_stop_reason_says_what_ended_the_answer(
    serve_family: Any, finish: int, text: str, stop: list[str], expected: tuple[str, str | None, str]
) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers(text, finish)
        message = await client.messages.create(model="tiny", max_tokens=9, messages=USER, stop_sequences=stop)
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == expected


async def test_a_call_that_was_cut_off_is_not_returned_as_one(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers(f"look:{CALL[:-20]}", LENGTH)
        message = await client.messages.create(model="tiny", max_tokens=999, messages=USER, tools=TOOLS)
        events = await client.messages.create(model="tiny", max_tokens=999, messages=USER, tools=TOOLS, stream=True)
        streamed = [event async for event in events]
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["text"]
    inputs = [event.delta for event in streamed if event.type == "content_block_delta"]
    assert "".join(delta.partial_json for delta in inputs if delta.type == "input_json_delta") == '{"city":'
    assert [event.type for event in streamed[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed[-2].delta.stop_reason == "max_tokens"


@pytest.mark.parametrize("value", ['{"a":' * 400 + "1" + "}" * 400, r'"\ud800"', "1e999"], ids=["deep", "half", "inf"])
async def test_a_call_whose_input_no_json_can_hold_is_not_returned(serve_family: Any, value: str) -> None:
    call = f'<tool_call>\n{{"name": "now", "arguments": {{"a": {value}}}}}\n</tool_call>'
    async with serve_family("qwen3") as (front, model):
        model.answers(f"look:{call}")
        body = {"max_tokens": 3500, "messages": USER, "tools": [{"name": "now", "input_schema": {"type": "object"}}]}
        status, message = await front.post(MESSAGES, body)
    assert status == 200, message
    assert [block["type"] for block in message["content"]] == ["text"]


async def test_a_message_of_the_assistant_at_the_end_is_continued(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers("c")
        turns = [*USER, {"role": "assistant", "content": "a b"}]
        message = await client.messages.create(model="tiny", max_tokens=9, messages=turns)
    assert model.prompt(seen[0]).endswith("<|im_start|>assistant\na b")
    assert message.content[0].text == "c"


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({"thinking": {"type": "disabled"}}, "<think>\n\n</think>\n\n"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "<|im_start|>assistant\n"),
        ({}, "<|im_start|>assistant\n"),
    ],
)
async def test_thinking_is_switched_as_the_template_allows(
    serve_family: Any, fields: dict[str, Any], ending: str
) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers("c")
        await client.messages.create(model="tiny", max_tokens=9, messages=USER, **fields)
    assert model.prompt(seen[0]).endswith(ending)


@pytest.mark.parametrize(
    "fields",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"output_config": {"effort": "max"}},
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
    ],
)
@pytest.mark.parametrize("family", ["deepseek", "mistral", "harmony"])
async def test_an_effort_for_which_the_template_cannot_ask_is_a_hint(
    serve_family: Any, family: str, fields: dict[str, Any]
) -> None:
    async with serve_family(family) as (front, model):
        model.answers("<|channel|>final<|message|>c" if family == "harmony" else "c")
        assert (await front.post(MESSAGES, {"messages": USER, "max_tokens": 9, **fields}))[0] == 200
        assert (await front.post(COUNT, {"messages": USER, **fields}))[0] == 200


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_reasoning_that_cannot_be_disabled_is_refused(serve_family: Any, path: str) -> None:
    body: dict[str, Any] = {"messages": USER, "thinking": {"type": "disabled"}}
    async with serve_family("harmony") as (front, _):
        status, refusal = await front.post(path, body | ({"max_tokens": 9} if path == MESSAGES else {}))
    assert (status, refusal["error"]["param"]) == (400, "thinking")


async def test_tokens_are_counted_as_the_prompt_has_them(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers("c")
        await client.messages.create(model="tiny", max_tokens=9, messages=USER, tools=TOOLS, system="a")
        counted = await client.messages.count_tokens(model="tiny", messages=USER, tools=TOOLS, system="a")
    assert counted.input_tokens == len(seen[0].prompt_ids) // 4


async def test_a_key_is_sent_in_anthropics_header(start_front: Any, cluster: Any) -> None:
    cluster.answer_with(lambda submit: ([5, 3], worker_pb2.FINISH_STOP))
    async with start_front(api_key=("sesame",)) as front:
        async with client_of(front, "sesame") as client:
            await client.messages.create(model="tiny", max_tokens=9, messages=USER)
        async with client_of(front, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(model="tiny", max_tokens=9, messages=USER)
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"max_tokens": None}, "max_tokens", "valid integer"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages.0.role", "'user' or 'assistant'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages.0.content",
            "cannot read image input",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result"}]}]},
            "messages.0.content",
            "supported are text, thinking, tool_use, tool_result",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]},
            "messages.0.content.0",
            "messages of the assistant cannot have tool_result",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type", "Anthropic's servers"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "requires a name"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not supported"),
        ({"temperature": 1.5}, "temperature", "less than or equal to 1"),
        ({"stop_sequences": [f"x{i}" for i in range(17)]}, "stop_sequences", "16"),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "a", "input": {}}]},
                ]
            },
            "messages",
            "must follow it",
        ),
    ],
)
async def test_an_invalid_body_is_refused_in_anthropics_form_with_the_fields_name(
    front: Any, fields: dict[str, Any], param: str, says: str
) -> None:
    status, body = await front.post(MESSAGES, {"model": "tiny", "max_tokens": 5, "messages": USER, **fields})
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["param"] == param
    assert says in body["error"]["message"]


async def test_what_claude_code_sends_is_taken(serve_family: Any) -> None:
    name = f"mcp__server__{'t' * 115}"
    schema = {"type": "object", "properties": {"answers": {"type": "object", "propertyNames": {"type": "string"}}}}
    hint = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    turns = [
        *USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": name, "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "so"}]},
    ]
    body: dict[str, Any] = {
        "messages": turns,
        "max_tokens": 999,
        "system": [{"type": "text", "text": "Be kind.", "cache_control": hint}],
        "tools": [{"name": name, "input_schema": schema, "cache_control": hint}],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"answers": {{}}}}}}\n</tool_call>'
    async with serve_family("qwen3") as (front, model):
        seen = model.answers(call)
        status, message = await front.post(MESSAGES, body)
        assert status == 200, message
        for accepted in ({}, {"edits": []}):
            assert (await front.post(MESSAGES, body | {"context_management": accepted}))[0] == 200
        edit = {"type": "clear_tool_uses_20250919"}
        status, refusal = await front.post(MESSAGES, body | {"context_management": {"edits": [edit]}})
        assert (status, refusal["error"]["param"]) == (400, "context_management")
        tools = [tool | {"strict": True} for tool in body["tools"]]
        status, refusal = await front.post(MESSAGES, body | {"tools": tools})
        assert (status, refusal["error"]["param"]) == (400, "tools")
        assert "propertyNames" in refusal["error"]["message"]
    assert (message["content"][0]["name"], message["content"][0]["input"]) == (name, {"answers": {}})
    assert seen[0].hints.lifetime_s == 3600
    assert model.accepts(seen[0], call)
    many = [{"name": f"tool_{number}"} for number in range(512)]
    chat = MessagesBody.model_validate({"max_tokens": 1, "messages": USER, "tools": many}).to_chat()
    assert len(chat.tools or ()) == 512


def test_a_named_tool_needs_its_name() -> None:
    body = MessagesBody.model_validate({"max_tokens": 1, "messages": USER, "tool_choice": {"type": "tool"}})
    with pytest.raises(InvalidRequest, match="requires a name"):
        body.to_chat()


async def test_an_error_within_a_stream_is_an_event_of_its_own(front: Any, cluster: Any) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        prefill.send(submit, 0, [20])
        prefill.fail(submit, "internal", retryable=False)

    prefill.on_submit = on_submit
    response = await front.open_stream(MESSAGES, {"max_tokens": 20, "messages": USER})
    events = (await response.read()).decode()
    assert events.startswith("event: message_start\n")
    last = events.strip().split("\n\n")[-1]
    assert last.startswith("event: error\ndata: ")
    error = json.loads(last.partition("data: ")[2])
    assert (error["type"], error["error"]["type"], error["error"]["code"]) == ("error", "api_error", "internal")
    assert "[DONE]" not in events


async def test_other_methods_and_paths_are_refused_in_anthropics_form(front: Any) -> None:
    async with front.http.get(front.url + MESSAGES) as response:
        assert response.status == 405
        assert response.headers["allow"] == "POST"
        assert (await response.json())["type"] == "error"
    status, body = await front.post("/v1/messages/batches", {})
    assert (status, body["error"]["code"]) == (404, "endpoint_not_served")
