"""How generations look on the wire: OpenAI's completion and chat objects, whole and in chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from frontend.driver import Generation
from frontend.output import Step


class Format(ABC):
    """One response's constant parts. `chunks` must be called for every step, in order."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, generations: Sequence[Generation], model: str, *, include_usage: bool, return_token_ids: bool
    ) -> None:
        self._generations = generations
        self._head = {"id": generations[0].request.request_id, "created": int(time.time()), "model": model}
        self._include_usage = include_usage
        self._return_token_ids = return_token_ids
        self._started: set[int] = set()
        self._num_running = len(generations)

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """The response to a request that does not stream."""
        choices = [self._whole_choice(index, step) for index, step in enumerate(steps)]
        return {**self._head, "object": self.whole_object, "choices": choices, "usage": self._usage(), **self._facts()}

    def chunks(self, index: int, step: Step) -> list[dict[str, Any]]:
        """What a stream sends for one step; with the last choice's last step, the usage too."""
        is_first = index not in self._started
        self._started.add(index)
        self._num_running -= step.finish_reason is not None
        chunks = [self._chunk([choice]) for choice in self._chunk_choices(index, step, is_first)]
        if self._num_running == 0:
            if self._include_usage:
                chunks.append(self._chunk([]) | {"usage": self._usage()})
            chunks[-1] |= self._facts()
        return chunks

    @abstractmethod
    def _whole_choice(self, index: int, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _chunk_choices(self, index: int, step: Step, is_first: bool) -> list[dict[str, Any]]: ...

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._include_usage else chunk

    def _end(self, index: int, step: Step, *, with_prompt: bool) -> dict[str, Any]:
        """The fields that all choices have."""
        end: dict[str, Any] = {"logprobs": None, "finish_reason": step.finish_reason, "stop_reason": step.stop_reason}
        if self._return_token_ids:
            end["token_ids"] = list(step.token_ids)
            if with_prompt:
                end["prompt_token_ids"] = self._generations[index].request.prompt_ids.tolist()
        return end

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(generation.request.prompt_ids) for generation in self._generations)
        num_new = sum(len(generation.facts.token_ids) for generation in self._generations)
        num_cached = sum(generation.facts.cached_tokens for generation in self._generations)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _facts(self) -> dict[str, Any]:
        """Moonpool's extension: an object, or a list of them by choice where there are several."""
        facts = [_facts(generation) for generation in self._generations]
        return {"moonpool": facts[0] if len(facts) == 1 else facts}


class CompletionFormat(Format):
    """/v1/completions."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _whole_choice(self, index: int, step: Step) -> dict[str, Any]:
        return {"index": index, "text": step.text, **self._end(index, step, with_prompt=True)}

    def _chunk_choices(self, index: int, step: Step, is_first: bool) -> list[dict[str, Any]]:
        return [{"index": index, "text": step.text, **self._end(index, step, with_prompt=is_first)}]


class ChatFormat(Format):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        return super().whole(steps) | self._prompt_ids()

    def _whole_choice(self, index: int, step: Step) -> dict[str, Any]:
        message = {"role": "assistant", "content": step.text}
        return {"index": index, "message": message, **self._end(index, step, with_prompt=False)}

    def chunks(self, index: int, step: Step) -> list[dict[str, Any]]:
        is_first = not self._started
        chunks = super().chunks(index, step)
        if is_first:
            chunks[0] |= self._prompt_ids()
        return chunks

    def _chunk_choices(self, index: int, step: Step, is_first: bool) -> list[dict[str, Any]]:
        choice = {"index": index, "delta": {"content": step.text}, **self._end(index, step, with_prompt=False)}
        if not is_first:
            return [choice]
        # OpenAI's streams open with the role alone.
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}, choice]

    def _prompt_ids(self) -> dict[str, Any]:
        """A chat has one prompt, told beside the choices, as vLLM does."""
        return {"prompt_token_ids": self._generations[0].request.prompt_ids.tolist()} if self._return_token_ids else {}


def _facts(generation: Generation) -> dict[str, Any]:
    facts, request = generation.facts, generation.request
    return {
        "request_id": request.request_id,
        "tokenize_s": round(request.tokenize_s, 6),
        "schedule_s": round(facts.schedule_s, 6),
        "queue_s": facts.queue_s,
        "load_s": facts.load_s,
        "prefill_s": facts.prefill_s,
        "ttft_s": round((facts.first_token_s or request.arrival_s) - request.arrival_s, 6),
        "cached_tokens": facts.cached_tokens,
        "attempts": facts.attempts,
        "prefill_node": facts.prefill_node,
        "decode_node": facts.decode_node,
        "seed": request.sampling.seed,
    }
