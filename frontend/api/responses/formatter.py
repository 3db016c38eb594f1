"""Responses of OpenAI's Responses API: a list of output items, whole or as events."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from frontend.api.formats import of_chat
from frontend.api.formatter import ResponseFormatter, ResponseOptions, ToolCallFormatter, extension_of
from frontend.api.responses.request import ResponsesBody
from frontend.api.stream import encode, event
from frontend.errors import ApiError
from frontend.generation import Generation
from frontend.output import OutputChunk, ScoredToken

_DELTAS: Final = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


class ResponsesFormatter(ResponseFormatter):
    """Formatter of /v1/responses. It has one choice."""

    def __init__(
        self, body: ResponsesBody, generations: Sequence[Generation], model: str, view: ResponseOptions
    ) -> None:
        [self._generation] = generations
        self._id = self._generation.request.request_id
        self._body = body
        self._view = view
        self._head = {"id": self._id, "object": "response", "created_at": int(time.time()), "model": model}
        self._calls = ToolCallFormatter(view.calls, view.tools) if view.calls is not None else None
        self._has_begun = False
        self._num_tokens = 0
        self._num_reasoning = 0
        self._sequence_number = -1
        self._items: list[_Item] = []
        self._unsent: list[ScoredToken] = []  # tokens whose text may belong to a message
        self._streams = False
        # Stands for a message's log-probabilities in the events of a stream that repeat them.
        self._mark = secrets.token_hex(16)

    def whole(self, steps: Sequence[OutputChunk]) -> dict[str, Any]:
        [step] = steps
        *_, (_, last) = self._events(step)
        response: dict[str, Any] = last["response"]
        return response

    def events(self, index: int, step: OutputChunk) -> bytes:
        self._streams = True
        return b"".join(self._event(kind, fields) for kind, fields in self._events(step))

    def failure(self, error: ApiError) -> bytes:
        failed = {"code": "server_error", "message": error.message}
        return self._event("response.failed", {"response": self._response("failed") | {"error": failed}})

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        self._sequence_number += 1
        data = encode({"type": kind, "sequence_number": self._sequence_number, **fields})
        for index, item in enumerate(self._items):
            # They are encoded only once: those of a long answer take seconds, and are in four of its last events.
            if item.encoded_logprobs and (mark := encode(self._mark_of(index))) in data:
                data = data.replace(mark, b"[" + b",".join(item.encoded_logprobs) + b"]")
        return event(data, kind)

    def _events(self, step: OutputChunk) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (type, fields) of the events of a step, and apply them to the output items."""
        if not self._has_begun:
            self._has_begun = True
            for kind in ("response.created", "response.in_progress"):
                yield kind, {"response": self._response("in_progress")}
        self._num_tokens += len(step.token_ids)
        self._num_reasoning += step.num_reasoning_tokens
        if step.reasoning:
            yield from self._within("reasoning")
            yield self._delta(step.reasoning)
        self._unsent += step.scores[step.num_reasoning_tokens :]
        delta: dict[str, Any] = {"content": step.text} if self._calls is None else self._calls.delta(step)
        if delta.get("content"):
            yield from self._within("message")
            yield self._delta(delta["content"])
        if delta.get("tool_calls"):
            self._unsent.clear()
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                yield from self._opened(_Item("function_call", self._item_id(), call["id"], call["function"]["name"]))
            if arguments := call["function"]["arguments"]:
                yield self._delta(arguments)
        if step.finish_reason is not None:
            if self._unsent and self._items and self._items[-1].kind == "message":
                yield self._delta("")  # tokens without text, such as the one that ends the answer
            yield from self._closed("incomplete" if step.finish_reason == "length" else "completed")
            ended = self._ended(step)
            yield f"response.{ended['status']}", {"response": ended}

    def _within(self, kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events that open an item of this kind, unless it is open."""
        if not self._items or self._items[-1].kind != kind:
            yield from self._opened(_Item(kind, self._item_id()))

    def _opened(self, item: "_Item") -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._closed("completed")
        self._items.append(item)
        yield "response.output_item.added", {"output_index": self._at, "item": item.empty()}
        if item.has_part:
            yield "response.content_part.added", {**self._place(), "part": item.part()}

    def _closed(self, status: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._items:
            return
        item = self._items[-1]
        item.status = status
        done: dict[str, Any] = {"text": item.text}
        if item.kind == "message":
            done["logprobs"] = self._logprobs(item)
        elif item.kind == "function_call":
            done = {"arguments": item.text, "name": item.name}
        yield f"{_DELTAS[item.kind]}.done", {**self._place(), **done}
        if item.has_part:
            yield "response.content_part.done", {**self._place(), "part": self._part(item)}
        yield "response.output_item.done", {"output_index": self._at, "item": self._item(item)}

    def _delta(self, text: str) -> tuple[str, dict[str, Any]]:
        item = self._items[-1]
        item.pieces.append(text)
        fields = {**self._place(), "delta": text}
        if item.kind == "message":
            fields["logprobs"] = self._new_logprobs(item)
        return f"{_DELTAS[item.kind]}.delta", fields

    def _new_logprobs(self, item: "_Item") -> list[dict[str, Any]]:
        """Return the log-probabilities of tokens that were not sent yet, and add them to the item."""
        if self._view.num_top is None or not self._unsent:
            return []
        entries: list[dict[str, Any]] = of_chat(self._unsent, self._view.num_top, as_ids=False)["content"]
        self._unsent.clear()
        if self._streams:
            item.encoded_logprobs.append(encode(entries)[1:-1])
        else:
            item.logprobs += entries
        return entries

    @property
    def _at(self) -> int:
        return len(self._items) - 1

    def _place(self) -> dict[str, Any]:
        item = self._items[-1]
        return {"item_id": item.item_id, "output_index": self._at} | ({"content_index": 0} if item.has_part else {})

    def _item_id(self) -> str:
        return f"{self._id.removeprefix('resp_')}_{len(self._items)}"

    def _item(self, item: "_Item") -> dict[str, Any]:
        return {**item.empty(), "status": item.status} | (
            {"content": [self._part(item)]} if item.has_part else {"arguments": item.text}
        )

    def _part(self, item: "_Item") -> dict[str, Any]:
        part = item.part() | {"text": item.text}
        return part | {"logprobs": self._logprobs(item)} if item.kind == "message" else part

    def _logprobs(self, item: "_Item") -> list[dict[str, Any]] | str:
        """Return a message's log-probabilities, or the mark that `_event` replaces by them."""
        return self._mark_of(self._items.index(item)) if item.encoded_logprobs else item.logprobs

    def _mark_of(self, index: int) -> str:
        return f"{self._mark}-{index}"

    def _ended(self, step: OutputChunk) -> dict[str, Any]:
        is_cut = step.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        extension = extension_of([self._generation], timing=self._view.timing)
        return response | {"usage": self._usage(), "moonpool": extension}

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        form = body.text.format if body.text is not None else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [self._item(item) for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = len(self._generation.request.prompt_ids)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._generation.stats.cached_tokens},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": num_prompt + self._num_tokens,
        }


class _Item:
    """Output item: reasoning, a message or a function call, whose `text` is its arguments."""

    def __init__(self, kind: str, number: str, call_id: str = "", name: str = "") -> None:
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self.kind = kind
        self.item_id = f"{prefix}_{number}"
        self.call_id = call_id
        self.name = name
        self.pieces: list[str] = []
        self.logprobs: list[dict[str, Any]] = []  # of a response that is not streamed
        self.encoded_logprobs: list[bytes] = []  # of a stream, without brackets
        self.status = "in_progress"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def has_part(self) -> bool:
        """True if the item has a content, which has one part."""
        return self.kind != "function_call"

    def empty(self) -> dict[str, Any]:
        """Return the item as it is when it opens."""
        item = {"id": self.item_id, "type": self.kind, "status": "in_progress"}
        if self.kind == "message":
            return {**item, "role": "assistant", "content": []}
        if self.kind == "reasoning":
            return {**item, "summary": [], "content": []}
        return {**item, "call_id": self.call_id, "name": self.name, "arguments": ""}

    def part(self) -> dict[str, Any]:
        """Return the content's part as it is when it opens."""
        if self.kind == "message":
            return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": ""}
