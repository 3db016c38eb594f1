"""Sampling at the door: what passes, what is refused, by name and with the range."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.common_pb2 import Sampling as SamplingProto
from worker.errors import RequestRefused
from worker.sampling import ValidatedSamplingParams

VOCAB = 32


def asked(**fields: Any) -> SamplingProto:
    return SamplingProto(**({"top_p": 1.0, "max_tokens": 8} | fields))


def test_what_is_not_asked_for_is_off() -> None:
    sampling = ValidatedSamplingParams.from_proto(asked(), vocab_size=VOCAB)
    assert (sampling.repetition_penalty, sampling.has_penalties, sampling.min_p, sampling.choice) == (1.0, False, 0, 0)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.grammar) == (None, None, None)
    assert len(sampling.bias_ids) == 0


def test_all_fields_come_through() -> None:
    proto = asked(
        temperature=0.5,
        top_k=3,
        min_p=0.25,
        seed=9,
        choice=4,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.5,
        logit_bias={7: -100.0, 3: 1.5},
        min_tokens=8,
        stop_token_ids=[1, 99],
        logprobs=0,
        prompt_logprobs=20,
        grammar=Grammar(kind=Grammar.KIND_REGEX, source="a"),
    )
    sampling = ValidatedSamplingParams.from_proto(proto, vocab_size=VOCAB)
    assert (sampling.min_p, sampling.choice, sampling.repetition_penalty, sampling.min_tokens) == (0.25, 4, 1.5, 8)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.has_penalties) == (-2.0, 2.0, True)
    assert (sampling.bias_ids.tolist(), sampling.bias_values.tolist()) == ([3, 7], [1.5, -100.0])
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.stop_ids) == (0, 20, {1, 99})
    assert sampling.grammar == proto.grammar


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": -1.0}, "temperature must be from 0 to .*, got -1"),
        ({"temperature": math.nan}, "temperature must be .* got nan"),
        ({"temperature": math.inf}, "temperature must be .* got inf"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0"),
        ({"top_p": 1.5}, "top_p must be .* got 1.5"),
        ({"top_k": -1}, "top_k must be .* got -1"),
        ({"min_p": 1.1}, "min_p must be from 0 .* got 1.1"),
        ({"min_p": math.nan}, "min_p must be .* got nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0 .* got 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be .* got nan"),
        ({"repetition_penalty": 101.0}, "repetition_penalty must be .* got 101"),
        ({"frequency_penalty": 2.5}, "frequency_penalty must be from -2 to 2, got 2.5"),
        ({"presence_penalty": math.nan}, "presence_penalty must be .* got nan"),
        ({"logit_bias": {1: math.inf}}, "logit_bias must be from -100 to 100, got inf for token id 1"),
        ({"logit_bias": {1: math.nan}}, "logit_bias must be .* got nan"),
        ({"logit_bias": {VOCAB: 1.0}}, f"token ids of logit_bias must be in 0..{VOCAB - 1}, got {VOCAB}"),
        ({"min_tokens": 9}, r"min_tokens must be at most max_tokens \(8\), got 9"),
        ({"min_tokens": 1, "stop_token_ids": range(VOCAB)}, "min_tokens must be 0 if every token is a stop"),
        ({"logprobs": 21}, "logprobs must be from 0 to 20, got 21"),
        ({"prompt_logprobs": 4000}, "prompt_logprobs must be .* got 4000"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestRefused, match=told) as caught:
        ValidatedSamplingParams.from_proto(asked(**fields), vocab_size=VOCAB)
    assert caught.value.code == "bad_sampling"


def test_the_smallest_repetition_penalty_keeps_logits_finite() -> None:
    sampling = ValidatedSamplingParams.from_proto(asked(repetition_penalty=5e-324), vocab_size=VOCAB)
    assert np.isfinite(np.float32(1e4) / np.float32(sampling.repetition_penalty))
