"""OpenAI's Responses API over real HTTP, with OpenAI's own client."""

import json
from typing import Any

import openai
import pytest

from frontend.api.responses.request import ResponsesBody
from moonpool_proto.v1 import worker_pb2

RESPONSES = "/v1/responses"
LENGTH = worker_pb2.FINISH_LENGTH
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "name": "weather", "description": "Tells it.", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}, "strict": True},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":"Rom"}}\n</tool_call>'


def client_of(front: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)


async def test_an_answer_has_reasoning_text_and_calls_as_items(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers(f"<think>\nwhy\n</think>\n\nlook:{CALL}")
        response = await client.responses.create(
            model="tiny", input="hi", instructions="Be kind.", tools=TOOLS, max_output_tokens=99, metadata={"a": "b"}
        )
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "why"
    assert message.content[0].text == response.output_text == "look:"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rom"})
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.id, response.id[:5]) == (seen[0].request_id, "resp_")
    assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>" in model.prompt(seen[0])
    assert seen[0].sampling.max_tokens == 99
    assert response.usage.input_tokens == len(seen[0].prompt_ids) // 4
    assert response.usage.output_tokens_details.reasoning_tokens == 7
    assert (response.metadata, response.store, len(response.tools)) == ({"a": "b"}, False, 2)


async def test_a_stream_ends_with_the_same_response(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers(f"<think>\nwhy\n</think>\n\nlook:{CALL}\n{CALL.replace('Rom', 'Bonn')}")
        async with client.responses.stream(model="tiny", input="hi", tools=TOOLS) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        whole = await client.responses.create(model="tiny", input="hi", tools=TOOLS)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type for event in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 4

    def deltas(kind: str) -> list[str]:
        return [event.delta for event in events if event.type == f"response.{kind}.delta"]

    assert "".join(deltas("reasoning_text")) == "why"
    assert "".join(deltas("output_text")) == "look:"
    assert "".join(deltas("function_call_arguments")) == '{"city":"Rom"}{"city":"Bonn"}'
    assert min(len(deltas(kind)) for kind in ("reasoning_text", "output_text", "function_call_arguments")) > 2
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == ['{"city":"Rom"}', '{"city":"Bonn"}']

    def parts(response: Any) -> list[Any]:
        items = [(item.type, item.status, getattr(item, "arguments", None)) for item in response.output]
        return [*items, response.output_text, response.status, response.usage]

    assert parts(final) == parts(whole)


async def test_a_history_of_items_becomes_the_turns_of_a_chat() -> None:
    body = ResponsesBody.model_validate(
        {
            "instructions": "Be kind.",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look:"}]},
                {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rom"}'},
                {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "9:00"}]},
                {"role": "assistant", "content": "Sunny."},
                {"role": "assistant", "content": "And nine."},
                {"role": "developer", "content": "Be brief."},
            ],
        }
    )
    messages = [message.model_dump(exclude_none=True) for message in body.to_chat().messages]
    assert [message["role"] for message in messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "assistant", "developer")
    ]
    turn = messages[2]
    assert (turn["reasoning_content"], turn["content"][0]["text"]) == ("why", "look:")
    assert [call["id"] for call in turn["tool_calls"]] == ["c1", "c2"]
    assert (messages[4]["tool_call_id"], messages[4]["content"][0]["text"]) == ("c2", "9:00")


