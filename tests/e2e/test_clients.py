"""A real cluster as its clients meet it: the openai package, probes, metrics, rejection, clients that leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, ConfigDict, Field

TEXT = "The old miller carried a copper lantern beyond the northern gate, and the children followed him. " * 3
USER = [{"role": "user", "content": TEXT}]
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
TOLERANCE = 1e-3
GREEDY: dict[str, Any] = {**SEEDED, "temperature": 0.0}


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any]) -> Iterator[Any]:
    with start_cluster(random_model, "--block-tokens", "8", "--served-model-name", "tiny") as running:
        yield running


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


async def metrics(url: str, session: aiohttp.ClientSession) -> dict[str, float]:
    """Every sample's value by name, summed over its labels."""
    async with session.get(f"{url}/metrics") as response:
        assert response.status == 200
        text = await response.text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    give_up = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < give_up, f"not within 30 s: {what}"
        await asyncio.sleep(0.05)


def test_only_the_frontend_listens_by_tcp(cluster: Any) -> None:
    """On one machine, also KV goes over unix sockets."""
    ports = {
        node: {each.laddr.port for each in psutil.Process(cluster.pid(node)).net_connections("inet") if not each.raddr}
        for node in cluster.ready["nodes"]
    }
    assert {node: found for node, found in ports.items() if found} == {
        "frontend": {int(cluster.url.rpartition(":")[2])}
    }


async def test_the_served_model_is_listed_with_its_context(client: openai.AsyncOpenAI) -> None:
    (card,) = (await client.models.list()).data
    assert (card.id, card.object) == ("tiny", "model")
    assert card.model_extra is not None
    assert card.model_extra["max_model_len"] == 2048


