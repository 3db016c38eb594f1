"""Checks of the Messages API with the unmodified anthropic package."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic

from benchmarks.clients.checks import WrongResult, checked, require
from benchmarks.clients.comparison import Row
from benchmarks.clients.context import Context
from benchmarks.clients.run_openai import ANSWER, CHAT, SCHEMA, TIMEOUT_S, TOOL

TOOLS: list[Any] = [
    {
        "name": TOOL["function"]["name"],
        "description": TOOL["function"]["description"],
        "input_schema": TOOL["function"]["parameters"],
    }
]


def run_anthropic(context: Context) -> list[Row]:
    """Run all checks; a failed one is a row with the reason."""
    return asyncio.run(_run(context))


async def _run(context: Context) -> list[Row]:
    async with anthropic.AsyncAnthropic(
        base_url=context.url, api_key="any", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        checks = AnthropicChecks(client, context.name)
        return [await checked("anthropic", name, check) for name, check in checks.all().items()]


class AnthropicChecks:
    """The checks; each method returns a short description of the result or raises WrongResult."""

    def __init__(self, client: anthropic.AsyncAnthropic, model: str) -> None:
        self._client, self._model = client, model

    def all(self) -> dict[str, Callable[[], Awaitable[str]]]:
        """Return the checks by name."""
        return {
            "messages": self.message,
            "messages, streamed": self.stream,
            "messages.count_tokens": self.count,
            "system with cache_control, reused": self.cached,
            "tools, their results sent back": self.tools,
            "output_config json_schema": self.json_schema,
            "stop_sequences": self.stop,
            "errors as its exception classes": self.errors,
        }

    async def message(self) -> str:
        done = await self._create(CHAT)
        require(_text(done) == ANSWER, f"it said {_text(done)!r}")
        require(done.stop_reason == "end_turn", f"it ended by {done.stop_reason}")
        return _text(done)

    async def stream(self) -> str:
        async with self._client.messages.stream(
            model=self._model, max_tokens=24, messages=CHAT, extra_body={"temperature": 0}
        ) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        require("".join(texts) == _text(final) == ANSWER, f"it said {texts}")
        return f"{len(texts)} pieces"

    async def count(self) -> str:
        counted = await self._client.messages.count_tokens(model=self._model, messages=CHAT)
        usage = (await self._create(CHAT)).usage
        used = usage.input_tokens + usage.cache_read_input_tokens
        require(counted.input_tokens == used, f"counted {counted.input_tokens}, used {used}")
        return f"{used} tokens"

    async def cached(self) -> str:
        text = "Answer with the colour of who is named. " * 8
        system: Any = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        await self._create(CHAT, system=system)
        usage = (await self._create(CHAT, system=system)).usage
        require(usage.cache_read_input_tokens > 0, "the second request reused nothing")
        return f"{usage.cache_read_input_tokens} of {usage.cache_read_input_tokens + usage.input_tokens} tokens reused"

    async def tools(self) -> str:
        done = await self._create(
            CHAT, tools=TOOLS, tool_choice={"type": "tool", "name": TOOLS[0]["name"]}, max_tokens=64
        )
        (call,) = done.content
        require(done.stop_reason == "tool_use" and set(call.input) == {"count"}, f"{call}")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "Remembered."}
        turns = [*CHAT, {"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
        after = await self._create(turns, tools=TOOLS)
        require(after.usage.cache_read_input_tokens > 0, "the turn after the call reused nothing")
        return f"{call.name}({call.input})"

    async def json_schema(self) -> str:
        form: Any = {"type": "json_schema", "schema": SCHEMA}
        done = await self._create(CHAT, output_config={"format": form}, max_tokens=64)
        require(_text(done).startswith('{"colour":'), f"it said {_text(done)!r}")
        return _text(done)

    async def stop(self) -> str:
        done = await self._create(CHAT, stop_sequences=[" red"])
        require(done.stop_sequence == " red" and done.stop_reason == "stop_sequence", f"{done.stop_reason}")
        return _text(done)

    async def errors(self) -> str:
        calls: list[tuple[type[anthropic.APIStatusError], dict[str, Any]]] = [
            (anthropic.NotFoundError, {"model": "claude"}),
            (anthropic.BadRequestError, {"max_tokens": 10**6}),
            (anthropic.BadRequestError, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        ]
        for expected, changes in calls:
            try:
                await self._client.messages.create(
                    **{"model": self._model, "max_tokens": 5, "messages": CHAT, **changes}
                )
            except expected as error:
                require("type" in (error.body or {}), f"{expected.__name__} without Anthropic's error object")  # type: ignore[operator]
            else:
                raise WrongResult(f"{changes} gave no {expected.__name__}")
        return f"{len(calls)} errors"

    async def _create(self, messages: list[Any], **options: Any) -> Any:
        arguments = {"max_tokens": 24, "extra_body": {"temperature": 0}, **options}
        return await self._client.messages.create(model=self._model, messages=messages, **arguments)


def _text(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")
