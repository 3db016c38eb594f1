"""Choices by bounds, which GPUs make, are those of the scores of all ids, bit for bit. On machines without a GPU the
kernels run in Triton's interpreter.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingRow
from engine.sampling import choose_by_tensors, queue_by_bounds

pytest.importorskip("triton", reason="Triton is not installed: `make test` installs it")
from engine import device_sampling, sampling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's of infinity and NaN
]


def assert_equal(logits: torch.Tensor, rows: list[SamplingRow]) -> None:
    logits = logits.to(DEVICE)
    (ids, scores), (want_ids, want_scores) = (queue_by_bounds(logits, rows).read(), choose_by_tensors(logits, rows))
    want_ids, want_scores = want_ids.cpu(), want_scores.cpu()
    sound = want_scores.isfinite()
    assert torch.equal(scores.isfinite(), sound)
    assert torch.equal(ids[sound], want_ids[sound])
    assert torch.equal(scores[sound], want_scores[sound])


@st.composite
def drawn_rows(draw: st.DrawFn, vocab: int) -> SamplingRow:
    word = st.integers(0, 2**32 - 1)
    return SamplingRow(
        temperature=draw(st.just(0.0) | st.floats(0.05, 4.0) | st.sampled_from([1e-60, 1e-3, 300.0, 1e300])),
        top_p=draw(st.just(1.0) | st.floats(0.01, 1.0)),
        top_k=draw(st.just(0) | st.integers(0, 2 * vocab)),
        min_p=draw(st.just(0.0) | st.floats(0.0, 1.0)),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(word),
        index=draw(word),
    )


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    vocab=st.sampled_from([1, 2, 7, 300, 2001]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 60.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_choices_by_bounds_are_those_of_all_scores(data, vocab, spread, dtype):
    rows = data.draw(st.lists(drawn_rows(vocab), min_size=1, max_size=4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = torch.from_numpy((rng.normal(size=(len(rows), vocab)) * spread).round(1).astype(np.float32)).to(dtype)
    logits[0, data.draw(st.integers(1, vocab)) :] = -torch.inf  # as a grammar leaves them
    damage = data.draw(st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]))
    if damage is not None:
        logits[-1, data.draw(st.integers(0, vocab - 1)) :] = damage
    assert_equal(logits, rows)


HOW = {
    "plain": {},
    "cool": {"temperature": 0.3},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 40},
    "min-p": {"min_p": 0.05},
    "all": {"top_p": 0.95, "top_k": 300, "min_p": 0.01, "temperature": 0.7},
}


def logits_of_a_model(rows: int, vocab: int) -> torch.Tensor:
    """Return logits like those of a language model: a few likely ids above many unlikely ones."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    likely = torch.randint(0, vocab, (rows, 30), generator=generator)
    return logits.scatter(1, likely, 12 + 3 * torch.randn(rows, 30, generator=generator))


@pytest.mark.parametrize("name", HOW)
def test_bounds_are_close_enough_to_decide(name, monkeypatch):
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "choice": 0, "index": 0}
    rows = [SamplingRow(**(plain | HOW[name] | {"index": i})) for i in range(30)]
    logits = logits_of_a_model(len(rows), 20_000).to(DEVICE)
    want, _ = choose_by_tensors(logits, rows)
    monkeypatch.setattr(sampling, "choose_by_tensors", None)  # which rows that are not certain need
    assert torch.equal(queue_by_bounds(logits, rows).read()[0], want.cpu())


@pytest.mark.parametrize("flat", [0.0, -math.inf])
def test_rows_that_bounds_do_not_decide_are_computed_as_a_whole(flat):
    """Ties of more ids than there are candidates."""
    logits = torch.full((1, 5000), flat)
    logits[0, 4000] = 0.0
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 5, "choice": 0, "index": 0}
    for changed in ({}, {"top_p": 0.9}, {"top_k": 2000}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.5}):
        assert_equal(logits, [SamplingRow(**(plain | changed))])


def test_few_candidates_give_the_same(monkeypatch):
    """Bounds decide few rows then."""
    monkeypatch.setattr(device_sampling, "_CANDIDATES", 2)
    monkeypatch.setattr(device_sampling, "_LIKELY", 4)
    rows = [
        SamplingRow(1.0, top_p, top_k, 9, 0, index, min_p)
        for index in range(5)
        for top_p, top_k, min_p in ((1.0, 0, 0.0), (0.5, 0, 0.0), (1.0, 3, 0.0), (1.0, 0, 0.3), (0.9, 4, 0.1))
    ]
    assert_equal(torch.randn(len(rows), 50, generator=torch.Generator().manual_seed(1)).round(decimals=1) * 2, rows)


def test_a_choice_is_read_as_it_was_queued() -> None:
    """Its copy for the host is queued with it, not after what is queued until it is read."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = [SamplingRow(temperature, 1.0, 0, 5, 0, 0) for temperature in (0.0, 1.0, 0.5)]
    want, _ = choose_by_tensors(logits, rows)
    choice = queue_by_bounds(logits, rows)
    choice.ids.fill_(-1), choice.scores.fill_(0.0)
    assert torch.equal(choice.read()[0], want.cpu())
