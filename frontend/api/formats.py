"""How generations look on the wire: OpenAI's completion and chat objects, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from frontend.api import logprobs
from frontend.api.server_timing import timing_of
from frontend.api.stream import encode, event
from frontend.api.tool_calls import ChoiceCalls
from frontend.api.view import View
from frontend.driver import Generation
from frontend.output import Step


class Format(ABC):
    """One response's constant parts. `events` must be called for every step, in order."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, generations: Sequence[Generation], model: str, view: View) -> None:
        self._generations = generations
        self._head = {"id": generations[0].request.request_id, "created": int(time.time()), "model": model}
        # Every chunk begins alike: what does not change is written down once.
        self._opening = encode({**self._head, "object": self.chunk_object})[:-1] + b',"choices":'
        self._view = view
        self._started: set[int] = set()
        self._num_told = [0] * len(generations)  # tokens, by choice
        self._num_running = len(generations)

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """The response to a request that does not stream."""
        self._num_told = [len(step.token_ids) for step in steps]
        choices = [self._whole_choice(index, step) for index, step in enumerate(steps)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage(), **self._facts()}

    def events(self, index: int, step: Step) -> bytes:
        """What a stream sends for one step, perhaps nothing; with the last choice's last step, the usage too."""
        opens, is_first = not self._started, index not in self._started
        self._started.add(index)
        self._num_told[index] += len(step.token_ids)
        self._num_running -= step.finish_reason is not None
        chunks = [([choice], self._beside()) for choice in self._chunk_choices(index, step, is_first)]
        if opens:
            chunks[0][1].update(self._once())
        if self._num_running == 0:
            if self._view.include_usage:
                chunks.append(([], {"usage": self._usage()}))
            chunks[-1][1].update(self._facts())
        return b"".join(event(self._chunk(choices, beside)) for choices, beside in chunks)

    @abstractmethod
    def _whole_choice(self, index: int, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choices(self, index: int, step: Step, is_first: bool) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _logprobs(self, step: Step, num_top: int) -> dict[str, Any] | None: ...

    def _once(self) -> dict[str, Any]:
        """What is told beside the choices, once."""
        return {}

    def _beside(self) -> dict[str, Any]:
        """The fields of a chunk beside its choices."""
        if not self._view.include_usage:
            return {}
        return {"usage": self._usage() if self._view.continuous_usage else None}

    def _chunk(self, choices: list[dict[str, Any]], beside: dict[str, Any]) -> bytes:
        return self._opening + encode(choices) + (b"," + encode(beside)[1:] if beside else b"}")

    def _end(self, index: int, step: Step, *, with_prompt: bool) -> dict[str, Any]:
        """The fields that all choices have."""
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

    def _prompt_logprobs(self, step: Step) -> dict[str, Any]:
        num_top = self._view.prompt_top
        if num_top is None or step.echo is None or step.echo.scores is None:
            return {}
        return {
            "prompt_logprobs": logprobs.of_prompt(step.echo.scores.tokens(), num_top, as_ids=self._view.tokens_as_ids)
        }

    def _usage(self) -> dict[str, Any]:
        """As far as it was told to the client. A prompt counts once, however many answers it has."""
        prompts = [generation for generation in self._generations if generation.leader is None]
        num_prompt = sum(len(generation.request.prompt_ids) for generation in prompts)
        num_new = sum(self._num_told)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(prompt.facts.cached_tokens for prompt in prompts)},
        }

    def _facts(self) -> dict[str, Any]:
        """Moonpool's extension: an object, or a list of them by choice where there are several."""
        facts = [_facts(generation) for generation in self._generations]
        if self._view.timing:
            for told, generation in zip(facts, self._generations, strict=True):
                told["timing"] = timing_of(generation.facts)
        return {"moonpool": facts[0] if len(facts) == 1 else facts}


class CompletionFormat(Format):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_choice(self, index: int, step: Step) -> dict[str, Any]:
        return {"index": index, "text": self._text(step), **self._end(index, step, with_prompt=True)} | (
            self._prompt_logprobs(step)
        )

    def _chunk_choices(self, index: int, step: Step, is_first: bool) -> list[dict[str, Any]]:
        return [{"index": index, "text": self._text(step), **self._end(index, step, with_prompt=is_first)}]

    def _text(self, step: Step) -> str:
        return step.text if step.echo is None or not self._view.echo else step.echo.text + step.text

    def _logprobs(self, step: Step, num_top: int) -> dict[str, Any]:
        echo = step.echo if self._view.echo else None
        prompt = echo.scores.tokens() if echo is not None and echo.scores is not None else ()
        return logprobs.of_completion((*prompt, *step.scores), num_top, as_ids=self._view.tokens_as_ids)


class ChatFormat(Format):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generations: Sequence[Generation], model: str, view: View) -> None:
        super().__init__(generations, model, view)
        self._calls = [ChoiceCalls() if view.reads_calls else None for _ in generations]

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        return super().whole(steps) | self._once() | self._prompt_logprobs(steps[0])

    def _whole_choice(self, index: int, step: Step) -> dict[str, Any]:
        calls = self._calls[index]
        message = {"content": step.text} if calls is None else calls.message(step)
        end = self._end(index, step, with_prompt=False)
        return {"index": index, "message": {"role": "assistant", **message}, **end}

    def _chunk_choices(self, index: int, step: Step, is_first: bool) -> list[dict[str, Any]]:
        calls = self._calls[index]
        delta = {"content": step.text} if calls is None else calls.delta(step)
        choice = {"index": index, "delta": delta, **self._end(index, step, with_prompt=False)}
        if not is_first:
            # What is written around a call's name and arguments is told to nobody.
            tells = delta or step.finish_reason or step.scores or self._view.return_token_ids
            return [choice] if tells else []
        # OpenAI's streams open with the role alone.
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}, choice]

    def _end(self, index: int, step: Step, *, with_prompt: bool) -> dict[str, Any]:
        end = super()._end(index, step, with_prompt=with_prompt)
        calls = self._calls[index]
        return end if calls is None else end | {"finish_reason": calls.finish_reason(step)}

    def _logprobs(self, step: Step, num_top: int) -> dict[str, Any]:
        return logprobs.of_chat(step.scores, num_top, as_ids=self._view.tokens_as_ids)

    def _once(self) -> dict[str, Any]:
        """A chat has one prompt, told beside the choices, as vLLM does."""
        if not self._view.return_token_ids:
            return {}
        return {"prompt_token_ids": self._generations[0].request.prompt_ids.tolist()}


def _facts(generation: Generation) -> dict[str, Any]:
    facts, request = generation.facts, generation.request
    return {
        "request_id": request.request_id,
        "tokenize_s": round(request.tokenize_s, 6),
        "schedule_s": round(facts.schedule_s, 6),
        "queue_s": round(facts.queue_s, 6),
        "load_s": round(facts.load_s, 6),
        "prefill_s": round(facts.prefill_s, 6),
        "ttft_s": round((facts.first_token_s or request.arrival_s) - request.arrival_s, 6),
        "cached_tokens": facts.cached_tokens,
        "cached_dram_tokens": facts.cached_dram_tokens,
        "cached_ssd_tokens": facts.cached_ssd_tokens,
        "cached_remote_tokens": facts.cached_remote_tokens,
        "approximate_tokens": facts.approximate_tokens,
        "dropped_messages": request.dropped_messages,
        "attempts": facts.attempts,
        "prefill_node": facts.prefill_node,
        "decode_node": facts.decode_node,
        "seed": request.sampling.seed,
    }
