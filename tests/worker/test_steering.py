"""Steering of a sequence follows from its ids alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool_proto.v1.common_pb2 import Sampling as SamplingProto
from moonpool_proto.v1.worker_pb2 import FINISH_NONE
from worker.sampling import ValidatedSamplingParams
from worker.steering import Steering

VOCAB = 20


class OnlyTheEnd:
    """A grammar that admits the end and nothing else."""

    finish = FINISH_NONE
    end_ids = frozenset({1})

    def allowed(self) -> Any:
        return np.arange(VOCAB) == 1


def sampling(**fields: Any) -> ValidatedSamplingParams:
    return ValidatedSamplingParams.from_proto(
        SamplingProto(**({"top_p": 1.0, "max_tokens": 50} | fields)), vocab_size=VOCAB
    )


def steering(asked: ValidatedSamplingParams, ids: list[int], generated: int, matcher: Any = None) -> Steering:
    prompt = np.array(ids, np.int32)
    return Steering(asked, prompt, generated, capacity=len(ids) + 50, vocab_size=VOCAB, matcher=matcher)


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12),
    answer=st.lists(st.integers(0, VOCAB - 1), max_size=40),
    data=st.data(),
)
def test_counts_are_the_same_wherever_the_answer_is_split(prompt: list[int], answer: list[int], data: Any) -> None:
    split = data.draw(st.integers(0, len(answer)))
    repetition = data.draw(st.sampled_from([1.0, 1.5]))
    asked = sampling(repetition_penalty=repetition, frequency_penalty=0.5)
    moved = steering(asked, prompt + answer[:split], split)
    for token in answer[split:]:
        moved.take(token)
    row = moved.row(len(answer))
    assert row is not None
    assert row.penalties is not None
    expected = {token: answer.count(token) for token in {*(prompt if repetition != 1 else []), *answer}}
    assert dict(zip(row.penalties.ids.tolist(), row.penalties.counts.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, False),
        ({"repetition_penalty": 1.0, "logprobs": 3, "min_p": 0.1}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": 0.1}, True),
        ({"logit_bias": {1: 0.5}}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_plain_requests_are_not_steered(fields: dict[str, Any], wanted: bool) -> None:
    assert Steering.is_wanted(sampling(**fields)) == wanted


def test_stop_tokens_are_barred_until_so_many_tokens_are_there() -> None:
    one = steering(sampling(min_tokens=2, stop_token_ids=[5, 3, 400]), [7], 0)
    barred = [
        row.barred.tolist() if row is not None and row.barred is not None else None for row in map(one.row, range(3))
    ]
    assert barred == [[3, 5], [3, 5], None]


def test_a_grammar_that_admits_only_the_end_comes_before_min_tokens() -> None:
    row = steering(sampling(min_tokens=9, stop_token_ids=[1]), [7], 0, OnlyTheEnd()).row(0)
    assert row is not None
    assert row.barred is None
