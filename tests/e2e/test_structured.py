"""Structured output of a live cluster: whatever the schema, answers parse and conform, on whichever worker they end.

The model's weights are random: nothing but the grammar makes it write JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NAMES = st.text('abcxyz_ü"\\ ', min_size=1, max_size=6)
BOUNDED = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def bounds(low: int, high: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(lambda pair: (min(pair), max(pair)))


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def build(properties: dict[str, Any], flags: list[bool]) -> dict[str, Any]:
        required = [name for name, flag in zip(properties, flags, strict=False) if flag]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.builds(build, st.dictionaries(NAMES, inner, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    bounds(-5000, 5000).map(lambda pair: {"type": "integer", "minimum": pair[0], "maximum": pair[1]}),
    bounds(0, 12).map(lambda pair: {"type": "string", "minLength": pair[0], "maxLength": pair[1]}),
    st.lists(NAMES | st.integers(-9, 9) | st.booleans() | st.none(), min_size=1, max_size=4).map(lambda v: {"enum": v}),
    st.sampled_from([{"type": "string", "pattern": "^[a-f]{2,5}-[0-9]{3}$"}, {"type": "string", "format": "date"}]),
)
SCHEMAS = objects(
    st.recursive(
        LEAVES,
        lambda inner: (
            objects(inner)
            | st.builds(
                lambda items, pair: {"type": "array", "items": items, "minItems": pair[0], "maxItems": pair[1]},
                inner,
                bounds(0, 3),
            )
            | st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options})
        ),
        max_leaves=6,
    )
)


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any]) -> Iterator[Any]:
    with start_cluster(random_model, "--decode-nodes", "2", "--block-tokens", "8") as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


def asked(cluster: Any, **fields: Any) -> dict[str, Any]:
    return {"model": cluster.ready["model"], "messages": [{"role": "user", "content": "Fill this in."}], **fields}


def held_to(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@BOUNDED
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_an_answer_parses_and_conforms_whatever_the_schema(
    cluster: Any, client: openai.OpenAI, schema: Any, seed: int
) -> None:
    answer = client.chat.completions.create(
        **asked(cluster, response_format=held_to(schema), temperature=1.0, seed=seed, max_tokens=1500)
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content or ""), schema)


@BOUNDED
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_arguments_of_a_call_parse_and_conform_whatever_the_parameters(
    cluster: Any, client: openai.OpenAI, schema: Any, seed: int
) -> None:
    tools = [{"type": "function", "function": {"name": "fill", "parameters": schema}}]
    answer = client.chat.completions.create(
        **asked(
            cluster,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": "fill"}},
            temperature=1.0,
            seed=seed,
            max_tokens=1000,
        )
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "fill"
    jsonschema.validate(json.loads(call.function.arguments), schema)


@pytest.mark.parametrize("victim", ["decode-0", "decode-1"])
async def test_an_answer_conforms_when_its_worker_is_killed_in_the_middle(cluster: Any, victim: str) -> None:
    word = {"type": "string", "minLength": 4, "maxLength": 12}
    pair = {"type": "object", "properties": {"word": word, "at": {"type": "integer", "minimum": 0, "maximum": 99}}}
    pair |= {"required": ["word", "at"], "additionalProperties": False}
    schema = {"type": "array", "items": pair, "minItems": 12, "maxItems": 12}
    old, is_killed, attempts = cluster.pid(victim), False, list[int]()
    body = asked(cluster, temperature=1.0, max_tokens=1500, stream=True, extra_body={"guided_json": schema})
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        streams = [await client.chat.completions.create(**body, seed=seed) for seed in range(4)]
        texts = [""] * len(streams)
        for at, stream in enumerate(streams):
            async for chunk in stream:
                texts[at] += "".join(choice.delta.content or "" for choice in chunk.choices)
                attempts += [facts["attempts"] for facts in [(chunk.model_extra or {}).get("moonpool")] if facts]
                if not is_killed and len(texts[at]) > 40:
                    cluster.kill(victim)
                    is_killed = True
    assert is_killed
    assert max(attempts) > 1  # at least one went on elsewhere
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    await cluster.wait_restarted(victim, old)
    await cluster.validate()
