"""From a body's fields to how its tokens are drawn and shown."""

import secrets
from collections.abc import Sequence

from frontend.api.models import ChatBody, CompletionBody, GenerationBody
from frontend.config import FrontendConfig
from frontend.errors import InvalidRequest
from frontend.request import Grammar, SamplingParams, TextOptions


def sampling_of(
    body: GenerationBody,
    config: FrontendConfig,
    *,
    max_tokens: int,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    grammar: Grammar | None,
) -> SamplingParams:
    """The parameters that `body` asks for, a seed drawn where it names none. Raises InvalidRequest."""
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),  # vLLM's -1 is off, too
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
    """How the answer is to be shown."""
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    return TextOptions(
        echo=echo,
        hides_answer=echo and body.max_tokens == 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop=bool(body.include_stop_str_in_output),
    )


def check_endless(body: GenerationBody, max_tokens: int | None) -> None:
    """Raises InvalidRequest for an endless request with an end, or whose answer nobody reads as it comes."""
    problem = ""
    if not body.stream:
        problem = "is told as it is generated: ask for it with stream true"
    elif max_tokens is not None:
        problem = "has no end: leave max_tokens out"
    elif body.num_choices > 1:
        problem = f"is one answer, and n is {body.num_choices}: send several requests"
    if problem:
        raise InvalidRequest(f"an endless answer {problem}", param="endless")


def check_choices(body: GenerationBody, config: FrontendConfig, num_prompts: int) -> None:
    """Raises InvalidRequest for more answers than one request may have, and for a choice among hidden ones."""
    if body.best_of is not None and body.best_of != body.num_choices:
        raise InvalidRequest(
            f"best_of is {body.best_of} and n is {body.num_choices}: a choice among more answers than are told is not "
            "supported; leave best_of out",
            param="best_of",
            code="unsupported_parameter",
        )
    num_choices = num_prompts * body.num_choices
    if num_choices > config.max_choices:
        most = config.max_choices
        raise InvalidRequest(
            f"{num_choices} answers ({num_prompts} prompts, {body.num_choices} each) in one request: at most {most} "
            "are given",
            param="n",
        )


def check_prompt_scores(body: GenerationBody, config: FrontendConfig, prompts: Sequence[Sequence[int]]) -> None:
    """Raises InvalidRequest for more log-probabilities of prompts than one answer may tell: each choice tells its own,
    a chat its one prompt's once."""
    num_top = _prompt_logprobs(body)
    if num_top is None:
        return
    num_tellings = 1 if isinstance(body, ChatBody) else body.num_choices
    num_scores = num_tellings * (num_top + 1) * sum(map(len, prompts))
    if num_scores > config.max_prompt_scores:
        raise InvalidRequest(
            f"{num_scores} log-probabilities of the prompts' tokens would be told: at most {config.max_prompt_scores} "
            "are; ask for fewer likeliest tokens, answers or prompts at once",
            param="prompt_logprobs" if body.prompt_logprobs is not None else "logprobs",
        )


def _stops(stop: list[str] | None, config: FrontendConfig) -> tuple[str, ...]:
    stops = tuple(dict.fromkeys(stop or ()))
    if len(stops) > config.max_stop_strings:
        raise InvalidRequest(f"{len(stops)} stop strings: at most {config.max_stop_strings} are taken", param="stop")
    for text in stops:
        if not 0 < len(text) <= config.max_stop_chars:
            raise InvalidRequest(f"a stop string has 1 to {config.max_stop_chars} characters", param="stop")
    return stops


def _biases(biases: dict[int, float], config: FrontendConfig, vocab_size: int) -> dict[int, float]:
    if len(biases) > config.max_logit_biases:
        raise InvalidRequest(f"{len(biases)} biases: at most {config.max_logit_biases} are taken", param="logit_bias")
    if biases and max(biases) >= vocab_size:
        raise InvalidRequest(
            f"token id {max(biases)} is outside the vocabulary of {vocab_size} tokens", param="logit_bias"
        )
    return biases


def _min_tokens(body: GenerationBody, max_tokens: int, grammar: Grammar | None) -> int:
    num = body.min_tokens or 0
    if num > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {num}: expected at most max_tokens, which is {max_tokens}", param="min_tokens"
        )
    for name, is_asked in (("min_tokens", bool(num)), ("ignore_eos", bool(body.ignore_eos))):
        if is_asked and grammar is not None:
            raise InvalidRequest(
                f"{name} cannot go with structured output or tool calls: what they ask for ends where it is complete",
                param=name,
            )
    return num


def _prompt_logprobs(body: GenerationBody) -> int | None:
    """How many are asked of the prompt: for an echo with log-probabilities and by name, the larger."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed; an echo with logprobs can", param="prompt_logprobs")
    echoed = body.num_top if isinstance(body, CompletionBody) and body.echo else None
    asked = [num for num in (echoed, body.prompt_logprobs) if num is not None]
    return max(asked, default=None)
