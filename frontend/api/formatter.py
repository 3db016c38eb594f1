"""Parts shared by the formats of all APIs: the interface of formatters, their options, tool calls and statistics."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from frontend.answer_format import AnswerFormat
from frontend.api.request_models import ChatBody, CompletionBody, GenerationBody
from frontend.errors import ApiError
from frontend.generation import Generation
from frontend.output import OutputChunk
from frontend.request import HandoffBreakdown, RequestStats, TtftBreakdown
from frontend.tool_formats import CallDelta, ToolFormat, ToolSpec
from frontend.tools import reads_calls, tool_specs


@dataclass(frozen=True)
class ResponseOptions:
    """Optional parts of a response that a client requested.

    `num_top` is the number of top tokens per token, `prompt_top` the same for the prompt; None: no log-probabilities.
    `calls` is the format of the calls of `tools` that are parsed from the text; None: it is not parsed. With
    `parses_reasoning`, a chat's reasoning is apart from its content and counted, and with `shows_reasoning` it is
    returned. With `timing` the time breakdown is included.
    """

    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    echo: bool = False
    num_top: int | None = None
    prompt_top: int | None = None
    calls: ToolFormat | None = None
    tools: tuple[ToolSpec, ...] = ()
    parses_reasoning: bool = False
    shows_reasoning: bool = True
    timing: bool = False

    @classmethod
    def of(cls, body: GenerationBody, form: AnswerFormat, *, timing: bool = False) -> "ResponseOptions":
        """Return the options of `body`; `form` is the format of the model's answers, `timing` comes from a header."""
        options = body.stream_options
        chat = body if isinstance(body, ChatBody) else None
        called = chat if chat is not None and reads_calls(chat) else None
        return cls(
            include_usage=options is not None and bool(options.include_usage),
            continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            echo=isinstance(body, CompletionBody) and bool(body.echo),
            num_top=body.num_top,
            prompt_top=body.prompt_logprobs,
            calls=None if called is None else form.tools,
            tools=() if called is None else tool_specs(called),
            parses_reasoning=chat is not None and form.reasoning is not None,
            shows_reasoning=chat is None or chat.include_reasoning is not False,
            timing=timing,
        )


class ResponseFormatter(ABC):
    """Formatter of one response: call `whole` once, or `events` for every chunk, in order."""

    end: ClassVar[bytes] = b""  # of a stream, after its last event

    @abstractmethod
    def __init__(self, generations: Sequence[Generation], model: str, view: ResponseOptions) -> None:
        """`model`: the name under which the client requested it."""

    @abstractmethod
    def whole(self, steps: Sequence[OutputChunk]) -> dict[str, Any]:
        """Return the response object of a request that does not stream; `steps` are the choices' whole answers."""

    @abstractmethod
    def events(self, index: int, step: OutputChunk) -> bytes:
        """Return the stream's events for one chunk of choice `index`, possibly none."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error that ends the stream."""


FormatterFactory = Callable[[Sequence[Generation], str, ResponseOptions], ResponseFormatter]
"""Called with the choices' generations, the name of the model in the request, and what the client requested."""


