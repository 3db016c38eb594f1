"""Steering: masks, bias and penalties against a plain reference and against transformers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import Bias, LogitSteering, Penalties, SamplingError, SamplingRow, sample, steer


def ids_of(draw, vocab, most):
    return np.array(sorted(draw(st.sets(st.integers(0, vocab - 1), max_size=most))), np.int64)


@st.composite
def steerings(draw, vocab):
    """Any mixture of what a row may ask for; None with some probability."""
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    number = st.floats(-3, 3, width=32)
    allowed = barred = bias = penalties = None
    if draw(st.booleans()):
        allowed = np.array(draw(st.lists(st.booleans(), min_size=vocab, max_size=vocab)))
    if draw(st.booleans()):
        barred = ids_of(draw, vocab, 3)
    if draw(st.booleans()):
        ids = ids_of(draw, vocab, 4)
        bias = Bias(ids, np.array([draw(number) for _ in ids], np.float32))
    if draw(st.booleans()):
        ids = ids_of(draw, vocab, vocab)
        counts = np.array([draw(st.integers(0, 4)) for _ in ids], np.float32)
        repetition = draw(st.sampled_from([1.0, 0.5, 1.3]))
        penalties = Penalties(ids, counts, repetition, draw(number), draw(number))
    return LogitSteering(allowed, barred, bias, penalties)


def by_reference(logits, row):
    """One row in plain Python over float32 numbers, id by id."""
    f = np.float32
    out = logits.copy()
    for i in range(len(out)):
        if row.allowed is not None and not row.allowed[i]:
            out[i] = -np.inf
        if row.barred is not None and i in row.barred:
            out[i] = -np.inf
        if row.bias is not None and i in row.bias.ids:
            out[i] += row.bias.values[list(row.bias.ids).index(i)]
        if row.penalties is not None and i in row.penalties.ids:
            p = row.penalties
            count = p.counts[list(p.ids).index(i)]
            out[i] = out[i] / f(p.repetition) if out[i] > 0 else out[i] * f(p.repetition)
            out[i] -= f(p.frequency) * count
            out[i] -= f(p.presence) if count > 0 else f(0)
    return out


@settings(max_examples=150, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([1, 2, 11]), count=st.integers(0, 4))
def test_rows_are_steered_as_by_the_reference_bit_for_bit(data, vocab, count):
    rows = [data.draw(steerings(vocab)) for _ in range(count)]
    logits = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(count, vocab)).astype(np.float32) * 4
    given_logits = torch.from_numpy(logits.copy())
    out = steer(given_logits, rows).numpy()
    assert np.array_equal(given_logits.numpy(), logits)  # untouched
    for i, row in enumerate(rows):
        assert np.array_equal(out[i], logits[i] if row is None else by_reference(logits[i], row))


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.3, 5.0])
def test_repetition_is_that_of_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)) * 5
    seen = torch.tensor([[3, 7, 7, 9, 49, 3]])
    ids = np.unique(seen.numpy())
    penalties = Penalties(ids, np.zeros(len(ids), np.float32), repetition=penalty)
    mine = steer(logits, [LogitSteering(penalties=penalties)])
    assert torch.equal(mine, RepetitionPenaltyLogitsProcessor(penalty)(seen, logits))


def test_frequency_counts_and_presence_does_not():
    logits = torch.zeros(1, 4)
    penalties = Penalties(np.array([1, 2, 3]), np.array([0, 1, 3], np.float32), frequency=0.5, presence=0.25)
    assert steer(logits, [LogitSteering(penalties=penalties)]).tolist() == [[0.0, 0.0, -0.75, -1.75]]


def test_bias_comes_before_penalties():
    """As in vLLM: what a bias has made positive is divided."""
    ids = np.array([0])
    row = LogitSteering(
        bias=Bias(ids, np.array([10], np.float32)), penalties=Penalties(ids, np.zeros(1, np.float32), 2.0)
    )
    assert steer(torch.tensor([[-2.0, 1.0]]), [row]).tolist() == [[4.0, 1.0]]


def test_no_bias_lifts_what_is_excluded():
    row = LogitSteering(
        allowed=np.array([False, True, True, True]),
        barred=np.array([1]),
        bias=Bias(np.array([0, 1]), np.array([100, 100], np.float32)),
    )
    logits = steer(torch.zeros(1, 4), [row])
    assert torch.isneginf(logits[0]).tolist() == [True, True, False, False]
    draws = sample(logits.expand(200, -1), [SamplingRow(2.0, 1.0, 0, seed=1, choice=0, index=i) for i in range(200)])
    assert set(draws.tolist()) == {2, 3}


def test_rows_that_ask_for_nothing_cost_nothing():
    logits = torch.zeros(3, 5)
    assert steer(logits, [None] * 3) is logits


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(SamplingError, match=r"0..4, got 2..5"):
        steer(torch.zeros(1, 5), [LogitSteering(barred=np.array([2, 5]))])


def test_rows_and_logits_must_match():
    with pytest.raises(SamplingError, match="2 rows"):
        steer(torch.zeros(2, 5), [None])
