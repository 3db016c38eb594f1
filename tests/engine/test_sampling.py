"""Sampling: known answers of Philox, exact arithmetic, distributions, top-k and top-p against a plain reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingError, SamplingRow, exact_math, noisy_scores, sample
from engine.exact_math import philox4x32
from engine.sampling import choose, choose_by_tensors, gumbel_noise
from engine.sampling_kernels import most_noise

# From Random123's kat_vectors: philox4x32 10 <counter> <key> <expected>
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def row(**changes):
    return SamplingRow(**({"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "choice": 0, "index": 0} | changes))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, expected):
    words = philox4x32(tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key))
    assert [int(word) for word in words] == expected


def test_exact_log_and_exp_agree_with_the_library_to_two_ulp():
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.random(20_000), 1 - 2.0 ** -np.arange(1, 53), 2.0 ** -np.arange(1, 60), [1.0, 36.0]])
    np.testing.assert_array_max_ulp(exact_math.log(torch.from_numpy(x)).numpy(), np.log(x), maxulp=2)
    y = np.concatenate([-rng.random(20_000) * 50, [0.0, -1e-12, -699.0]])
    np.testing.assert_array_max_ulp(exact_math.exp(torch.from_numpy(y)).numpy(), np.exp(y), maxulp=2)
    assert exact_math.exp(torch.tensor([-701.0, -math.inf], dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_noise_is_standard_gumbel():
    noise = gumbel_noise([row(index=i) for i in range(40)], 1001, torch.device("cpu")).numpy()
    assert noise.shape == (40, 1001)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 0.03
    assert abs(noise.var() - math.pi**2 / 6) < 0.06
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 0.02


def test_draws_follow_the_softmax():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0])
    draws = 20_000
    for temperature in (1.0, 0.5):
        rows = [row(temperature=temperature, index=i) for i in range(draws)]
        counts = np.bincount(sample(logits.expand(draws, -1), rows), minlength=5)
        expected = torch.softmax(logits / temperature, 0).numpy() * draws
        assert (((counts - expected) ** 2) / expected).sum() < 20  # chi squared, 4 degrees of freedom: p < 0.0005


def test_seed_choice_and_index_each_change_the_draw():
    logits = torch.zeros(1, 4096)
    variants = [row(), row(seed=8), row(seed=7 + (1 << 32)), row(choice=1), row(index=1)]
    assert len({int(sample(logits, [variant])[0]) for variant in variants}) == len(variants)
    assert sample(logits, [row(seed=7 + (1 << 64))]) == sample(logits, [row()])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), data=st.data())
def test_a_row_does_not_depend_on_its_batch(seed, data):
    rng = np.random.default_rng(seed % 1000)
    rows = [
        row(
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
            top_p=data.draw(st.sampled_from([0.2, 0.9, 1.0])),
            top_k=data.draw(st.sampled_from([0, 1, 5])),
            min_p=data.draw(st.sampled_from([0.0, 0.1])),
            seed=seed,
            index=i,
        )
        for i in range(data.draw(st.integers(1, 5)))
    ]
    logits = torch.from_numpy(rng.normal(size=(len(rows), 97)).astype(np.float32) * 4)
    together = sample(logits, rows)
    assert together.dtype == np.int64
    for i, single in enumerate(rows):
        assert sample(logits[i : i + 1], [single])[0] == together[i]
        assert noisy_scores(logits[i], single).argmax() == together[i]


def test_greedy_takes_the_lowest_of_equal_ids():
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])
    assert sample(logits, [row(temperature=0.0)] * 2).tolist() == [1, 0]
    assert np.array_equal(noisy_scores(logits[0], row(temperature=0.0)), [1.0, 3.0, 3.0])


def kept_by_reference(logits, temperature, top_k, top_p, min_p):
    """Ids by min-p, then top-k, then top-p among them, in plain Python; ties by id."""
    likely = [i for i in range(len(logits)) if math.exp((logits[i] - max(logits)) / temperature) >= min_p]
    order = sorted(likely, key=lambda i: (-logits[i], i))[: top_k or len(logits)]
    weights = [math.exp((logits[i] - logits[order[0]]) / temperature) for i in order]
    kept, reached = set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        if top_p < 1 and kept and reached >= top_p * sum(weights):
            break
        kept.add(i)
        reached += weight
    return kept


@settings(max_examples=150, deadline=None)
@given(
    logits=st.lists(st.integers(-6, 6).map(lambda n: n * 0.75), min_size=1, max_size=40),
    temperature=st.sampled_from([0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.floats(0.01, 0.999).map(lambda p: round(p, 3) + 0.000123) | st.just(1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
def test_ids_are_kept_as_by_the_reference(logits, temperature, top_k, top_p, min_p):
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    scores = noisy_scores(np.array(logits, np.float32), row(**how))
    assert set(np.flatnonzero(np.isfinite(scores))) == kept_by_reference(logits, **how)


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.4, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_min_p_keeps_what_transformers_keeps(min_p, temperature):
    from transformers import MinPLogitsWarper

    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(2)) * 2
    warped = MinPLogitsWarper(min_p)(None, logits / temperature)
    mine = noisy_scores(logits[0], row(temperature=temperature, min_p=min_p))
    assert np.array_equal(np.isfinite(mine), np.isfinite(warped[0].numpy()))


def test_slack_moves_the_border_of_min_p():
    logits = np.log(np.array([0.5, 0.2, 0.1001, 0.0999], np.float32))
    kept = [np.isfinite(noisy_scores(logits, row(min_p=0.2), slack=slack)).sum() for slack in (-0.01, 0.0, 0.01)]
    assert kept == [2, 3, 4]


def test_slack_moves_the_borders_of_top_k_and_top_p():
    logits = np.log(np.array([0.5, 0.3004, 0.1996], np.float32))

    def kept(slack, **how):
        return np.isfinite(noisy_scores(logits, row(**how), slack=slack)).sum()

    assert [kept(s, top_p=0.8) for s in (-0.31, -0.001, 0.0, 0.001)] == [1, 2, 2, 3]
    close = np.array([1.0, 0.5, 0.4995], np.float32)
    for slack, count in ((0.0, 2), (0.001, 3)):
        assert np.isfinite(noisy_scores(close, row(top_k=2), slack=slack)).sum() == count


@given(data=st.data())
def test_slack_covers_errors_that_exchange_ids_at_a_threshold(data: st.DataObject) -> None:
    """An error decides which one of almost equal logits is the last that top-p keeps."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    how = row(
        top_p=data.draw(st.floats(0.1, 0.99)),
        min_p=data.draw(st.floats(0.0, 0.5)),
        top_k=data.draw(st.integers(0, 6)),
        index=data.draw(st.integers(0, 9)),
    )
    logits = rng.integers(0, 3, 12) + rng.uniform(-1e-3, 1e-3, 12)
    damaged = logits + rng.uniform(-1e-3, 1e-3, 12)
    chosen = int(sample(torch.from_numpy(damaged)[None], [how])[0])
    assert noisy_scores(torch.from_numpy(logits), how, slack=2e-3)[chosen] >= (
        noisy_scores(torch.from_numpy(logits), how, slack=-2e-3).max() - 2e-3
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), vocab=st.sampled_from([1, 2, 7, 300, 1025]), spread=st.sampled_from([0.1, 3.0, 60.0]))
def test_compiled_and_tensor_forms_are_equal_bit_for_bit(data, vocab, spread):
    """The tensor form is the reference of `engine.device_sampling`, and what runs on CUDA inside vLLM."""
    word = st.integers(0, 2**32 - 1)
    rows = [
        SamplingRow(
            temperature=data.draw(st.floats(0.05, 4.0)),
            top_p=data.draw(st.floats(0.01, 1.0)),
            top_k=data.draw(st.integers(0, 2 * vocab)),
            min_p=data.draw(st.just(0.0) | st.floats(0.0, 1.0)),
            seed=data.draw(st.integers(0, 2**64 - 1)),
            choice=data.draw(word),
            index=data.draw(word),
        )
        for _ in range(2)
    ]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    logits = torch.from_numpy((rng.normal(size=(2, vocab)) * spread).round(1).astype(np.float32))
    logits[0, data.draw(st.integers(1, vocab)) :] = -torch.inf  # as a grammar leaves them
    for compiled, tensors in zip(choose(logits, rows), choose_by_tensors(logits, rows), strict=True):
        assert torch.equal(compiled, tensors)


