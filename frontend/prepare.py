"""Preparation of generation requests from a client's headers and body: checks, prompts, token ids, chain keys."""

import re
import secrets
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic
from typing import Final

import numpy as np

from frontend.answer_format import answer_format
from frontend.answer_memory import AnswerMemory
from frontend.api.hints import hints_of, prefills_next_turn, priority_of
from frontend.api.request_base import MAX_TOKEN_ID
from frontend.api.request_models import (
    CLASS_NAME,
    ChatBody,
    ChatMessage,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
)
from frontend.callers import ApiCaller
from frontend.cluster import ClusterWatch
from frontend.config import FrontendConfig, ServedModelConfig
from frontend.endless import check_default_window, check_endless, rolling_window
from frontend.errors import ContextLengthExceeded, Forbidden, InvalidRequest
from frontend.event_loop import WorkThreads
from frontend.grammars import GrammarChecker, UncheckedGrammar, requested_grammar, wants_grammar
from frontend.input_limits import InputLimits
from frontend.next_turn import LEAST_NEW_TOKENS, common_length, next_prefix, prefix_request, wants_next_turn
from frontend.prompts import ChatPrompt, ChatTruncator, PromptReader
from frontend.request import GenerationRequest, Grammar, ReasoningOptions, SamplingParams, TextOptions
from frontend.sessions import NO_SESSION, SessionIds, session_number
from frontend.tokenizer import Tokenizer
from frontend.tools import reads_calls
from kvpool import chain_keys, chain_seed
from moonpool_proto.v1 import worker_pb2
from telemetry import RequestMetrics
from telemetry.tracing import OFF, Span

_NUMBER: Final = re.compile(r"\d{1,20}(\.\d{1,20})?")  # stricter than float()
_LEAST_MS: Final = 0.001
_LARGEST_MS: Final = 24 * 3600 * 1000.0
_FEW_IDS: Final = 1024  # preparing fewer takes 0.2 ms, no longer than passing them to a thread and back


@dataclass(frozen=True)
class RequestContext:
    """Context of one HTTP request besides its body: arrival time, caller, and options from headers.

    `at_s` is on the monotonic clock. An objective of 0 means that the cluster's objectives apply.
    """

    at_s: float
    caller: ApiCaller
    ttft_objective_s: float = 0.0
    tpot_objective_s: float = 0.0
    slo_class: str = ""
    wants_timing: bool = False  # the response includes the time breakdown
    span: Span = OFF
    body_nbytes: int = 0
    session_ids: SessionIds = NO_SESSION

    @classmethod
    def of(cls, headers: Mapping[str, str], *, at_s: float, caller: ApiCaller, span: Span = OFF) -> "RequestContext":
        """Parse x-slo-ttft-ms, x-slo-tpot-ms, x-slo-class, x-moonpool-timing and the ids of sessions.

        Raises InvalidRequest.
        """
        ttft_s, tpot_s = (_milliseconds(headers, name) for name in ("x-slo-ttft-ms", "x-slo-tpot-ms"))
        name, wants_timing, sessions = _class_name(headers), _wants_timing(headers), SessionIds.of(headers)
        return cls(at_s, caller, ttft_s, tpot_s, name, wants_timing, span, session_ids=sessions)

    def class_beside(self, in_body: str | None) -> str:
        """Return the class of objectives given in the header or the body.

        Raises InvalidRequest if both are given and differ, and Forbidden for a class that the caller may not use.
        """
        if in_body is not None and self.slo_class and in_body != self.slo_class:
            raise InvalidRequest(
                f"slo_class is {in_body!r} but the header x-slo-class is {self.slo_class!r}: give only one of them",
                param="slo_class",
            )
        name, allowed = in_body or self.slo_class, self.caller.slo_classes
        if name and allowed and name not in allowed:
            raise Forbidden(
                f"tenant {self.caller.tenant!r} may not use the class {name!r} of objectives: name one of "
                f"{', '.join(allowed)}",
                param="slo_class",
                code="denied_class",
            )
        return name


