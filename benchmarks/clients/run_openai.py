"""Checks of all served endpoints and parameters with the unmodified openai package."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import openai

from benchmarks.clients.checks import WrongResult, checked, require
from benchmarks.clients.comparison import Allowed, ClientCheck, Comparison, Row
from benchmarks.clients.context import Context
from benchmarks.clients.served import read_served
from engine import load_model

TIMEOUT_S = 120.0
CHAT: list[Any] = [
    {"role": "user", "content": "The colour of Mira is red."},
    {"role": "assistant", "content": "Understood."},
    {"role": "user", "content": "What is the colour of Mira?"},
]
ANSWER = "The colour of Mira is red."
PROMPT = "In the beginning God created the heaven and the earth."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "remember",
        "description": "Remember a number of things.",
        "parameters": {
            "type": "object",
            "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["count"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
    "required": ["colour", "sure"],
    "additionalProperties": False,
}


def run_openai(context: Context) -> list[Row]:
    """Run all checks and two comparisons; a failed check is a row with the reason."""
    return asyncio.run(_run(context))


async def _run(context: Context) -> list[Row]:
    before = read_served(context.url)
    async with openai.AsyncOpenAI(
        base_url=f"{context.url}/v1", api_key="any", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        session = OpenAIChecks(client, context)
        rows: list[Row] = [await checked("openai", name, check) for name, check in session.all().items()]
        output = (read_served(context.url) - before).count("generation_tokens_total")
        told = float(session.completion_tokens)
        rows.append(Comparison("openai", "completion tokens, by usage", told, output, "/metrics, same run"))
        rows += await _log_probability_rows(session)
        # Last, because tokens generated for a disconnected client are not reported in any usage.
        rows.append(await checked("openai", "a stream that is closed early", session.closed_stream))
    return rows


async def _log_probability_rows(session: OpenAIChecks) -> list[Row]:
    try:
        gap = await session.log_probability_gap()
    except (openai.OpenAIError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        return [ClientCheck("openai", "log-probabilities against the model", False, why)]
    name = "log-probabilities of prompt and answer, furthest apart"
    return [Comparison("openai", name, gap, 0.0, "Model.score, one process", "", Allowed(slack=2e-3))]


class OpenAIChecks:
    """The checks; each method returns a short description of the result or raises WrongResult."""

    def __init__(self, client: openai.AsyncOpenAI, context: Context) -> None:
        self._client, self._context = client, context
        self.completion_tokens = 0

    def all(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """Return the checks by name."""
        return {
            "models.list, models.retrieve": self.models,
            "chat": self.chat,
            "chat, streamed": self.streamed_chat,
            "completions, streamed, with usage": self.streamed_completion,
            "completions, batch of token-id prompts": self.batch,
            "n=3, seeded": self.several_choices,
            "stop strings": self.stop,
            "chat logprobs, top_logprobs": self.chat_logprobs,
            "logit_bias": self.logit_bias,
            "response_format json_schema, parsed": self.json_schema,
            "response_format json_object": self.json_object,
            "tools, tool_choice by name": self.tool_call,
            "tools, streamed": self.streamed_tool_call,
            "responses, sent back as history": self.responses,
            "responses, streamed, with a function call": self.streamed_response,
            "errors as its exception classes": self.errors,
        }

    async def models(self) -> str:
        listed = [card.id for card in (await self._client.models.list()).data]
        require(self._context.name in listed, f"the served model is not in {listed}")
        one = await self._client.models.retrieve(self._context.name)
        require(one.id == self._context.name, f"retrieve gave {one.id}")
        return ", ".join(listed)

    async def chat(self) -> str:
        done = await self._chat()
        require(done.choices[0].message.content == ANSWER, f"it said {done.choices[0].message.content!r}")
        require(done.choices[0].finish_reason == "stop", f"it ended by {done.choices[0].finish_reason}")
        return str(done.choices[0].message.content)

    async def streamed_chat(self) -> str:
        stream = await self._client.chat.completions.create(
            model=self._context.name, messages=CHAT, temperature=0, max_tokens=24, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        self._count(chunks[-1].usage)
        require(text == ANSWER, f"it said {text!r}")
        return f"{len(chunks)} chunks"

    async def streamed_completion(self) -> str:
        whole = await self._complete(PROMPT)
        stream = await self._client.completions.create(
            model=self._context.name, prompt=PROMPT, temperature=0, max_tokens=16, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        self._count(chunks[-1].usage)
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        require(text == whole.choices[0].text, f"streamed {text!r}, whole {whole.choices[0].text!r}")
        streamed, told = chunks[-1].usage, whole.usage
        require(
            streamed is not None and streamed.total_tokens == told.total_tokens, f"streamed {streamed}, whole {told}"
        )
        return f"{len(chunks)} chunks"

    async def batch(self) -> str:
        prompts = [[0, 300, 301, 302, 303], [0, 400, 401, 402], [0, 500]]
        done = await self._complete(prompts, max_tokens=4)
        require([choice.index for choice in done.choices] == [0, 1, 2], f"choices {done.choices}")
        return f"{len(done.choices)} choices"

    async def several_choices(self) -> str:
        first, again = [await self._chat(n=3, temperature=2.0, seed=5, max_tokens=12) for _ in range(2)]
        texts = [choice.message.content for choice in first.choices]
        require(len(texts) == 3 and len(set(texts)) > 1, f"choices {texts}")
        require(texts == [choice.message.content for choice in again.choices], "the same seed gave another answer")
        return f"{len(set(texts))} different"

    async def stop(self) -> str:
        done = await self._chat(stop=[" red", "never"])
        require(done.choices[0].message.content == "The colour of Mira is", f"{done.choices[0].message.content!r}")
        return str(done.choices[0].finish_reason)

    async def chat_logprobs(self) -> str:
        done = await self._chat(logprobs=True, top_logprobs=3)
        content = done.choices[0].logprobs.content
        require("".join(item.token for item in content).startswith(ANSWER), f"tokens {[i.token for i in content]}")
        for item in content:
            require(len(item.top_logprobs) == 3, f"{len(item.top_logprobs)} alternatives, not 3")
            require(item.top_logprobs[0].logprob == item.logprob <= 0, f"{item}: greedy, but not the likeliest")
        return f"{len(content)} tokens"

    async def logit_bias(self) -> str:
        forced = 300
        done = await self._complete(
            PROMPT, max_tokens=3, logit_bias={str(forced): 100}, extra={"return_token_ids": True}
        )
        ids = done.choices[0].model_extra["token_ids"]
        require(ids == [forced] * 3, f"token ids {ids}")
        return "forced"

    async def json_schema(self) -> str:
        schema = {"name": "colour", "schema": SCHEMA, "strict": True}
        done = await self._chat(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=64)
        value = json.loads(done.choices[0].message.content)
        require(set(value) == {"colour", "sure"} and value["colour"] in ("red", "blue"), f"{value}")
        return json.dumps(value)

    async def json_object(self) -> str:
        done = await self._chat(
            response_format={"type": "json_object"}, max_tokens=200, temperature=1.0, seed=3,
        )  # fmt: skip
        text = done.choices[0].message.content
        if done.choices[0].finish_reason == "stop":
            require(isinstance(json.loads(text), dict), f"{text!r} is no object")
        require(text.lstrip().startswith("{"), f"{text!r} does not begin an object")
        return str(done.choices[0].finish_reason)

    async def tool_call(self) -> str:
        choice = {"type": "function", "function": {"name": "remember"}}
        done = await self._chat(tools=[TOOL], tool_choice=choice, max_tokens=64)
        (call,) = done.choices[0].message.tool_calls
        return _checked_call(call.function.name, call.function.arguments)

    async def streamed_tool_call(self) -> str:
        stream = await self._client.chat.completions.create(
            model=self._context.name, messages=CHAT, tools=[TOOL], tool_choice="required", max_tokens=64, temperature=0,
            stream=True, stream_options={"include_usage": True},
        )  # fmt: skip
        name, arguments = "", ""
        async for chunk in stream:
            self._count(chunk.usage)
            for choice in chunk.choices:
                for function in (call.function for call in choice.delta.tool_calls or [] if call.function):
                    name += function.name or ""
                    arguments += function.arguments or ""
        return _checked_call(name, arguments)

    async def responses(self) -> str:
        history: list[Any] = [*CHAT[:2], {"role": "user", "content": "What is the colour of Mira?"}]
        first = await self._respond(history)
        require(first.output_text == ANSWER, f"it said {first.output_text!r}")
        second = await self._respond([*history, *first.output, {"role": "user", "content": "What is her colour?"}])
        cached = second.usage.input_tokens_details.cached_tokens
        require(cached > 0, "the second turn reused nothing")
        return f"{cached} of {second.usage.input_tokens} tokens reused"

    async def streamed_response(self) -> str:
        tool: Any = {"type": "function", **TOOL["function"], "strict": True}
        choice: Any = {"type": "function", "name": tool["name"]}
        async with self._client.responses.stream(
            model=self._context.name, input=CHAT, tools=[tool], tool_choice=choice, max_output_tokens=64,
            temperature=0,
        ) as stream:  # fmt: skip
            events = [event async for event in stream]
        final: Any = events[-1].response  # type: ignore[union-attr]
        self.completion_tokens += final.usage.output_tokens
        require(events[-1].type == "response.completed", f"the last event is {events[-1].type}: {final.output}")
        (call,) = final.output
        return _checked_call(call.name, call.arguments)

    async def errors(self) -> str:
        calls: list[tuple[type[openai.APIStatusError], dict[str, Any]]] = [
            (openai.NotFoundError, {"model": "gpt-4", "prompt": PROMPT}),
            (openai.BadRequestError, {"model": self._context.name, "prompt": PROMPT, "max_tokens": -1}),
            (openai.BadRequestError, {"model": self._context.name, "prompt": [7] * 5000}),
            (openai.BadRequestError, {"model": self._context.name, "prompt": PROMPT, "temperature": 3}),
        ]
        for expected, arguments in calls:
            try:
                await self._client.completions.create(**arguments)
            except expected as error:
                require(bool(error.message), f"{expected.__name__} without a message")
            else:
                raise WrongResult(f"{arguments} gave no {expected.__name__}")
        return f"{len(calls)} errors"

    async def closed_stream(self) -> str:
        """Check that the next call works after a stream was closed early."""
        stream = await self._client.completions.create(
            model=self._context.name, prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        await stream.close()
        await self._chat()
        return "and the next call works"

    async def log_probability_gap(self) -> float:
        """Return the largest difference of a log-probability of prompt or answer to the model's own, in nats."""
        done = await self._complete(PROMPT, max_tokens=8, logprobs=1, echo=True, extra={"return_token_ids": True})
        choice = done.choices[0]
        ids = np.array([*choice.model_extra["prompt_token_ids"], *choice.model_extra["token_ids"]], np.int32)
        scores = load_model(self._context.model, threads=1).score(ids).astype(np.float64)
        highest = scores.max(axis=1, keepdims=True)
        normed = scores - highest - np.log(np.exp(scores - highest).sum(axis=1, keepdims=True))
        ours = normed[np.arange(len(ids) - 1), ids[1:]]
        theirs = choice.logprobs.token_logprobs
        require(theirs[0] is None and len(theirs) == len(ids), f"{len(theirs)} log-probabilities for {len(ids)} tokens")
        return float(np.abs(np.array(theirs[1:]) - ours).max())

    async def _chat(self, **options: Any) -> Any:
        arguments = {"temperature": 0, "max_tokens": 24, **options}
        done = await self._client.chat.completions.create(model=self._context.name, messages=CHAT, **arguments)
        self._count(done.usage)
        return done

    async def _respond(self, items: list[Any]) -> Any:
        done: Any = await self._client.responses.create(
            model=self._context.name, input=items, temperature=0, max_output_tokens=24
        )
        self.completion_tokens += done.usage.output_tokens
        return done

    async def _complete(self, prompt: Any, *, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        arguments = {"temperature": 0, "max_tokens": 16, **options}
        done = await self._client.completions.create(
            model=self._context.name, prompt=prompt, extra_body=extra, **arguments
        )
        self._count(done.usage)
        return done

    def _count(self, usage: Any) -> None:
        self.completion_tokens += usage.completion_tokens if usage else 0


def _checked_call(name: str, arguments: str) -> str:
    value = json.loads(arguments)
    require(name == "remember" and set(value) == {"count"} and 0 <= value["count"] <= 99, f"{name}({arguments})")
    return f"{name}({arguments})"
