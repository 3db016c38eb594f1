"""Response formats: OpenAI's completion and chat objects, whole and in chunks, with log-probabilities."""

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Final

from frontend.api.formatter import ResponseFormatter, ResponseOptions, ToolCallFormatter, extension_of
from frontend.api.stream import encode, event
from frontend.errors import ApiError
from frontend.generation import Generation
from frontend.output import Candidate, OutputChunk, ScoredToken

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


class ChunkFormatter(ResponseFormatter):
    """Formatter of OpenAI's completions and chats, whose streams consist of chunks of choices."""

    end = b"data: [DONE]\n\n"

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
        self._num_sent = [len(step.token_ids) for step in steps]
        self._num_reasoning = sum(step.num_reasoning_tokens for step in steps)
        choices = [self._whole_choice(index, step) for index, step in enumerate(steps)]
        return {
            **self._head,
            "object": self.whole_object,
            "choices": choices,
            "usage": self._usage(),
            "moonpool": self._extension(),
        }

    def events(self, index: int, step: OutputChunk) -> bytes:
        """Return the stream's events for one chunk; the last choice's last chunk adds the usage."""
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
            chunks[-1][1]["moonpool"] = self._extension()
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

    def failure(self, error: ApiError) -> bytes:
        return event(encode(error.body()))

    def _extension(self) -> dict[str, Any] | list[dict[str, Any]]:
        return extension_of(self._generations, timing=self._view.timing)

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


class CompletionFormatter(ChunkFormatter):
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


class ChatFormatter(ChunkFormatter):
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