def _milliseconds(headers: Mapping[str, str], name: str) -> float:
    """Return the header's value in seconds; 0 if it is missing."""
    text = headers.get(name)
    if text is None:
        return 0.0
    value = float(text) if _NUMBER.fullmatch(text.strip()) else 0.0
    if not _LEAST_MS <= value <= _LARGEST_MS:
        raise InvalidRequest(
            f"{name} must be a number of milliseconds from {_LEAST_MS:g} to {_LARGEST_MS:.0f} (a day), got "
            f"{text[:40]!r}",
            param=name,
        )
    return value / 1000


def _class_name(headers: Mapping[str, str]) -> str:
    text = headers.get("x-slo-class", "")
    if text and not re.fullmatch(CLASS_NAME, text):
        raise InvalidRequest(
            f"x-slo-class must be a name of at most 64 letters, digits, _ . and -, got {text[:80]!r}",
            param="x-slo-class",
        )
    return text


def _wants_timing(headers: Mapping[str, str]) -> bool:
    text = headers.get("x-moonpool-timing", "0")
    if text not in ("0", "1"):
        raise InvalidRequest(f"x-moonpool-timing must be 0 or 1, got {text[:40]!r}", param="x-moonpool-timing")
    return text == "1"


def sampling_of(
    body: GenerationBody,
    config: FrontendConfig,
    *,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    grammar: Grammar | None,
) -> SamplingParams:
    """Return the body's sampling parameters, with a random seed if it has none. Raises InvalidRequest."""
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs: true", param="top_logprobs")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),  # vLLM's -1 also means off
        seed=secrets.randbits(63) if body.seed is None else body.seed % 2**64,
        stop=_stops(body.stop, config),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        eos_token_ids=tuple(eos_token_ids),
        ignore_eos=bool(body.ignore_eos),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_biases(body.logit_bias or {}, config, vocab_size),
        min_tokens=_min_tokens(body, max_tokens, grammar),
        logprobs=body.num_top,
        prompt_logprobs=_prompt_logprobs(body),
        grammar=grammar,
    )


def text_options(body: GenerationBody) -> TextOptions:
    """Return the options of the answer's text."""
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    return TextOptions(
        echo=echo,
        hides_answer=echo and body.max_tokens == 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
    )


def check_choices(body: GenerationBody, config: FrontendConfig, num_prompts: int) -> None:
    """Raise InvalidRequest for too many choices, or for a best_of that differs from n."""
    if body.best_of is not None and body.best_of != body.num_choices:
        raise InvalidRequest(
            f"best_of must equal n ({body.num_choices}), got {body.best_of}: choosing among more answers than are "
            "returned is not supported; omit best_of",
            param="best_of",
            code="unsupported_parameter",
        )
    num_choices = num_prompts * body.num_choices
    if num_choices > config.max_choices:
        most = config.max_choices
        raise InvalidRequest(
            f"a request must have at most {most} choices, got {num_choices} ({num_prompts} prompts with n = "
            f"{body.num_choices})",
            param="n",
        )


def check_prompt_scores(body: GenerationBody, config: FrontendConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raise InvalidRequest if the response would contain too many prompt log-probabilities.

    Each choice of a completion returns those of its prompt; a chat returns them once.
    """
    num_top = _prompt_logprobs(body)
    if num_top is None:
        return
    num_copies = 1 if isinstance(body, ChatBody) else body.num_choices
    num_scores = num_copies * (num_top + 1) * sum(map(len, prompts))
    if num_scores > config.max_prompt_scores:
        raise InvalidRequest(
            f"a request must ask for at most {config.max_prompt_scores} log-probabilities of prompt tokens, got "
            f"{num_scores}: request fewer top tokens, choices or prompts",
            param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
        )


def _stops(stop: list[str] | None, config: FrontendConfig) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(stop or ()))
    if len(stops) > config.max_stop_strings:
        raise InvalidRequest(
            f"stop must have at most {config.max_stop_strings} strings, got {len(stops)}", param="stop"
        )
    for text in stops:
        if not 0 < len(text) <= config.max_stop_chars:
            most = config.max_stop_chars
            raise InvalidRequest(f"a stop string must have 1 to {most} characters, got {len(text)}", param="stop")
    return stops


def _biases(biases: dict[int, float], config: FrontendConfig, vocab_size: int) -> dict[int, float]:
    if len(biases) > config.max_logit_biases:
        raise InvalidRequest(
            f"logit_bias must have at most {config.max_logit_biases} entries, got {len(biases)}", param="logit_bias"
        )
    if biases and max(biases) >= vocab_size:
        raise InvalidRequest(
            f"token ids of logit_bias must be in 0..{vocab_size - 1}, got {max(biases)}", param="logit_bias"
        )
    return biases


def _min_tokens(body: GenerationBody, max_tokens: int, grammar: Grammar | None) -> int:
    num = body.min_tokens or 0
    if num > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens ({max_tokens}), got {num}", param="min_tokens")
    for name, is_asked in (("min_tokens", bool(num)), ("ignore_eos", bool(body.ignore_eos))):
        if is_asked and grammar is not None:
            raise InvalidRequest(
                f"{name} cannot be combined with structured output or tool calls, which end when they are complete",
                param=name,
            )
    return num


def _prompt_logprobs(body: GenerationBody) -> int | None:
    """Return the number of candidates per prompt token: the larger of prompt_logprobs and an echo's logprobs."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "prompt_logprobs cannot be streamed; use echo with logprobs instead", param="prompt_logprobs"
        )
    echoed = body.num_top if isinstance(body, CompletionBody) and body.echo else None
    requested = [num for num in (echoed, body.prompt_logprobs) if num is not None]
    return max(requested, default=None)


