"""Response formats: OpenAI's completion and chat objects, whole and in chunks.

They include log-probabilities, tool calls, time breakdowns and Moonpool's extension.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from frontend.answer_format import AnswerFormat
from frontend.api.request_models import ChatBody, CompletionBody, GenerationBody
from frontend.api.stream import encode, event
from frontend.generation import Generation
from frontend.output import Candidate, OutputChunk, ScoredToken
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


_FLOOR: Final = -9999.0  # vLLM's substitute for minus infinity, which JSON lacks


def of_completion(scores: Sequence[ScoredToken], num_top: int, *, as_ids: bool) -> dict[str, list[Any]]:
    """Return a completion's log-probabilities as parallel lists; a prompt's first token has null in two of them."""
    return {
        "tokens": [_name(score.token_id, score.data, as_ids, "bytes:") for score in scores],
        "token_logprobs": [None if score.own is None else _finite(score.own) for score in scores],
        "top_logprobs": [None if score.own is None else _by_name(score, num_top, as_ids) for score in scores],
        "text_offset": [score.text_offset for score in scores],
    }


def of_chat(scores: Iterable[ScoredToken], num_top: int, *, as_ids: bool) -> dict[str, Any]:
    """Return a chat's log-probabilities, one entry per token."""
    content = [
        _entry(score.own, as_ids) | {"top_logprobs": [_entry(candidate, as_ids) for candidate in score.top[:num_top]]}
        for score in scores
        if score.own is not None
    ]
    return {"content": content, "refusal": None}


def of_prompt(scores: Iterable[ScoredToken], num_top: int, *, as_ids: bool) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: candidates by token id; null for the first token."""
    return [
        None
        if score.own is None
        else {
            str(candidate.token_id): {
                "logprob": _finite(candidate),
                "rank": candidate.rank,
                "decoded_token": _name(candidate.token_id, candidate.data, as_ids, ""),
            }
            for candidate in _first(score, num_top)
        }
        for score in scores
    ]


def _first(score: ScoredToken, num_top: int) -> tuple[Candidate, ...]:
    """Return the likeliest `num_top` candidates, and the token itself if it is not among them."""
    top = score.top[:num_top]
    if score.own is None or any(candidate.token_id == score.token_id for candidate in top):
        return top
    return (*top, score.own)


def _by_name(score: ScoredToken, num_top: int, as_ids: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for candidate in _first(score, num_top):
        # Two ids may have the same text: keep the likelier one.
        found.setdefault(_name(candidate.token_id, candidate.data, as_ids, "bytes:"), _finite(candidate))
    return found


def _entry(candidate: Candidate, as_ids: bool) -> dict[str, Any]:
    name = _name(candidate.token_id, candidate.data, as_ids, "")
    return {"token": name, "logprob": _finite(candidate), "bytes": list(candidate.data)}


def _finite(candidate: Candidate) -> float:
    return candidate.logprob if candidate.logprob > _FLOOR else _FLOOR  # also replaces NaN


def _name(token_id: int, data: bytes, as_ids: bool, prefix: str) -> str:
    """Return a token's text; for part of a character, its bytes as OpenAI writes them: \\xf0\\x9f."""
    if as_ids:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


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


class _PlainEvent:
    """Template of events that differ in text and token ids only: filling it takes a fifth of encoding an event."""

    SAMPLE: ClassVar[OutputChunk] = OutputChunk((-1,), "\0")

    def __init__(self, sample: bytes) -> None:
        """`sample`: the event of SAMPLE."""
        self._head, _, rest = sample.rpartition(encode(self.SAMPLE.text))
        self._middle, ids, self._tail = rest.partition(encode(list(self.SAMPLE.token_ids)))
        self._has_ids = bool(ids)

    def of(self, step: OutputChunk) -> bytes:
        """Return the event of a step."""
        ids = encode(list(step.token_ids)) if self._has_ids else b""
        return b"".join((self._head, encode(step.text), self._middle, ids, self._tail))


