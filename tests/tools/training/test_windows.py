"""Facts and training windows."""

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.facts import Fact, draw_fact
from tools.training.recall import recall_window
from tools.training.transcript import ANSWER_WEIGHT
from tools.training.windows import Mixture, batch, copy_window
from tools.training.words import ATTRIBUTES, NAMES

MIXTURE = Mixture(reading=0.4, recall=0.3, copy=0.2)


@pytest.fixture
def corpus(cache: Path) -> Corpus:
    return Corpus.load(cache / "data", "train")


def test_training_never_states_a_held_out_fact(corpus: Corpus, tokenizer: Tokenizer) -> None:
    for seed in range(8):
        ids, _ = recall_window(np.random.default_rng(seed), corpus, tokenizer, 600)
        for attribute, name, value in re.findall(r"The (\w+) of (\w+) is (\w+)\.", tokenizer.decode(ids)):
            assert not Fact(attribute, name, value).held_out


def test_a_full_table_of_facts_gives_none() -> None:
    taken = {(attribute, name) for attribute in ATTRIBUTES for name in NAMES}
    assert draw_fact(np.random.default_rng(0), taken=taken, held_out=False) is None


def test_every_fact_has_one_value_within_a_window(corpus: Corpus, tokenizer: Tokenizer) -> None:
    ids, _ = recall_window(np.random.default_rng(5), corpus, tokenizer, 1500)
    values: dict[tuple[str, str], set[str]] = {}
    for attribute, name, value in re.findall(r"The (\w+) of (\w+) is (\w+)\.", tokenizer.decode(ids)):
        values.setdefault((attribute, name), set()).add(value)
    assert len(values) > 10
    assert {len(found) for found in values.values()} == {1}


def test_heavy_tokens_of_an_answer_are_its_value(corpus: Corpus, tokenizer: Tokenizer) -> None:
    ids, weights = recall_window(np.random.default_rng(11), corpus, tokenizer, 800)
    runs, run = [], list[int]()
    for token, weight in zip(ids, weights, strict=True):
        if weight == ANSWER_WEIGHT:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    known = {value for values in ATTRIBUTES.values() for value in values} | {str(n) for n in range(100)} | set(NAMES)
    assert len(runs) > 10
    assert all(set(text.strip().removesuffix(".").split()) <= known for text in runs)


def test_windows_begin_with_bos_and_targets_are_shifted(corpus: Corpus, tokenizer: Tokenizer) -> None:
    inputs, targets, weights = batch(
        np.random.default_rng(1), corpus, tokenizer, windows=6, context=96, mixture=MIXTURE
    )
    assert inputs.shape == targets.shape == weights.shape == (6, 96)
    assert (inputs[:, 0] == bpe.BOS_ID).all()
    assert not (inputs[:, 1:] == bpe.BOS_ID).any()
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])


def test_a_batch_depends_on_its_seed_alone(corpus: Corpus, tokenizer: Tokenizer) -> None:
    first, again, other = (
        batch(np.random.default_rng((20, step)), corpus, tokenizer, windows=3, context=64, mixture=MIXTURE)[0]
        for step in (4, 4, 5)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_copy_window_repeats_its_span(corpus: Corpus) -> None:
    for seed in range(6):
        ids = copy_window(np.random.default_rng(seed), corpus, 600)
        assert len(ids) == 600
        assert any(ids[1 + period :] == ids[1:-period] for period in range(8, 129))