class Preparer:
    """Preparation of requests for one model: limits, templates, tokenising and chain keys, in worker threads.

    Raises FrontendConfigError for a setting that does not suit the model.
    """

    def __init__(
        self,
        config: FrontendConfig,
        model: ServedModelConfig,
        tokenizer: Tokenizer,
        cluster: ClusterWatch,
        threads: WorkThreads,
        answers: AnswerMemory,
        metrics: RequestMetrics,
        grammars: GrammarChecker,
    ) -> None:
        own_window = model.own_window
        self._default_window = config.http.endless_window if own_window is None else own_window
        check_default_window(
            self._default_window,
            block_tokens=config.block_tokens,
            max_positions=tokenizer.max_positions,
            model=model.name,
        )
        self._config = config
        self._model = model.name
        self._tokenizer = tokenizer
        self._cluster = cluster
        self._reader = PromptReader(tokenizer, model.name, answers)
        self._fitter = ChatTruncator(self._reader, tokenizer)
        self._metrics = metrics
        self._threads = threads
        self._grammars = grammars
        self.form = answer_format(
            tokenizer,
            model.own_reasoning_parser or config.http.reasoning_parser,
            model.own_tool_call_parser or config.http.tool_call_parser,
            model=model.name,
        )
        self.limits = InputLimits(
            tokenizer, lambda: self.max_model_len, config.max_body_nbytes, config.http.endless_limit_tokens
        )

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of prompt and answer together; 0 while unknown."""
        return self._cluster.max_model_len(self._model, self._tokenizer.max_positions)

    async def completion(self, body: CompletionBody, arrival: RequestContext) -> list[GenerationRequest]:
        """Return one request per choice: all of the first prompt's, then all of the second's, and so on."""
        prompts = body.prompt
        if prefills_next_turn(body):
            raise InvalidRequest(
                "prefill_next_turn is a hint for chats, whose next prompt is known: use /v1/chat/completions",
                param="hints.prefill_next_turn",
            )
        if len(prompts) > self._config.max_prompts:
            most = self._config.max_prompts
            raise InvalidRequest(f"prompt must hold at most {most} prompts, got {len(prompts)}", param="prompt")
        grammar = await self._grammar(body, arrival)
        special = body.add_special_tokens is not False
        rolling = self._rolling_window(body)
        limit = self._limit(rolling)

        def read(prompt: str | list[int]) -> list[int]:
            self._check_prompt(prompt, body, limit)
            return self._truncated(self._reader.prompt_ids(prompt, add_special_tokens=special), body, limit)

        def begin() -> list[list[int]]:
            check_choices(body, self._config, len(prompts))
            return [read(prompts[0])]

        def finish(read: list[list[int]]) -> list[GenerationRequest]:
            requests: list[GenerationRequest] = []
            check_prompt_scores(body, self._config, read)
            for ids in read:
                max_tokens = self._max_tokens(
                    len(ids),
                    self._wanted_tokens(body, body.max_tokens),
                    MAX_TOKEN_ID if body.endless else self._config.completion_default_tokens,
                    limit,
                    param="prompt",
                )
                prompt_requests = self._requests(
                    body, arrival, f"{body.ID_PREFIX}{uuid.uuid4().hex}", ids, max_tokens, grammar
                )
                requests += [replace(request, rolling=rolling) for request in prompt_requests]
            return requests

        tenant, nbytes = arrival.caller.tenant, arrival.body_nbytes // len(prompts)
        run = partial(self._threads.run, tenant=tenant, nbytes=nbytes)
        if len(prompts) == 1:
            is_quick = not isinstance(prompts[0], str) and len(prompts[0]) <= _FEW_IDS
            return finish(begin()) if is_quick else await run(lambda: finish(begin()))
        all_ids = await run(begin)
        for prompt in prompts[1:]:  # separately, so that other tenants' work is not delayed by all of them
            all_ids.append(await run(partial(read, prompt)))
        return await run(lambda: finish(all_ids))

    async def chat(self, body: ChatBody, arrival: RequestContext) -> list[GenerationRequest]:
        """Return one request per choice."""
        grammar = await self._grammar(body, arrival)
        rolling = self._rolling_window(body)
        limit = self._limit(rolling)

        def prepare() -> list[GenerationRequest]:
            check_choices(body, self._config, 1)
            named = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
            requested = self._wanted_tokens(body, named)
            next_turn = wants_next_turn(body)
            prompt, num_dropped = self._chat_prompt(body, arrival, requested, limit)
            self._metrics.answer_memory_hits.inc(prompt.num_recalled)
            self._metrics.answer_memory_misses.inc(prompt.num_forgotten)
            ids = prompt.token_ids
            check_prompt_scores(body, self._config, [ids])
            default = MAX_TOKEN_ID if body.endless else self._config.chat_default_tokens
            max_tokens = self._max_tokens(len(ids), requested, default, limit, param="messages")
            requests = self._requests(body, arrival, f"{body.ID_PREFIX}{uuid.uuid4().hex}", ids, max_tokens, grammar)
            text = self._parsed(requests[0].text, body, prompt.ending)
            return [
                replace(
                    request,
                    rolling=rolling,
                    place=prompt.place,
                    previous_tokens=prompt.previous_tokens,
                    head_tokens=prompt.head_tokens,
                    dropped_messages=num_dropped,
                    prefills_next_turn=next_turn,
                    text=text,
                )
                for request in requests
            ]

        return await self._threads.run(prepare, tenant=arrival.caller.tenant, nbytes=arrival.body_nbytes)

    async def next_turn(
        self, body: ChatBody, arrival: RequestContext, answered: GenerationRequest, answer_ids: Sequence[int], text: str
    ) -> GenerationRequest | None:
        """Return a request that computes what the prompt after the answer `text` is known to begin with.

        Returns None if hardly any of its blocks are missing among those of the prompt and the answer, if it does not
        fit into the context, if messages were dropped, since the next turn may drop more, or if the answer had a
        rolling window. Raises InvalidRequest if the template rejects a further message.
        """

        def prepare() -> GenerationRequest | None:
            if answered.dropped_messages or answered.rolling is not None:
                return None
            special, scope = body.add_special_tokens is True, (arrival.caller.tenant, body.cache_salt or "")
            check = partial(self._check_text, wanted=1, param="messages", limit=self.max_model_len)

            def read(messages: Sequence[ChatMessage]) -> list[int]:
                return self._reader.chat(messages, body, add_special_tokens=special, scope=scope, check=check).token_ids

            ids = next_prefix(body, text, self.form.tools, read)
            # The KV of the answer's last token was never computed.
            stored = common_length(ids, np.concatenate([answered.prompt_ids, np.array(answer_ids[:-1], np.int32)]))
            block, limit = answered.block_tokens, self.max_model_len
            num_new = (len(ids) // block - stored // block) * block
            if num_new < LEAST_NEW_TOKENS or (limit and len(ids) >= limit):
                return None
            return prefix_request(answered, ids, self._config.http.request_timeout_s)

        return await self._threads.run(prepare, tenant=arrival.caller.tenant, nbytes=arrival.body_nbytes)

    async def tokens(self, body: TokenizeBody, arrival: RequestContext) -> list[int]:
        """Return the token ids of a text or a chat."""
        prompt, messages = body.prompt, body.messages
        if (prompt is None) == (messages is None):
            raise InvalidRequest("exactly one of prompt and messages must be given", param="prompt")
        special = body.add_special_tokens

        def read() -> list[int]:
            if messages is not None:
                check = partial(self.limits.check_tokenizable, param="messages")
                return self._reader.chat_ids(messages, body, add_special_tokens=special is True, check=check)
            self.limits.check_tokenizable(prompt or "", "prompt")
            return self._tokenizer.encode(prompt or "", add_special_tokens=special is not False)

        return await self._threads.run(read, tenant=arrival.caller.tenant, nbytes=arrival.body_nbytes)

    async def text(self, token_ids: Sequence[int], arrival: RequestContext) -> str:
        """Return the text of token ids."""
        self.limits.check_ids(token_ids, "tokens")
        self._reader.check_ids(token_ids, "tokens")
        return await self._threads.run(
            lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False),
            tenant=arrival.caller.tenant,
            nbytes=arrival.body_nbytes,
        )

    async def _grammar(self, body: GenerationBody, arrival: RequestContext) -> Grammar | None:
        """Return the body's grammar, checked; None if it has none. Raises InvalidRequest and Overloaded."""
        if not wants_grammar(body):
            return None

        def read() -> UncheckedGrammar | None:
            reasoning = None
            if isinstance(body, ChatBody) and self.form.reasoning is not None:
                # What may precede the content depends on the prompt, which is not tokenised for an invalid grammar.
                reasoning = self._reasoning(body, self._reader.chat_ending(body.messages, body))
            return requested_grammar(body, self.form, reasoning)

        tenant, nbytes = arrival.caller.tenant, arrival.body_nbytes
        unchecked = await self._threads.run(read, tenant=tenant, nbytes=nbytes)
        return None if unchecked is None else await self._grammars.check(unchecked, arrival.caller.tenant)

    def _rolling_window(self, body: GenerationBody) -> worker_pb2.RollingWindow | None:
        block_tokens = self._config.block_tokens
        return rolling_window(
            body.endless, self._default_window, block_tokens=block_tokens, max_model_len=self.max_model_len
        )

    def _limit(self, rolling: worker_pb2.RollingWindow | None) -> int:
        """Return the most tokens of prompt and answer together; 0 while unknown."""
        return self.max_model_len if rolling is None else self._config.http.endless_limit_tokens

    def _chat_prompt(
        self, body: ChatBody, arrival: RequestContext, requested: int | None, limit: int
    ) -> tuple[ChatPrompt, int]:
        """Return (the chat's prompt, number of dropped messages)."""
        special, scope = body.add_special_tokens is True, (arrival.caller.tenant, body.cache_salt or "")
        check = partial(self._check_text, wanted=requested or 1, param="messages", limit=limit)
        if body.truncation != "auto" or not limit:
            return self._reader.chat(body.messages, body, add_special_tokens=special, scope=scope, check=check), 0
        self.limits.check_truncatable([message.text for message in body.messages], "messages", limit)
        wanted = requested or min(self._config.chat_default_tokens, max(1, limit // 8))
        return self._fitter.truncate(
            body.messages, body, limit=limit, wanted=wanted, add_special_tokens=special, scope=scope, check=check
        )

    def _reasoning(self, body: ChatBody, ending: str) -> ReasoningOptions | None:
        """Return how a prompt with this ending leaves its answer's reasoning; None if the answer has none."""
        continued = body.messages[-1].text if body.continue_final_message else None
        return self.form.start_of(ending, continued)

    def _parsed(self, text: TextOptions, body: ChatBody, ending: str) -> TextOptions:
        """Return the text's options with those of the parsers of a chat's answer."""
        reasoning = self._reasoning(body, ending)
        shown_ids = self.form.shown_ids(reasoning=reasoning is not None, calls=reads_calls(body))
        return replace(text, reasoning=reasoning, shown_ids=shown_ids)

    def _requests(
        self,
        body: GenerationBody,
        arrival: RequestContext,
        request_id: str,
        ids: list[int],
        max_tokens: int,
        grammar: Grammar | None,
    ) -> list[GenerationRequest]:
        """Return the requests of a prompt's choices. The first one's id is `request_id` itself."""
        config, tokenizer = self._config, self._tokenizer
        sessions = arrival.session_ids.with_body(body.session_id or body.prompt_cache_key, body.parent_session_id)
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
            deadline_s=arrival.at_s + config.http.request_timeout_s,
            tokenize_s=monotonic() - arrival.at_s,
            ttft_objective_s=arrival.ttft_objective_s,
            tpot_objective_s=arrival.tpot_objective_s,
            tenant=arrival.caller.tenant,
            slo_class=arrival.slo_class,
            allowed_classes=arrival.caller.slo_classes,
            priority=priority_of(body),
            idle_s=config.http.endless_idle_s if body.endless else 0.0,
            text=text_options(body),
            wants_receipt=bool(body.return_receipt),
            hints=hints_of(body),
            session=session_number(arrival.caller.tenant, sessions.session or sessions.parent),
            parent_session=session_number(arrival.caller.tenant, sessions.parent),
            span=arrival.span,
        )
        arrival.span.past("tokenize", arrival.at_s, first.arrival_s + first.tokenize_s, prompt_tokens=len(prompt))
        further = range(1, body.num_choices)
        return [first, *(first.other_choice(choice) for choice in further)]

    def _check_prompt(self, prompt: str | list[int], body: CompletionBody, limit: int) -> None:
        """Raise InvalidRequest for a completion's prompt that is too long to be tokenised."""
        if body.truncate_prompt_tokens is not None:
            if isinstance(prompt, str):
                self.limits.check_truncatable([prompt], "prompt", limit)
        elif isinstance(prompt, str):
            self._check_text(prompt, body.max_tokens or 1, "prompt", limit)
        else:
            self._check_length(len(prompt), body.max_tokens or 1, limit, param="prompt")

    def _check_text(self, text: str, wanted: int, param: str, limit: int) -> None:
        """Raise ContextLengthExceeded for a text that is certainly too long, before it is tokenised."""
        if limit:
            self._check_length(self._tokenizer.least_tokens(text, limit), wanted, limit, param=param, least=True)

    def _truncated(self, ids: list[int], body: CompletionBody, limit: int) -> list[int]:
        """Return the prompt's last `truncate_prompt_tokens` tokens; -1 keeps as many as fit."""
        keep = body.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep == -1:
            wanted = self._config.completion_default_tokens if body.max_tokens is None else body.max_tokens
            keep = limit - max(1, wanted)
        if keep < 1:
            raise InvalidRequest(
                "truncate_prompt_tokens must keep at least 1 token, or be -1 to keep as many as fit beside "
                f"max_tokens, got {keep}",
                param="truncate_prompt_tokens",
            )
        return ids[-keep:]

    @staticmethod
    def _wanted_tokens(body: GenerationBody, max_tokens: int | None) -> int | None:
        """Return the number of tokens to generate; None for the default.

        An echo without an answer still generates one hidden token. An endless answer gets as many as possible.
        """
        if body.endless:
            check_endless(body, max_tokens)
            return None
        if max_tokens != 0:
            return max_tokens
        if not (isinstance(body, CompletionBody) and body.echo):
            raise InvalidRequest("max_tokens must be at least 1; 0 is allowed only with echo", param="max_tokens")
        return 1

    def _max_tokens(self, num_prompt: int, requested: int | None, default: int, limit: int, *, param: str) -> int:
        if not limit:
            return requested or default
        self._check_length(num_prompt, requested or 1, limit, param=param)
        return requested or min(default, limit - num_prompt)

    def _check_length(self, num_prompt: int, wanted: int, limit: int, *, param: str, least: bool = False) -> None:
        """Raise ContextLengthExceeded if it does not fit. `least`: `num_prompt` is a lower bound."""
        if limit and num_prompt + wanted > limit:
            more = "or more " if least else ""
            what = "This model's maximum context length"
            if limit != self.max_model_len:
                what = "The limit on prompt and answer of endless requests (--endless-limit)"
            raise ContextLengthExceeded(
                f"{what} is {limit} tokens. However, you requested {num_prompt + wanted} "
                f"{more}tokens ({num_prompt} {more}in the {param}, {wanted} in the completion). "
                + (
                    'Request fewer tokens, shorten the chat, or set truncation to "auto" to drop the oldest turns.'
                    if param == "messages"
                    else "Request fewer tokens or shorten the prompt."
                ),
                param=param,
            )