async def test_a_response_can_be_sent_back_as_the_history(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers(f"<think>\nwhy\n</think>\n\nlook:{CALL}")
        first = await client.responses.create(model="tiny", input="hi", tools=TOOLS)
        seen = model.answers("warm")
        call = first.output[-1]
        history: list[Any] = [{"role": "user", "content": "hi"}, *first.output]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        await client.responses.create(model="tiny", input=[*history, result], tools=TOOLS)
    prompt = model.prompt(seen[0])
    assert "<|im_start|>assistant\n<think>\nwhy\n</think>\n\nlook:<|im_end|>\n<|im_start|>tool\nsunny" in prompt


async def test_an_answer_at_its_limit_is_incomplete(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers("abc", LENGTH)
        response = await client.responses.create(model="tiny", input="hi", max_output_tokens=9)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete"


async def test_the_format_and_the_choice_of_tools_reach_the_grammar(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers("{}")
        form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
        response = await client.responses.create(model="tiny", input="hi", text={"format": form})
        choice = {"type": "function", "name": "now"}
        chosen = await client.responses.create(model="tiny", input="hi", tools=TOOLS, tool_choice=choice)
    assert response.text.format.name == "a"
    assert model.accepts(seen[0], '{"city":"Rom"}')
    assert not model.accepts(seen[0], "Rom")
    assert model.accepts(seen[1], '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not model.accepts(seen[1], CALL)
    assert chosen.tool_choice.name == "now"


async def test_log_probabilities_are_those_of_the_text(serve_family: Any) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers("<think>\nwhy\n</think>\n\nso")
        response = await client.responses.create(
            model="tiny", input="hi", top_logprobs=2, include=["message.output_text.logprobs"]
        )
    logprobs = response.output[1].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == "\n\nso<|im_end|>"  # of the text and its markers
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)


async def test_a_stream_has_the_log_probabilities_of_all_tokens(serve_family: Any) -> None:
    body: dict[str, Any] = {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers("<think>\nwhy\n</think>\n\n🎉😀 so")  # of several tokens a character
        whole = (await client.responses.create(model="tiny", **body)).output[1].content[0]
        events = [event async for event in await client.responses.create(model="tiny", stream=True, **body)]
    found = {event.type: event for event in events}
    expected = [entry.to_dict() for entry in whole.logprobs]

    def plain(entries: Any) -> list[Any]:
        return [entry.to_dict() for entry in entries]

    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [entry for event in deltas for entry in plain(event.logprobs)] == expected
    assert "".join(event.delta for event in deltas) == whole.text
    assert plain(found["response.output_text.done"].logprobs) == expected
    assert plain(found["response.content_part.done"].part.logprobs) == expected
    assert plain(found["response.output_item.done"].item.content[0].logprobs) == expected
    assert plain(found["response.completed"].response.output[1].content[0].logprobs) == expected


async def test_a_call_has_no_log_probabilities_in_a_message(serve_family: Any) -> None:
    body: dict[str, Any] = {"input": "hi", "top_logprobs": 0, "include": ["message.output_text.logprobs"]}
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        model.answers(f"look:{CALL}")
        async with client.responses.stream(model="tiny", tools=TOOLS, **body) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert "".join(entry.token for entry in final.output[0].content[0].logprobs) == "look:"


@pytest.mark.parametrize(
    ("effort", "ending"), [("none", "<think>\n\n</think>\n\n"), ("low", "<|im_start|>assistant\n")]
)
async def test_the_effort_switches_reasoning_off_where_the_template_can(
    serve_family: Any, effort: str, ending: str
) -> None:
    async with serve_family("qwen3") as (front, model), client_of(front) as client:
        seen = model.answers("so")
        await client.responses.create(model="tiny", input="hi", reasoning={"effort": effort, "summary": "auto"})
        await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], reasoning_effort=effort
        )
    assert [model.prompt(submit).endswith(ending) for submit in seen] == [True, True]


async def test_an_effort_that_the_template_cannot_ask_for_is_refused(serve_family: Any) -> None:
    async with serve_family("deepseek") as (front, model):
        model.answers("why\n</think>\n\nso")
        for effort in ("none", "high"):
            status, body = await front.post(RESPONSES, {"input": "hi", "reasoning": {"effort": effort}})
            assert (status, body["error"]["param"]) == (400, "reasoning.effort")
            assert body["error"]["code"] == "unsupported_parameter"
    async with serve_family("harmony") as (front, model):
        model.answers("<|channel|>final<|message|>so")
        status, body = await front.post(RESPONSES, {"input": "hi", "reasoning": {"effort": "minimal"}})
        assert status == 400
        assert "must be low, medium, high" in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"store": True}, "store", "not supported"),
        ({"background": True}, "background", "not supported"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "nothing is stored"),
        ({"input": [{"type": "computer_call"}]}, "input", "item 0 has the type 'computer_call'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.message.content.0.type",
            "cannot read image input",
        ),
        ({"input": []}, "input", "at least 1"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "OpenAI's servers"),
        ({"tool_choice": "sometimes"}, "tool_choice", "must be 'none', 'auto', 'required'"),
        ({"reasoning": {"summary": "detailed"}}, "summary", "not supported"),
        ({"max_output_tokens": 10**6}, "input", "maximum context length"),
        ({"include": ["file_search_call.results"]}, "include.0", "message.output_text.logprobs"),
    ],
)
async def test_an_invalid_body_is_refused_with_the_fields_name(
    front: Any, fields: dict[str, Any], param: str, says: str
) -> None:
    status, body = await front.post(RESPONSES, {"model": "tiny", "input": "hi", **fields})
    assert status == 400
    assert body["error"]["param"] == param
    assert says in body["error"]["message"]


async def test_metadata_has_openais_limits(front: Any, cluster: Any) -> None:
    cluster.answer_with(lambda submit: ([5, 3], worker_pb2.FINISH_STOP))
    accepted = {str(number).rjust(64, "k"): "v" * 512 for number in range(16)}
    status, response = await front.post(RESPONSES, {"input": "hi", "metadata": accepted})
    assert (status, response["metadata"]) == (200, accepted)
    for refused in (accepted | {"k": "v"}, {"k" * 65: "v"}, {"k": "v" * 513}, {"k": 1}):
        status, body = await front.post(RESPONSES, {"input": "hi", "metadata": refused})
        assert status == 400
        assert body["error"]["param"].startswith("metadata")


async def test_an_error_within_a_stream_fails_the_response(front: Any, cluster: Any) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        prefill.send(submit, 0, [20])
        prefill.fail(submit, "internal", retryable=False)

    prefill.on_submit = on_submit
    async with client_of(front) as client:
        events = [event async for event in await client.responses.create(model="tiny", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    assert "scripted internal" in events[-1].response.error.message
    assert events[-1].sequence_number == len(events) - 1
