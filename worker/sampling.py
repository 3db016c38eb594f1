"""Validation of a request's sampling parameters: parameters accepted here cannot fail an engine step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.common_pb2 import Sampling as SamplingProto
from worker.errors import RequestRefused

MAX_TEMPERATURE = 1e6  # far from infinity, even multiplied by the noise
MAX_REPETITION_PENALTY = 100.0
MAX_OTHER_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_LOGPROBS = 20

# Smaller penalties have no further effect, and a logit divided by one may overflow.
_LEAST_REPETITION_PENALTY = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class ValidatedSamplingParams:
    """Validated sampling parameters; all ids are within the vocabulary."""

    temperature: float  # 0 = greedy
    top_p: float
    top_k: int
    min_p: float
    seed: int
    choice: int
    stop_ids: frozenset[int]
    min_tokens: int  # stop tokens are excluded before this many new tokens
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logprobs: int | None  # number of likeliest ids reported per token; None = no log-probabilities
    prompt_logprobs: int | None
    grammar: Grammar | None

    @classmethod
    def from_proto(cls, asked: SamplingProto, *, vocab_size: int) -> ValidatedSamplingParams:
        """Parse and validate. Raises RequestRefused, which names the field, the value and the expected value."""
        repetition = asked.repetition_penalty if asked.HasField("repetition_penalty") else 1.0
        _check_numbers(asked, repetition)
        stop_ids = frozenset(asked.stop_token_ids)
        _check_min_tokens(asked, stop_ids, vocab_size)
        bias_ids = np.array(sorted(asked.logit_bias), np.int64)
        if len(bias_ids) and bias_ids[-1] >= vocab_size:
            raise _refused("token ids of logit_bias", str(bias_ids[-1]), f"in 0..{vocab_size - 1}")
        return cls(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            seed=asked.seed,
            choice=asked.choice,
            stop_ids=stop_ids,
            min_tokens=asked.min_tokens,
            bias_ids=bias_ids,
            bias_values=np.array([asked.logit_bias[int(i)] for i in bias_ids], np.float32),
            repetition_penalty=max(repetition, _LEAST_REPETITION_PENALTY),
            frequency_penalty=asked.frequency_penalty,
            presence_penalty=asked.presence_penalty,
            logprobs=_num_logprobs("logprobs", asked, vocab_size),
            prompt_logprobs=_num_logprobs("prompt_logprobs", asked, vocab_size),
            grammar=asked.grammar if asked.HasField("grammar") else None,
        )

    @property
    def has_penalties(self) -> bool:
        """True if the weight of seen tokens changes."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0


def _check_numbers(asked: SamplingProto, repetition: float) -> None:
    # The comparisons are false for NaN.
    for name, value, fine, expected in (
        ("temperature", asked.temperature, 0 <= asked.temperature <= MAX_TEMPERATURE, f"from 0 to {MAX_TEMPERATURE:g}"),
        ("top_p", asked.top_p, 0 < asked.top_p <= 1, "above 0 and at most 1"),
        ("top_k", asked.top_k, asked.top_k >= 0, "0 (off) or more"),
        ("min_p", asked.min_p, 0 <= asked.min_p <= 1, "from 0 (off) to 1"),
        (
            "repetition_penalty",
            repetition,
            0 < repetition <= MAX_REPETITION_PENALTY,
            f"above 0 and at most {MAX_REPETITION_PENALTY:g}",
        ),
    ):
        if not fine:
            raise _refused(name, f"{value:g}", expected)
    for name, value in (
        ("frequency_penalty", asked.frequency_penalty),
        ("presence_penalty", asked.presence_penalty),
    ):
        if not -MAX_OTHER_PENALTY <= value <= MAX_OTHER_PENALTY:
            raise _refused(name, f"{value:g}", f"from -{MAX_OTHER_PENALTY:g} to {MAX_OTHER_PENALTY:g}")
    for token_id, bias in asked.logit_bias.items():
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise _refused("logit_bias", f"{bias:g} for token id {token_id}", f"from -{MAX_BIAS:g} to {MAX_BIAS:g}")


def _check_min_tokens(asked: SamplingProto, stop_ids: frozenset[int], vocab_size: int) -> None:
    if asked.min_tokens > asked.max_tokens:
        raise _refused("min_tokens", str(asked.min_tokens), f"at most max_tokens ({asked.max_tokens})")
    if asked.min_tokens and sum(token_id < vocab_size for token_id in stop_ids) >= vocab_size:
        raise _refused("min_tokens", str(asked.min_tokens), "0 if every token is a stop token")


def _num_logprobs(name: str, asked: SamplingProto, vocab_size: int) -> int | None:
    if not asked.HasField(name):  # type: ignore[arg-type]  # the names are spelt out where this is called
        return None
    number: int = getattr(asked, name)
    if number > MAX_LOGPROBS:
        raise _refused(name, str(number), f"from 0 to {MAX_LOGPROBS}")
    return min(number, vocab_size)


def _refused(name: str, got: str, expected: str) -> RequestRefused:
    return RequestRefused("bad_sampling", f"{name} must be {expected}, got {got}")
