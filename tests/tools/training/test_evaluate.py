"""The measures themselves."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tools.training.evaluate import DISTANCES, Question, build_question, is_exact, text_losses
from tools.training.model import Llama, ModelShape
from tools.training.windows import Corpus

TINY = ModelShape(layers=1, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, positions=64)


@pytest.fixture
def model() -> Llama:
    made = Llama(TINY)
    made.initialise(4)
    return made.eval()


def test_an_answer_is_exact_when_every_token_is_the_greedy_one(model: Llama) -> None:
    prompt, ids = [0, 40, 50, 60], [0, 40, 50, 60]
    with torch.no_grad():
        for _ in range(5):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    assert is_exact(model, Question(prompt, ids[4:], 0))
    assert not is_exact(model, Question(prompt, [*ids[4:8], (ids[8] + 1) % 2048], 0))


@pytest.mark.parametrize("distance", DISTANCES)
def test_the_fact_stands_at_the_asked_distance(distance: int, cache: Path, tokenizer: Tokenizer) -> None:
    corpus = Corpus.load(cache / "data", "held")
    rng = np.random.default_rng(distance)
    question = build_question(rng, corpus, tokenizer, distance=distance, same_attribute=True, stated=True)
    value = question.answer[len(tokenizer.encode("The colour of Mira is", add_special_tokens=False).ids) :]
    stated_at = next(
        at for at in range(len(question.prompt)) if question.prompt[at : at + len(question.answer)] == question.answer
    )
    assert question.distance == pytest.approx(len(question.prompt) - stated_at, abs=len(value) + 2)
    assert distance - 10 <= question.distance <= max(distance, 140) + 10
    assert len(question.prompt) + len(question.answer) <= max(2048, distance + 296)


def test_the_control_does_not_hold_the_answer(cache: Path, tokenizer: Tokenizer) -> None:
    corpus = Corpus.load(cache / "data", "held")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        question = build_question(rng, corpus, tokenizer, distance=96, same_attribute=False, stated=False)
        assert tokenizer.decode(question.answer) not in tokenizer.decode(question.prompt)


def test_losses_cover_every_position_of_every_window(model: Llama) -> None:
    tokens = np.arange(200, dtype=np.uint16) + 6
    losses = text_losses(model, tokens, windows=3)
    assert losses.shape == (3, 63)
    assert losses.mean() == pytest.approx(np.log(2048), abs=0.6)