class ToolCallFormatter:
    """Formatter of one choice's tool calls. Pass every step, in order."""

    def __init__(self, form: ToolFormat, tools: Sequence[ToolSpec]) -> None:
        self._form = form
        self._reader = form.reader(tools)

    def message(self, text: str) -> dict[str, Any]:
        """Return content and calls of a whole answer."""
        read = self._reader.feed(text, is_last=True)
        calls: dict[int, dict[str, Any]] = {}
        for call in read.calls:
            self._merge(calls, call)
        if not calls:
            return {"content": read.content}
        return {"content": read.content or None, "tool_calls": [_without_index(call) for call in calls.values()]}

    def delta(self, step: OutputChunk) -> dict[str, Any]:
        """Return the delta of a step: content, or pieces of calls; a call's first piece has its id and name."""
        read = self._reader.feed(step.text, is_last=step.finish_reason is not None)
        calls: dict[int, dict[str, Any]] = {}
        for call in read.calls:
            self._merge(calls, call)
        delta: dict[str, Any] = {"content": read.content} if read.content else {}
        return delta | {"tool_calls": list(calls.values())} if calls else delta

    def finish_reason(self, step: OutputChunk) -> str | None:
        """Return "tool_calls" if the answer ended with complete calls.

        A stop string inside a call leaves the reason unchanged.
        """
        return "tool_calls" if step.finish_reason == "stop" and self._reader.is_complete else step.finish_reason

    def _merge(self, calls: dict[int, dict[str, Any]], piece: CallDelta) -> None:
        call = calls.setdefault(piece.index, {"index": piece.index, "function": {"arguments": ""}})
        if piece.name is not None:
            call |= {"id": self._form.call_id(), "type": "function"}
            call["function"] = {"name": piece.name, "arguments": ""}
        call["function"]["arguments"] += piece.arguments


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": call["id"], "type": call["type"], "function": call["function"]}


_DIGITS: Final = 9  # decimal places of seconds: the rounded parts still sum to the whole


def server_timing(generations: Sequence[Generation]) -> dict[str, str]:
    """Return the W3C header Server-Timing (milliseconds) of the first choice, as known when headers are sent."""
    stats = generations[0].stats
    metrics = _metrics("", "ttft", stats.ttft) + _metrics("handoff-", "handoff", stats.handoff)
    return {"server-timing": ", ".join(metrics)} if metrics else {}


def timing_of(stats: RequestStats) -> dict[str, Any]:
    """Return the time breakdowns in seconds; a part is None if the request has none."""
    return {"ttft": _parts_in_s(stats.ttft), "handoff": _parts_in_s(stats.handoff)}


def _parts_in_s(parts: TtftBreakdown | HandoffBreakdown | None) -> dict[str, float] | None:
    if parts is None:
        return None
    seconds_by_part = {f"{name}_s": round(seconds, _DIGITS) for name, seconds in parts.parts().items()}
    return {**seconds_by_part, "whole_s": round(parts.whole_s, _DIGITS)}


def _metrics(prefix: str, whole: str, parts: TtftBreakdown | HandoffBreakdown | None) -> list[str]:
    if parts is None:
        return []
    values = {**{prefix + name: seconds for name, seconds in parts.parts().items()}, whole: parts.whole_s}
    return [f"{name};dur={1000 * seconds:.3f}" for name, seconds in values.items()]


def extension_of(generations: Sequence[Generation], *, timing: bool) -> dict[str, Any] | list[dict[str, Any]]:
    """Return Moonpool's extension: one object, or a list by choice if there are several."""
    stats = [_facts(generation) for generation in generations]
    if timing:
        for facts, generation in zip(stats, generations, strict=True):
            facts["timing"] = timing_of(generation.stats)
    return stats[0] if len(stats) == 1 else stats


def _facts(generation: Generation) -> dict[str, Any]:
    stats, request = generation.stats, generation.request
    facts = {
        "request_id": request.request_id,
        "tokenize_s": round(request.tokenize_s, 6),
        "schedule_s": round(stats.schedule_s, 6),
        "queue_s": round(stats.queue_s, 6),
        "load_s": round(stats.load_s, 6),
        "prefill_s": round(stats.prefill_s, 6),
        "ttft_s": round((stats.first_token_s or request.arrival_s) - request.arrival_s, 6),
        "cached_tokens": stats.cached_tokens,
        "cached_dram_tokens": stats.cached_dram_tokens,
        "cached_ssd_tokens": stats.cached_ssd_tokens,
        "cached_remote_tokens": stats.cached_remote_tokens,
        "approximate_tokens": stats.approximate_tokens,
        "sibling_tokens": stats.sibling_tokens,
        "dropped_messages": request.dropped_messages,
        "attempts": stats.attempts,
        "prefill_node": stats.prefill_node,
        "decode_node": stats.decode_node,
        "seed": request.sampling.seed,
    }
    return facts | {"receipt": generation.receipt()} if request.wants_receipt else facts