async def test_a_streamed_completion_is_the_one_that_is_not_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="tiny", prompt=TEXT, **GREEDY)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24
    stream = await client.completions.create(
        model="tiny", prompt=TEXT, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    texts = [choice.text for chunk in chunks for choice in chunk.choices]
    assert len(texts) > 1
    assert "".join(texts) == whole.choices[0].text
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 24


async def test_a_streamed_chat_is_the_one_that_is_not_streamed(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=USER, **GREEDY)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    stream = await client.chat.completions.create(
        model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 24


async def test_usage_tells_what_the_second_call_found_cached(cluster: Any, client: openai.AsyncOpenAI) -> None:
    prompt = "Cached once: " + TEXT
    first, second = [await client.completions.create(model="tiny", prompt=prompt, **GREEDY) for _ in range(2)]
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    # All full blocks of 8, but for the token that must be computed.
    assert second.usage.prompt_tokens_details.cached_tokens == (second.usage.prompt_tokens - 1) // 8 * 8
    assert second.choices[0].text == first.choices[0].text


async def test_a_stop_string_ends_the_answer_before_it(client: openai.AsyncOpenAI) -> None:
    whole = (await client.completions.create(model="tiny", prompt=TEXT, **GREEDY)).choices[0].text
    stop = whole[len(whole) // 2 :][:4]
    expected = whole[: whole.index(stop)]
    cut = await client.completions.create(model="tiny", prompt=TEXT, stop=[stop], **GREEDY)
    assert (cut.choices[0].text, cut.choices[0].finish_reason) == (expected, "stop")
    stream = await client.completions.create(model="tiny", prompt=TEXT, stop=[stop], stream=True, **GREEDY)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == expected


async def test_equal_seeds_give_equal_answers_and_others_do_not(client: openai.AsyncOpenAI) -> None:
    async def text(seed: int) -> str:
        done = await client.completions.create(
            model="tiny", prompt=TEXT, **{**SEEDED, "temperature": 2.0, "seed": seed}
        )
        return done.choices[0].text

    assert await text(11) == await text(11) != await text(12)


async def test_a_seed_that_was_drawn_is_told_and_repeats_the_answer(client: openai.AsyncOpenAI) -> None:
    options = {name: value for name, value in SEEDED.items() if name != "seed"} | {"temperature": 2.0}
    drawn = await client.completions.create(model="tiny", prompt=TEXT, **options)
    assert drawn.model_extra is not None
    again = await client.completions.create(
        model="tiny", prompt=TEXT, seed=drawn.model_extra["moonpool"]["seed"], **options
    )
    assert again.choices[0].text == drawn.choices[0].text


async def test_errors_are_the_openai_packages_own(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'gpt-4' is not served here; served models: 'tiny'") as missing:
        await client.completions.create(model="gpt-4", prompt=TEXT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="max_tokens") as negative:
        await client.completions.create(model="tiny", prompt=TEXT, max_tokens=-1)
    assert negative.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="maximum context length is 2048 tokens") as long:
        await client.completions.create(model="tiny", prompt=[7] * 2048, max_tokens=1)
    assert long.value.code == "context_length_exceeded"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_everything(
    cluster: Any, session: aiohttp.ClientSession, stream: bool
) -> None:
    async def in_flight() -> float:
        return (await metrics(cluster.url, session))["moonpool:requests_in_flight"]

    async def one_more() -> bool:
        return await in_flight() == 1

    body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1700, "ignore_eos": True, "stream": stream}
    asking = asyncio.create_task(session.post(f"{cluster.url}/v1/completions", json=body))
    if stream:
        response = await asking
        await response.content.readuntil(b"\n\n")
        assert await in_flight() == 1
        response.close()
    else:
        await until(one_more, "the request has begun")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await cluster.validate()
    assert await in_flight() == 0


async def test_probes_answer_and_metrics_have_vllms_names(
    cluster: Any, client: openai.AsyncOpenAI, session: aiohttp.ClientSession
) -> None:
    for path in ("/health", "/live", "/ready"):
        async with session.get(f"{cluster.url}{path}") as response:
            assert (response.status, path) == (200, path)
    before = await metrics(cluster.url, session)
    done = await client.completions.create(model="tiny", prompt="Counted: " + TEXT, **GREEDY)
    assert done.usage is not None
    after = await metrics(cluster.url, session)
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == done.usage.prompt_tokens
    assert grown["vllm:generation_tokens_total"] == 24
    assert grown["vllm:request_success_total"] == 1
    assert grown["vllm:prefix_cache_queries_total"] == done.usage.prompt_tokens
    for histogram in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown[f"vllm:{histogram}_seconds_count"] == 1
    for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert gauge in after

    async def nodes_have_told() -> bool:
        return (await metrics(cluster.url, session)).get("moonpool:kv_bytes_moved_total", 0.0) > 0

    await until(nodes_have_told, "the nodes have reported the KV they moved")


async def test_an_objective_that_cannot_be_met_is_a_429_with_retry_after(
    random_model: Path, start_cluster: Callable[..., Any], session: aiohttp.ClientSession
) -> None:
    flags = ("--aggregated", "1", "--block-tokens", "8", "--served-model-name", "tiny", "--ttft-slo", "0.000001")
    with start_cluster(random_model, *flags) as strict:
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 4}
        for stream in (False, True):
            async with session.post(f"{strict.url}/v1/completions", json={**body, "stream": stream}) as response:
                error = (await response.json())["error"]
                assert response.status == 429, error
                assert int(response.headers["Retry-After"]) >= 1
            assert (error["type"], error["code"]) == ("rate_limit_error", "ttft")
            assert "objective" in error["message"]
        async with openai.AsyncOpenAI(base_url=f"{strict.url}/v1", api_key="any", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="tiny", prompt=TEXT)
        rejected = await metrics(strict.url, session)
        assert rejected["moonpool:requests_rejected_total"] == 3
        await strict.validate()


async def test_several_answers_share_a_prompt_and_differ(client: openai.AsyncOpenAI) -> None:
    prompt = "Several answers: " + TEXT
    options = {**SEEDED, "temperature": 1.5, "n": 3}
    whole = await client.completions.create(model="tiny", prompt=prompt, **options)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    texts = [choice.text for choice in whole.choices]
    assert len(set(texts)) == 3
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3 * 24
    assert whole.model_extra is not None
    # The later ones found what the first one had computed.
    first, *others = [facts["cached_tokens"] for facts in whole.model_extra["moonpool"]]
    assert first == 0
    assert all(cached == (whole.usage.prompt_tokens - 1) // 8 * 8 for cached in others)
    streamed = ["", "", ""]
    async for chunk in await client.completions.create(model="tiny", prompt=prompt, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    alone = await client.completions.create(model="tiny", prompt=prompt, **{**options, "n": 1})
    assert alone.choices[0].text == texts[0]


async def test_log_probabilities_are_the_models_own(
    cluster: Any, client: openai.AsyncOpenAI, random_model: Path, judge_of: Callable[[Path], Any]
) -> None:
    prompt = list(range(100, 140))
    options = {**SEEDED, "temperature": 0.7, "logprobs": 3, "echo": True}
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True, "return_token_ids": True}
    whole = await client.completions.create(model="tiny", prompt=prompt, **{**options, "extra_body": extra})
    choice = whole.choices[0]
    told = choice.logprobs
    assert told is not None
    assert choice.model_extra is not None
    ids = prompt + choice.model_extra["token_ids"]
    expected = judge_of(random_model).logprobs(ids)
    assert told.tokens == [f"token_id:{token_id}" for token_id in ids]
    assert told.token_logprobs is not None
    assert told.token_logprobs[0] is None
    own = [row[token] for row, token in zip(expected, ids[1:], strict=False)]
    assert told.token_logprobs[1:] == pytest.approx(own, abs=TOLERANCE)
    assert told.top_logprobs is not None
    for row, top, token in zip(expected, told.top_logprobs[1:], ids[1:], strict=False):
        best = sorted(row, reverse=True)[:3]
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(best, abs=TOLERANCE)
        assert f"token_id:{token}" in top
    stream = await client.completions.create(
        model="tiny", prompt=prompt, stream=True, **{**options, "extra_body": extra}
    )
    parts = [choice.logprobs for chunk in [chunk async for chunk in stream] for choice in chunk.choices]
    assert [token for part in parts if part for token in part.tokens or ()] == told.tokens
    alone = await client.completions.create(
        model="tiny", prompt=prompt, max_tokens=0, logprobs=0, echo=True, extra_body=extra
    )
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs is not None
    assert alone.choices[0].logprobs.token_logprobs[1:] == pytest.approx(own[: len(prompt) - 1], abs=TOLERANCE)
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


async def test_a_chats_log_probabilities_spell_its_text(client: openai.AsyncOpenAI) -> None:
    options = {**SEEDED, "logprobs": True, "top_logprobs": 2}
    whole = await client.chat.completions.create(model="tiny", messages=USER, **options)
    told = whole.choices[0].logprobs
    assert told is not None
    content = told.content or []
    assert len(content) == 24
    spelled = bytes(byte for entry in content for byte in entry.bytes or ())
    assert spelled.decode(errors="replace") == whole.choices[0].message.content
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in content)


class Person(BaseModel):
    """As a client of OpenAI's structured outputs would have it."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    age: Annotated[int, Field(ge=0, le=150)]


async def test_openais_parse_gives_an_object_of_the_clients_own(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="tiny", messages=USER, response_format=Person, temperature=1.0, seed=3, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"


async def test_a_conversation_with_tools_goes_round(client: openai.AsyncOpenAI) -> None:
    parameters = Person.model_json_schema()
    tools: Any = [{"type": "function", "function": {"name": "greet", "parameters": parameters}}]
    options: dict[str, Any] = {"model": "tiny", "tools": tools, "temperature": 1.0, "seed": 4, "max_tokens": 400}
    forced: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = await client.chat.completions.create(messages=USER, **options, **forced)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    Person.model_validate_json(call.function.arguments)
    async with client.chat.completions.stream(messages=USER, **options, **forced) as stream:
        final = await stream.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    history: Any = [
        *USER,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "Hello!"},
    ]
    after = await client.chat.completions.create(messages=history, **options, tool_choice="none")
    assert after.choices[0].message.content is not None
    assert after.usage is not None
    assert after.usage.prompt_tokens_details is not None
    # Prompt and call are found in the cache: the history reads as it was generated.
    assert after.usage.prompt_tokens_details.cached_tokens >= (answer.usage.prompt_tokens // 8) * 8  # type: ignore[union-attr]