def test_ids_that_are_ruled_out_by_a_bound_of_their_noise_could_not_have_won():
    """Many draws, so that some noise lies close to its bound."""
    logits = torch.linspace(0.0, -12.0, 24).repeat(2000, 1)
    rows = [row(index=i, temperature=1.5, seed=3) for i in range(len(logits))]
    ids, scores = choose(logits, rows)
    expected_ids, expected_scores = choose_by_tensors(logits, rows)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(scores, expected_scores)
    assert len(ids.unique()) > 12


@pytest.mark.parametrize("leading_ones", [0, 1, 5, 31, 32])
def test_the_bound_of_the_noise_holds_and_is_close(leading_ones):
    """The largest number with so many leading ones has a noise below the bound, by little more than ln 2 at most."""
    bits = ((1 << 52) - 1) ^ ((1 << (51 - leading_ones)) if leading_ones < 32 else 0)
    high = bits >> 20
    noise = -math.log(-math.log((bits + 0.5) * 2.0**-52))
    assert 0 <= most_noise(np.uint64(high)) - noise < math.log(2) * 1.1


def test_scores_are_in_units_of_logits():
    logits = np.zeros(50, np.float32)
    cool, warm = (noisy_scores(logits, row(temperature=t)) for t in (0.25, 1.0))
    np.testing.assert_allclose(cool * 4, warm)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"index": -1},
        {"choice": 1 << 32},
    ],
)
def test_parameters_out_of_range_are_refused(bad):
    with pytest.raises(SamplingError, match=next(iter(bad))):
        sample(torch.zeros(1, 4), [row(**bad)])


@pytest.mark.parametrize("damage", [math.nan, math.inf])
def test_logits_that_are_not_numbers_are_refused(damage):
    logits = torch.tensor([[0.0, damage, 1.0]])
    for asked in ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1}):
        with pytest.raises(SamplingError, match="NaN"):
            sample(logits, [row(**asked)])


def test_a_row_of_which_everything_is_excluded_is_refused():
    with pytest.raises(SamplingError, match="NaN"):
        sample(torch.full((1, 4), -torch.inf), [row(temperature=0.0)])


def test_rows_and_logits_must_match():
    with pytest.raises(SamplingError, match="2 rows"):
        sample(torch.zeros(1, 4), [row(), row()])
