"""Log-probabilities: values, ranks and the likeliest, against torch and a stable sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingError, log_probs


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([1, 3, 40, 513]), count=st.integers(0, 5), grain=st.sampled_from([0, 3]))
def test_values_ranks_and_likeliest(data, vocab, count, grain):
    """`grain` 0 rounds the logits to whole numbers: many are equal."""
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    logits = (rng.normal(size=(count, vocab)) * 3).round(grain).astype(np.float32)
    ids = rng.integers(0, vocab, count)
    num_top = data.draw(st.integers(0, min(vocab, 20)))
    found = log_probs(torch.from_numpy(logits), ids, num_top)
    expected = torch.log_softmax(torch.from_numpy(logits), dim=1).numpy()
    assert np.array_equal(found.logprobs, expected[np.arange(count), ids])
    assert found.top_ids.shape == found.top_logprobs.shape == (count, num_top)
    for i in range(count):
        order = np.lexsort((np.arange(vocab), -expected[i]))
        assert order[found.ranks[i] - 1] == ids[i]
        assert np.array_equal(found.top_ids[i], order[:num_top])
        assert np.array_equal(found.top_logprobs[i], expected[i][order[:num_top]])


def test_many_rows_are_looked_at_in_slices(monkeypatch):
    logits = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    ids = np.arange(50)
    whole = log_probs(logits, ids, 5)
    monkeypatch.setattr("engine.logprobs._SLICE_VALUES", 700)
    sliced = log_probs(logits, ids, 5)
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(whole, name), getattr(sliced, name))


@pytest.mark.parametrize(("ids", "num_top"), [([0], 0), ([0, 1], 6), ([0, 1], -1)])
def test_what_does_not_fit_is_refused(ids, num_top):
    with pytest.raises(SamplingError, match=f"got {len(ids)} ids and num_top {num_top}"):
        log_probs(torch.zeros(2, 5), np.array(ids), num_top)
