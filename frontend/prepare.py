"""From what a client sent to requests for the cluster, off the event loop: limits, templates, tokens, chain keys."""

import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

import numpy as np

from frontend.answers import AnswerMemory
from frontend.api.fields import MAX_TOKEN_ID
from frontend.api.models import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
)
from frontend.arrival import Arrival
from frontend.cluster import ClusterWatch
from frontend.config import FrontendConfig, ModelConfig
from frontend.errors import ContextLengthExceeded, InvalidRequest
from frontend.fitting import ChatFitter
from frontend.grammars import checked_chat_grammar, checked_grammar
from frontend.prompts import ChatPrompt, PromptReader
from frontend.request import GenerationRequest, Grammar
from frontend.sampling_params import check_choices, check_endless, check_prompt_scores, sampling_of, text_options
from frontend.tokenizer import Tokenizer
from frontend.work_threads import WorkThreads
from kvpool import chain_keys, chain_seed
from telemetry import RequestMetrics


class Preparer:
    """Understands bodies for one model."""

    def __init__(
        self,
        config: FrontendConfig,
        model: ModelConfig,
        tokenizer: Tokenizer,
        cluster: ClusterWatch,
        threads: WorkThreads,
        answers: AnswerMemory,
        metrics: RequestMetrics,
    ) -> None:
        self._config = config
        self._model = model.name
        self._tokenizer = tokenizer
        self._cluster = cluster
        self._reader = PromptReader(tokenizer, model.name, answers)
        self._fitter = ChatFitter(self._reader, tokenizer)
        self._metrics = metrics
        self._threads = threads

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer together; 0 while nobody knows."""
        return self._cluster.max_model_len(self._model, self._tokenizer.max_positions)

    async def completion(self, body: CompletionBody, arrival: Arrival) -> list[GenerationRequest]:
        """One request per answer: all of the first prompt, then all of the second, ..."""
        prompts = body.prompt
        if len(prompts) > self._config.max_prompts:
            most = self._config.max_prompts
            raise InvalidRequest(f"{len(prompts)} prompts in one request: at most {most} are taken", param="prompt")

        def prepare() -> list[GenerationRequest]:
            check_choices(body, self._config, len(prompts))
            grammar = checked_grammar(body)
            special = body.add_special_tokens is not False
            requests: list[GenerationRequest] = []
            if body.truncate_prompt_tokens is None:
                for text in (prompt for prompt in prompts if isinstance(prompt, str)):
                    least = self._tokenizer.least_tokens(text)
                    self._check_length(least, body.max_tokens or 1, param="prompt", least=True)
            read = [
                self._truncated(self._reader.prompt_ids(prompt, add_special_tokens=special), body) for prompt in prompts
            ]
            check_prompt_scores(body, self._config, read)
            for ids in read:
                max_tokens = self._max_tokens(
                    len(ids),
                    self._asked(body, body.max_tokens),
                    MAX_TOKEN_ID if body.endless else self._config.completion_default_tokens,
                    param="prompt",
                )
                requests += self._requests(body, arrival, f"cmpl-{uuid.uuid4().hex}", ids, max_tokens, grammar)
            return requests

        return await self._threads.run(prepare)

    async def chat(self, body: ChatBody, arrival: Arrival) -> list[GenerationRequest]:
        """One request per answer."""

        def prepare() -> list[GenerationRequest]:
            check_choices(body, self._config, 1)
            grammar = checked_chat_grammar(body)
            named = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            asked = self._asked(body, named)
            prompt, num_dropped = self._chat_prompt(body, arrival, asked)
            self._metrics.answer_memory_hits.inc(prompt.num_recalled)
            self._metrics.answer_memory_misses.inc(prompt.num_forgotten)
            ids = prompt.token_ids
            check_prompt_scores(body, self._config, [ids])
            default = MAX_TOKEN_ID if body.endless else self._config.chat_default_tokens
            max_tokens = self._max_tokens(len(ids), asked, default, param="messages")
            requests = self._requests(body, arrival, f"chatcmpl-{uuid.uuid4().hex}", ids, max_tokens, grammar)
            return [replace(request, place=prompt.place, dropped_messages=num_dropped) for request in requests]

        return await self._threads.run(prepare)

    async def tokens(self, body: TokenizeBody) -> list[int]:
        """The ids of a text or a chat."""
        prompt, messages = body.prompt, body.messages
        if (prompt is None) == (messages is None):
            raise InvalidRequest("exactly one of prompt and messages is needed", param="prompt")
        special = body.add_special_tokens
        if messages is not None:
            return await self._threads.run(
                lambda: self._reader.chat_ids(messages, body, add_special_tokens=special is True)
            )
        return await self._threads.run(
            lambda: self._tokenizer.encode(prompt or "", add_special_tokens=special is not False)
        )

    async def text(self, token_ids: Sequence[int]) -> str:
        """The text of ids."""
        self._reader.check_ids(token_ids, "tokens")
        return await self._threads.run(lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _chat_prompt(self, body: ChatBody, arrival: Arrival, asked: int | None) -> tuple[ChatPrompt, int]:
        """(the chat's prompt, how many of its messages were left out)"""
        special, scope = body.add_special_tokens is True, (arrival.caller.tenant, body.cache_salt or "")
        limit = self.max_model_len
        if body.truncation != "auto" or not limit:
            check = partial(self._check_length, wanted=asked or 1, param="messages", least=True)
            return self._reader.chat(body.messages, body, add_special_tokens=special, scope=scope, check=check), 0
        wanted = asked or min(self._config.chat_default_tokens, max(1, limit // 8))
        return self._fitter.fitting(
            body.messages, body, limit=limit, wanted=wanted, add_special_tokens=special, scope=scope
        )

    def _requests(
        self,
        body: GenerationBody,
        arrival: Arrival,
        request_id: str,
        ids: list[int],
        max_tokens: int,
        grammar: Grammar | None,
    ) -> list[GenerationRequest]:
        """A prompt's answers. The first goes by `request_id` itself."""
        config, tokenizer = self._config, self._tokenizer
        prompt = np.array(ids, np.int32)
        seed = chain_seed(arrival.caller.block_salt(body.cache_salt or ""), tokenizer.identity, config.block_tokens)
        sampling = sampling_of(
            body,
            config,
            max_tokens=max_tokens,
            eos_token_ids=tokenizer.eos_token_ids,
            vocab_size=tokenizer.vocab_size,
            grammar=grammar,
        )
        first = GenerationRequest(
            request_id=request_id,
            model=self._model,
            prompt_ids=prompt,
            chain=chain_keys(seed, prompt, config.block_tokens),
            chain_seed=seed,
            block_tokens=config.block_tokens,
            sampling=sampling,
            arrival_s=arrival.at_s,
            deadline_s=arrival.at_s + config.request_timeout_s,
            tokenize_s=monotonic() - arrival.at_s,
            ttft_objective_s=arrival.ttft_objective_s,
            tpot_objective_s=arrival.tpot_objective_s,
            tenant=arrival.caller.tenant,
            slo_class=arrival.class_beside(body.slo_class),
            priority=body.priority or 0,
            idle_s=config.endless_idle_s if body.endless else 0.0,
            text=text_options(body),
            span=arrival.span,
        )
        arrival.span.past("tokenize", arrival.at_s, first.arrival_s + first.tokenize_s, prompt_tokens=len(prompt))
        further = range(1, body.num_choices)
        return [first, *(first.other_choice(choice) for choice in further)]

    def _truncated(self, ids: list[int], body: CompletionBody) -> list[int]:
        """The prompt's last tokens, as many as `body` wants kept; -1: as many as fit."""
        keep = body.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep == -1:
            wanted = self._config.completion_default_tokens if body.max_tokens is None else body.max_tokens
            keep = self.max_model_len - max(1, wanted)
        if keep < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens keeps {keep} tokens: expected 1 or more, or -1 for as many as fit beside "
                "max_tokens",
                param="truncate_prompt_tokens",
            )
        return ids[-keep:]

    @staticmethod
    def _asked(body: GenerationBody, max_tokens: int | None) -> int | None:
        """Tokens to ask the cluster for. An echo alone needs one, which is not shown; an endless answer takes what it
        can have."""
        if body.endless:
            check_endless(body, max_tokens)
            return None
        if max_tokens != 0:
            return max_tokens
        if not (isinstance(body, CompletionBody) and body.echo):
            raise InvalidRequest("max_tokens: expected 1 or more; only with echo it may be 0", param="max_tokens")
        return 1

    def _max_tokens(self, num_prompt: int, asked: int | None, default: int, *, param: str) -> int:
        limit = self.max_model_len
        if not limit:
            return asked or default
        self._check_length(num_prompt, asked or 1, param=param)
        return asked or min(default, limit - num_prompt)

    def _check_length(self, num_prompt: int, wanted: int, *, param: str, least: bool = False) -> None:
        """Raises ContextLengthExceeded. `least`: the prompt has so many tokens at least."""
        limit = self.max_model_len
        if limit and num_prompt + wanted > limit:
            more = "or more " if least else ""
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens. However, you requested {num_prompt + wanted} "
                f"{more}tokens ({num_prompt} {more}in the {param}, {wanted} in the completion). "
                + (
                    'Ask for fewer, shorten the chat, or send truncation "auto", which drops the oldest turns.'
                    if param == "messages"
                    else "Ask for fewer, or shorten the prompt."
                ),
                param=param,
            )
