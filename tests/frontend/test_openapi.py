"""The OpenAPI description is true: of what is answered, of what is taken and of what is refused."""

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from frontend.api.request_models import ChatBody
from moonpool_proto.v1 import worker_pb2

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
ANSWERED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"prompt": "the cat", "max_tokens": 90}, "Completion"),
    (
        COMPLETIONS,
        {"prompt": ["the", "cat"], "n": 2, "max_tokens": 90, "logprobs": 2, "echo": True},
        "Completion",
    ),
    (
        COMPLETIONS,
        {"prompt": [5, 6], "prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 90},
        "Completion",
    ),
    (COMPLETIONS, {"prompt": "the cat", "return_receipt": True, "max_tokens": 90}, "Completion"),
    (CHAT, {"messages": USER, "return_receipt": True, "n": 2, "max_tokens": 90}, "Chat"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 90}, "Chat"),
    (CHAT, {"messages": USER, "tools": TOOLS, "max_tokens": 90, "return_token_ids": True}, "Chat"),
    (CHAT, {"messages": USER, "tools": TOOLS, "tool_choice": "required", "prompt_logprobs": 0}, "Chat"),
]


@pytest.fixture
async def description(cluster: Any, front: Any) -> dict[str, Any]:
    for status in cluster.conductor.cluster.nodes:
        status.node.max_model_len = 4096
    status, text = await front.get("/openapi.json")
    assert status == 200
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.fixture
def check(description: dict[str, Any]) -> Callable[[Any, dict[str, Any]], None]:
    """Raises when a value is not what a schema of the description says."""

    def check(value: Any, schema: dict[str, Any]) -> None:
        jsonschema.validate(value, {**schema, "components": description["components"]})

    return check


def test_every_schema_is_one(description: dict[str, Any]) -> None:
    for schema in description["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(description["paths"])
    for part in text.split("#/components/schemas/")[1:]:
        assert part.split('"')[0] in description["components"]["schemas"]


async def test_answers_whole_and_streamed_are_as_described(
    cluster: Any, front: Any, check: Any, description: dict[str, Any], ids_of: Callable[[str], list[int]]
) -> None:
    cluster.answer_with(lambda submit: ([*ids_of(f" naïve{CALL}"), 3], worker_pb2.FINISH_STOP))
    for path, body, kind in ANSWERED:
        status, answer = await front.post(path, body)
        assert status == 200, answer
        responses = description["paths"][path]["post"]["responses"]
        check(answer, responses["200"]["content"]["application/json"]["schema"])
        if "prompt_logprobs" in body:
            continue
        event = {"$ref": "#/components/schemas/" + ("CompletionResponse" if kind == "Completion" else "ChatChunk")}
        options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        for chunk in await front.events(path, body | options):
            check(chunk, event)


async def test_every_route_without_a_body_answers_as_described(
    front: Any, check: Any, description: dict[str, Any]
) -> None:
    for path, item in description["paths"].items():
        if "get" in item and "json" in str(item["get"]["responses"]["200"]):
            status, text = await front.get(path.replace("{name}", "tiny"))
            assert status == 200
            check(json.loads(text), item["get"]["responses"]["200"]["content"]["application/json"]["schema"])
    for path, body in (("/tokenize", {"prompt": "a", "return_token_strs": True}), ("/detokenize", {"tokens": [5]})):
        _, answer = await front.post(path, body)
        responses = description["paths"][path]["post"]["responses"]
        check(answer, responses["200"]["content"]["application/json"]["schema"])


async def test_every_route_that_is_served_is_described(front: Any, description: dict[str, Any]) -> None:
    for path, item in description["paths"].items():
        wrong = "DELETE"
        async with front.http.request(wrong, front.url + path.replace("{name}", "tiny")) as response:
            assert response.status == 405
            assert {"get": "GET", "post": "POST"}[next(iter(item))] in response.headers["allow"]
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}


async def test_errors_are_as_described(front: Any, check: Any, description: dict[str, Any]) -> None:
    bad: list[tuple[str, Any, int]] = [
        (COMPLETIONS, {"prompt": "a", "model": "other"}, 404),
        (CHAT, {"messages": []}, 400),
        ("/tokenize", [], 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
    ]
    for path, body, expected in bad:
        status, answer = await front.post(path, body)
        assert status == expected
        responses = description["paths"][path]["post"]["responses"]
        check(answer, responses[str(status)]["content"]["application/json"]["schema"])


def test_bodies_that_are_taken_conform_and_refused_fields_do_not(check: Any) -> None:
    for path, body, _ in ANSWERED:
        check(body, {"$ref": "#/components/schemas/" + ("CompletionBody" if path == COMPLETIONS else "ChatBody")})
    everything = {
        "messages": [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
            }
        ],
        "stop": "a",
        "logit_bias": {"5": -1.5},
        "tool_choice": {"type": "function", "function": {"name": "now"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "structured_outputs": {"json": {}},
        "guided_json": "{}",
        "seed": -1,
    }
    check(everything, {"$ref": "#/components/schemas/ChatBody"})
    with pytest.raises(jsonschema.ValidationError):
        check({"prompt": []}, {"$ref": "#/components/schemas/CompletionBody"})
    for name in ChatBody.UNSUPPORTED:
        wrong: dict[str, Any] = {"prompt": "a", "messages": USER, name: {"asks": "something"}}
        for body in ("CompletionBody", "ChatBody"):
            if name in ("tools", "tool_choice", "top_logprobs", "echo", "truncate_prompt_tokens"):
                continue
            with pytest.raises(jsonschema.ValidationError):
                check(wrong, {"$ref": f"#/components/schemas/{body}"})


async def test_a_key_is_described_where_one_is_asked_for(start_front: Any) -> None:
    async with start_front(api_key=("secret",)) as front:
        described = json.loads((await front.get("/openapi.json"))[1])
    assert described["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    asked = {path for path, item in described["paths"].items() if "security" in next(iter(item.values()))}
    of_agents = {"/v1/responses", "/v1/messages", "/v1/messages/count_tokens"}
    assert asked == {COMPLETIONS, CHAT, *of_agents, "/tokenize", "/detokenize", "/v1/models", "/v1/models/{name}"}
