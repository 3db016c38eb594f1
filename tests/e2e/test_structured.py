"""Steered answers of a live cluster: under a grammar they parse and conform whatever the schema, on whichever worker
they end; under penalties and biases they are, with their log-probabilities, those that one process would have given.

The model's weights are random: nothing but the grammar makes it write JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import numpy as np
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import Model, load_model

Floats = NDArray[np.float32]

ROUNDS = 6  # of killing a worker, until it held a request
PROMPTS = [np.random.default_rng(i).integers(5, 2000, 40 + 30 * i).tolist() for i in range(3)]
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 1234}
CONTROLS: list[dict[str, Any]] = [
    {**SAMPLED, "min_p": 0.05},
    {**SAMPLED, "repetition_penalty": 1.6, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {"17": 12.0, "99": -100.0}},
    {**SAMPLED, "logit_bias": {"17": 9.0}, "repetition_penalty": 0.8, "min_p": 0.02},
]
TAGS = {"type": "array", "items": {"enum": ["x", "yz"]}, "maxItems": 3}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}, "tags": TAGS},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
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


async def test_an_answer_conforms_when_its_worker_is_killed_in_the_middle(cluster: Any) -> None:
    word = {"type": "string", "minLength": 4, "maxLength": 12}
    pair = {"type": "object", "properties": {"word": word, "at": {"type": "integer", "minimum": 0, "maximum": 99}}}
    pair |= {"required": ["word", "at"], "additionalProperties": False}
    schema = {"type": "array", "items": pair, "minItems": 12, "maxItems": 12}
    body = asked(cluster, temperature=1.0, max_tokens=1500, stream=True, extra_body={"guided_json": schema})
    for number in range(ROUNDS):  # either worker may hold all the requests
        victim = f"decode-{(number + 1) % 2}"
        texts, attempts = await answers_while_killed(cluster, victim, body, range(4 * number, 4 * number + 4))
        for text in texts:
            jsonschema.validate(json.loads(text), schema)
        await cluster.validate()
        if max(attempts) > 1:  # at least one went on elsewhere
            return
    pytest.fail(f"in none of {ROUNDS} rounds did the worker that was killed hold a request")


async def answers_while_killed(
    cluster: Any, victim: str, body: dict[str, Any], seeds: Sequence[int]
) -> tuple[list[str], list[int]]:
    """Return the streamed texts and their numbers of attempts; `victim` is killed when an answer has 40 characters.

    On a busy machine all answers may be complete, though not yet read, when the kill comes.
    """
    old, texts, attempts = cluster.pid(victim), [""] * len(seeds), list[int]()
    is_killed = asyncio.Event()

    async def read(at: int, stream: Any) -> None:
        async for chunk in stream:
            texts[at] += "".join(choice.delta.content or "" for choice in chunk.choices)
            attempts.extend(facts["attempts"] for facts in [(chunk.model_extra or {}).get("moonpool")] if facts)
            if not is_killed.is_set() and len(texts[at]) > 40:
                cluster.kill(victim)
                is_killed.set()

    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        streams = [await client.chat.completions.create(**body, seed=seed) for seed in seeds]
        await asyncio.gather(*(read(at, stream) for at, stream in enumerate(streams)))
    assert is_killed.is_set()
    await cluster.wait_restarted(victim, old)
    return texts, attempts


@pytest.fixture(scope="module")
def reference(random_model: Path) -> Model:
    return load_model(random_model, threads=1)


def steered(logits: Floats, prompt: list[int], out: list[int], controls: dict[str, Any]) -> Floats:
    """Bias and penalties in plain loops."""
    logits = logits.copy()
    for i, bias in controls.get("logit_bias", {}).items():
        logits[int(i)] += np.float32(bias)
    for i in {*prompt, *out}:
        penalty = np.float32(controls.get("repetition_penalty", 1.0))
        logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
    for i in set(out):
        logits[i] -= np.float32(controls.get("frequency_penalty", 0.0)) * np.float32(out.count(i))
        logits[i] -= np.float32(controls.get("presence_penalty", 0.0))
    return logits


async def test_tokens_and_log_probabilities_are_those_of_one_process(
    cluster: Any, session: aiohttp.ClientSession, judge_of: Callable[[Path], Any], random_model: Path, reference: Model
) -> None:
    """Twice each: the second answers reuse what the first ones left."""
    judge = judge_of(random_model)
    asked = [(prompt, controls) for prompt in PROMPTS for controls in CONTROLS]
    answers = []
    for _ in range(2):
        answers += await asyncio.gather(
            *(cluster.complete(session, prompt, max_tokens=24, logprobs=3, **controls) for prompt, controls in asked)
        )
    assert any(answer.cached_tokens for answer in answers)
    for answer, (prompt, controls) in zip(answers, asked * 2, strict=True):
        assert len(answer.token_ids) == 24

        def steer(logits: Floats, out: list[int], prompt: list[int] = prompt, controls: Any = controls) -> Floats:
            return steered(logits, prompt, out, controls)

        assert judge.wrong_tokens(answer, steer, **controls) == []
        ids = np.array([*prompt, *answer.token_ids], np.int32)
        expected = torch.log_softmax(torch.from_numpy(reference.score(ids)), dim=1).numpy()[len(prompt) - 1 : -1]
        told = answer.body["choices"][0]["logprobs"]["token_logprobs"]
        np.testing.assert_allclose(told, expected[np.arange(24), answer.token_ids], atol=1e-3, rtol=0)
    await cluster.validate()


async def test_a_prompt_is_scored_also_where_its_kv_is_known(
    cluster: Any, session: aiohttp.ClientSession, reference: Model
) -> None:
    prompt = PROMPTS[2]
    await cluster.complete(session, prompt, max_tokens=1)
    answer = await cluster.complete(session, prompt, max_tokens=1, prompt_logprobs=2)
    assert answer.cached_tokens == 0
    told = answer.body["choices"][0]["prompt_logprobs"]
    assert told[0] is None
    expected = torch.log_softmax(torch.from_numpy(reference.score(np.array(prompt, np.int32))), dim=1).numpy()
    own = [told[i][str(prompt[i])]["logprob"] for i in range(1, len(prompt))]
    np.testing.assert_allclose(own, expected[np.arange(len(own)), prompt[1:]], atol=1e-3, rtol=0)
    await cluster.validate()


async def test_answers_are_of_their_schema_and_end_with_it(cluster: Any, session: aiohttp.ClientSession) -> None:
    """This model has no end token and knows no JSON."""
    answers = await asyncio.gather(
        *(
            cluster.complete(session, PROMPTS[0], max_tokens=120, seed=i, temperature=1.5, guided_json=SCHEMA)
            for i in range(6)
        )
    )
    values = [json.loads(answer.body["choices"][0]["text"]) for answer in answers]
    assert all(value["name"] in ("Ada", "Grace") and len(value["tags"]) <= 3 for value in values)
    assert {answer.finish_reason for answer in answers} == {"stop"}
    assert len({json.dumps(value) for value in values}) > 1
    await cluster.validate()


async def test_answers_keep_to_their_schema_when_a_decode_node_dies(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    schema = {"type": "array", "items": {"enum": ["a", "bb", "ccc", 7]}, "minItems": 150, "maxItems": 150}
    asked = {"max_tokens": 1500, "guided_json": schema}
    answers = [
        asyncio.create_task(cluster.complete(session, PROMPTS[i % 3], seed=i, presence_penalty=0.5, **asked))
        for i in range(6)
    ]
    old = await _kill_while_it_answers(cluster, session, "decode-0", {"prompt": PROMPTS[1], **asked})
    for answer in await asyncio.gather(*answers):
        assert len(json.loads(answer.body["choices"][0]["text"])) == 150
        assert answer.finish_reason == "stop"
    assert max(answer.result().moonpool["attempts"] for answer in answers) > 1
    await cluster.wait_restarted("decode-0", old)
    await cluster.validate()


async def _kill_while_it_answers(
    cluster: Any, session: aiohttp.ClientSession, node_id: str, body: dict[str, Any]
) -> int:
    """Kill a node once an answer has begun; the answer, too, must end well. The old process's id."""
    text, old = "", None
    async with session.post(
        f"{cluster.url}/v1/completions", json={"model": cluster.ready["model"], "stream": True, **body}
    ) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            if old is None and len(text) > 60:
                old = cluster.kill(node_id)
    assert old is not None
    assert len(json.loads(text)) == 150
    return int(old)
