"""Responses of Anthropic's Messages API: a message of content blocks, whole or as events, and its errors."""

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from pydantic_core import from_json

from frontend.api.formatter import ResponseFormatter, ResponseOptions, ToolCallFormatter, extension_of
from frontend.api.stream import encode, event
from frontend.errors import ApiError
from frontend.generation import Generation
from frontend.output import OutputChunk

_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(status: int, error: dict[str, Any]) -> dict[str, Any]:
    """Return OpenAI's error object in Anthropic's form, which keeps its `param` and `code`."""
    detail = error["error"]
    return {"type": "error", "error": {**detail, "type": _ERRORS.get(status, "api_error")}}


class MessagesFormatter(ResponseFormatter):
    """Formatter of /v1/messages. It has one choice."""

    def __init__(self, generations: Sequence[Generation], model: str, view: ResponseOptions) -> None:
        [self._generation] = generations
        self._head = {
            "id": self._generation.request.request_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._view = view
        self._calls = ToolCallFormatter(view.calls, view.tools) if view.calls is not None else None
        self._has_begun = False
        self._num_tokens = 0
        self._num_reasoning = 0
        self._block = -1  # number of the last block
        self._kind: str | int | None = None  # of the open block: "text", "thinking", or a call's number

    def whole(self, steps: Sequence[OutputChunk]) -> dict[str, Any]:
        [step] = steps
        self._count(step)
        blocks: list[dict[str, Any]] = []
        if step.reasoning:
            blocks.append({"type": "thinking", "thinking": step.reasoning, "signature": ""})
        message: dict[str, Any] = {"content": step.text} if self._calls is None else self._calls.message(step.text)
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            # A call that was cut off is left out: it must not be made with a part of its arguments.
            if (arguments := _object(call["function"]["arguments"])) is not None:
                name = call["function"]["name"]
                blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
        return {**self._head, "content": blocks, **self._end(step), "usage": self._usage(), **self._extension()}

    def events(self, index: int, step: OutputChunk) -> bytes:
        self._count(step)
        return b"".join(event(encode(each), each["type"]) for each in self._events(step))

    def failure(self, error: ApiError) -> bytes:
        return event(encode(anthropic_error(error.status, error.body())), "error")

    def _events(self, step: OutputChunk) -> Iterator[dict[str, Any]]:
        if not self._has_begun:
            self._has_begun = True
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage()}
            yield {"type": "message_start", "message": {**self._head, **empty}}
        if step.reasoning:
            yield from self._within("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": step.reasoning})
        delta: dict[str, Any] = {"content": step.text} if self._calls is None else self._calls.delta(step)
        if delta.get("content"):
            yield from self._within("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": delta["content"]})
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                block: dict[str, Any] = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                yield from self._within(call["index"], block)
            if function["arguments"]:
                yield self._delta({"type": "input_json_delta", "partial_json": function["arguments"]})
        if step.finish_reason is not None:
            yield from self._closed()
            yield {"type": "message_delta", "delta": self._end(step), "usage": self._usage(), **self._extension()}
            yield {"type": "message_stop"}

    def _within(self, kind: str | int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events that open a block of this kind, unless it is open."""
        if self._kind == kind:
            return
        yield from self._closed()
        self._kind, self._block = kind, self._block + 1
        yield {"type": "content_block_start", "index": self._block, "content_block": block}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._kind is not None:
            self._kind = None
            yield {"type": "content_block_stop", "index": self._block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._block, "delta": delta}

    def _count(self, step: OutputChunk) -> None:
        self._num_tokens += len(step.token_ids)
        self._num_reasoning += step.num_reasoning_tokens

    def _end(self, step: OutputChunk) -> dict[str, Any]:
        reason = step.finish_reason if self._calls is None else self._calls.finish_reason(step)
        stop = step.stop_reason if isinstance(step.stop_reason, str) else None
        ended = {"tool_calls": "tool_use", "length": "max_tokens"}.get(reason or "", "end_turn")
        return {"stop_reason": "stop_sequence" if stop and reason == "stop" else ended, "stop_sequence": stop}

    def _usage(self) -> dict[str, Any]:
        """Return the usage so far. As in Anthropic's API, input_tokens excludes tokens whose KV was reused."""
        num_cached = self._generation.stats.cached_tokens
        usage: dict[str, Any] = {
            "input_tokens": len(self._generation.request.prompt_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self._num_tokens,
        }
        if self._view.parses_reasoning:
            usage["output_tokens_details"] = {"thinking_tokens": self._num_reasoning}
        return usage

    def _extension(self) -> dict[str, Any]:
        return {"moonpool": extension_of([self._generation], timing=self._view.timing)}


def _object(arguments: str) -> dict[str, Any] | None:
    """Return the JSON object of a call's arguments; None if it is incomplete or cannot be sent.

    No response holds an infinite number (1e999) or half a surrogate pair, and no later request a deeply nested value.
    """
    try:
        value = from_json(arguments or "{}")
        json.dumps(value, allow_nan=False)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