class ResponseFormatter(ABC):
    """Formatter of one response. Call `events` for every chunk, in order."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, generations: Sequence[Generation], model: str, view: ResponseOptions) -> None:
        self._generations = generations
        self._head = {"id": generations[0].request.request_id, "created": int(time.time()), "model": model}
        # All chunks begin with the same bytes, which are encoded only once.
        self._opening = encode({**self._head, "object": self.chunk_object})[:-1] + b',"choices":'
        self._view = view
        self._started: set[int] = set()
        self._num_sent = [0] * len(generations)  # returned tokens by choice
        self._num_reasoning = 0  # of these, of all choices
        self._num_running = len(generations)
        self._plain: dict[int, _PlainEvent] = {}  # by choice

    def whole(self, steps: Sequence[OutputChunk]) -> dict[str, Any]:
        """Return the response object of a request that does not stream."""
        self._num_sent = [len(step.token_ids) for step in steps]
        self._num_reasoning = sum(step.num_reasoning_tokens for step in steps)
        choices = [self._whole_choice(index, step) for index, step in enumerate(steps)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage(), **self._facts()}

    def events(self, index: int, step: OutputChunk) -> bytes:
        """Return the stream's events for one chunk, possibly none; the last choice's last chunk adds the usage."""
        opens, is_first = not self._started, index not in self._started
        self._started.add(index)
        self._num_sent[index] += len(step.token_ids)
        self._num_reasoning += step.num_reasoning_tokens
        if not is_first and step.finish_reason is None and self._is_plain(index, step):
            return self._plain_event(index).of(step)
        self._num_running -= step.finish_reason is not None
        chunks = [([choice], self._beside()) for choice in self._chunk_choices(index, step, is_first)]
        if opens:
            chunks[0][1].update(self._once())
        if self._num_running == 0:
            if self._view.include_usage:
                chunks.append(([], {"usage": self._usage()}))
            chunks[-1][1].update(self._facts())
        return b"".join(event(self._chunk(choices, beside)) for choices, beside in chunks)

    def _is_plain(self, index: int, step: OutputChunk) -> bool:
        """Return True if an event between a choice's first and last one differs from others in text and ids only."""
        return self._view.num_top is None and not self._view.continuous_usage

    def _plain_event(self, index: int) -> "_PlainEvent":
        found = self._plain.get(index)
        if found is None:
            choices = self._chunk_choices(index, _PlainEvent.SAMPLE, is_first=False)
            found = self._plain[index] = _PlainEvent(event(self._chunk(choices, self._beside())))
        return found

    @abstractmethod
    def _whole_choice(self, index: int, step: OutputChunk) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choices(self, index: int, step: OutputChunk, is_first: bool) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _logprobs(self, step: OutputChunk, num_top: int) -> dict[str, Any] | None: ...

    def _once(self) -> dict[str, Any]:
        """Return the fields that the response or its first event has besides the choices."""
        return {}

    def _beside(self) -> dict[str, Any]:
        """Return the fields of a chunk besides its choices."""
        if not self._view.include_usage:
            return {}
        return {"usage": self._usage() if self._view.continuous_usage else None}

    def _chunk(self, choices: list[dict[str, Any]], beside: dict[str, Any]) -> bytes:
        return self._opening + encode(choices) + (b"," + encode(beside)[1:] if beside else b"}")

    def _end(self, index: int, step: OutputChunk, *, with_prompt: bool) -> dict[str, Any]:
        """Return the fields that choices of all formats share."""
        num_top = self._view.num_top
        end: dict[str, Any] = {
            "logprobs": None if num_top is None else self._logprobs(step, num_top),
            "finish_reason": step.finish_reason,
            "stop_reason": step.stop_reason,
        }
        if self._view.return_token_ids:
            end["token_ids"] = list(step.token_ids)
            if with_prompt:
                end["prompt_token_ids"] = self._generations[index].request.prompt_ids.tolist()
        return end

    def _prompt_logprobs(self, step: OutputChunk) -> dict[str, Any]:
        num_top = self._view.prompt_top
        if num_top is None or step.echo is None or step.echo.scores is None:
            return {}
        return {"prompt_logprobs": of_prompt(step.echo.scores.tokens(), num_top, as_ids=self._view.tokens_as_ids)}

    def _usage(self) -> dict[str, Any]:
        """Return the usage of the tokens sent so far. A prompt counts once, regardless of its number of choices."""
        prompts = [generation for generation in self._generations if generation.leader is None]
        num_prompt = sum(len(generation.request.prompt_ids) for generation in prompts)
        num_new = sum(self._num_sent)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.stats.cached_tokens for prompt in prompts)},
        }
        if self._view.parses_reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self._num_reasoning}
        return usage

    def _facts(self) -> dict[str, Any]:
        """Return Moonpool's extension: one object, or a list by choice if there are several."""
        stats = [_facts(generation) for generation in self._generations]
        if self._view.timing:
            for facts, generation in zip(stats, self._generations, strict=True):
                facts["timing"] = timing_of(generation.stats)
        return {"moonpool": stats[0] if len(stats) == 1 else stats}


class CompletionFormatter(ResponseFormatter):
    """Formatter of /v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_choice(self, index: int, step: OutputChunk) -> dict[str, Any]:
        return {"index": index, "text": self._text(step), **self._end(index, step, with_prompt=True)} | (
            self._prompt_logprobs(step)
        )

    def _chunk_choices(self, index: int, step: OutputChunk, is_first: bool) -> list[dict[str, Any]]:
        return [{"index": index, "text": self._text(step), **self._end(index, step, with_prompt=is_first)}]

    def _text(self, step: OutputChunk) -> str:
        return step.text if step.echo is None or not self._view.echo else step.echo.text + step.text

    def _logprobs(self, step: OutputChunk, num_top: int) -> dict[str, Any]:
        echo = step.echo if self._view.echo else None
        prompt = echo.scores.tokens() if echo is not None and echo.scores is not None else ()
        return of_completion((*prompt, *step.scores), num_top, as_ids=self._view.tokens_as_ids)


class ChatFormatter(ResponseFormatter):
    """Formatter of /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generations: Sequence[Generation], model: str, view: ResponseOptions) -> None:
        super().__init__(generations, model, view)
        self._calls = [
            ToolCallFormatter(view.calls, view.tools) if view.calls is not None else None for _ in generations
        ]

    def _is_plain(self, index: int, step: OutputChunk) -> bool:
        is_content = not self._view.parses_reasoning or (bool(step.text) and not step.reasoning)
        return is_content and self._calls[index] is None and super()._is_plain(index, step)

    def whole(self, steps: Sequence[OutputChunk]) -> dict[str, Any]:
        return super().whole(steps) | self._once() | self._prompt_logprobs(steps[0])

    def _whole_choice(self, index: int, step: OutputChunk) -> dict[str, Any]:
        calls = self._calls[index]
        message: dict[str, Any] = {"content": step.text} if calls is None else calls.message(step.text)
        if self._view.parses_reasoning:
            if step.reasoning and not message["content"]:
                message["content"] = None
            reasoning = {"reasoning_content": step.reasoning or None} if self._view.shows_reasoning else {}
            message = reasoning | message
        end = self._end(index, step, with_prompt=False)
        return {"index": index, "message": {"role": "assistant", **message}, **end}

    def _chunk_choices(self, index: int, step: OutputChunk, is_first: bool) -> list[dict[str, Any]]:
        calls = self._calls[index]
        delta = {"content": step.text} if calls is None else calls.delta(step)
        if self._view.parses_reasoning:
            reasoning = {"reasoning_content": step.reasoning} if step.reasoning and self._view.shows_reasoning else {}
            delta = reasoning | {name: part for name, part in delta.items() if part}
        choice = {"index": index, "delta": delta, **self._end(index, step, with_prompt=False)}
        # Markers, and text around a call's name and arguments, are not sent.
        tells = delta or step.finish_reason or step.scores or self._view.return_token_ids
        # OpenAI's streams open with the role alone.
        opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
        return [*([opening] if is_first else []), *([choice] if tells else [])]

    def _end(self, index: int, step: OutputChunk, *, with_prompt: bool) -> dict[str, Any]:
        end = super()._end(index, step, with_prompt=with_prompt)
        calls = self._calls[index]
        return end if calls is None else end | {"finish_reason": calls.finish_reason(step)}

    def _logprobs(self, step: OutputChunk, num_top: int) -> dict[str, Any]:
        return of_chat(step.scores, num_top, as_ids=self._view.tokens_as_ids)

    def _once(self) -> dict[str, Any]:
        """Return the prompt's ids. A chat has one prompt, returned besides the choices as in vLLM."""
        if not self._view.return_token_ids:
            return {}
        return {"prompt_token_ids": self._generations[0].request.prompt_ids.tolist()}


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
