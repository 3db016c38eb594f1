"""The nano model: trained weights small enough for unit tests, which answer from the cache or not at all."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from engine import ForwardBatch, Model, PagedCache, SequenceChunk, load_model
from tools.training.facts import Fact, draw_fact

ROOT = Path(__file__).parents[2]
NANO = ROOT / "tests" / "data" / "nano-model"
BLOCK_TOKENS = 8
CHUNK_TOKENS = 24
NUM_QUESTIONS = 40


@dataclass(frozen=True)
class Question:
    """Token ids; the asked fact's value stands in the prompt at `value_at`."""

    prompt: list[int]
    answer: list[int]
    value_at: int


@pytest.fixture(scope="module")
def nano() -> Model:
    return load_model(NANO, threads=1)


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    """Chats that state three facts which training never stated, and ask for the first."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    rng = np.random.default_rng(5)
    return [question(tokenizer, rng) for _ in range(NUM_QUESTIONS)]


def question(tokenizer: Tokenizer, rng: np.random.Generator) -> Question:
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < 3:
        fact = draw_fact(rng, taken=set(facts), held_out=True)
        if fact is not None:
            facts[fact.key] = fact
    asked = next(iter(facts.values()))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    stem = ids("<|bos|><|user|>" + asked.answer_stem)
    rest = " ".join(fact.answer_stem + fact.answer_value for fact in list(facts.values())[1:])
    told = ids(f" {rest}<|eos|><|assistant|>Understood.<|eos|><|user|>{asked.question}<|eos|><|assistant|>")
    value = ids(asked.answer_value)
    return Question([*stem, *value, *told], [*ids(asked.answer_stem), *value], len(stem))


def answer(model: Model, question: Question, *, damage: bool) -> list[int]:
    """Greedy, through a paged cache whose slots are out of order; with `damage` the value's block is zeroed first."""
    total = len(question.prompt) + len(question.answer)
    blocks = -(-total // BLOCK_TOKENS)
    cache = PagedCache(model.kv_groups, [blocks] * len(model.kv_groups), BLOCK_TOKENS)
    slots = np.random.default_rng(total).permutation(blocks).astype(np.int32)
    prompt = np.array(question.prompt, np.int32)

    def step(tokens: np.ndarray, start: int) -> int:
        chunk = SequenceChunk(tokens, start, (slots,) * len(model.kv_groups), True)
        return int(model.forward(ForwardBatch([chunk]), cache)[0].argmax())

    last = len(prompt) - 1
    for start in range(0, last, CHUNK_TOKENS):
        step(prompt[start : min(start + CHUNK_TOKENS, last)], start)
    if damage:
        cache.views[0][slots[question.value_at // BLOCK_TOKENS]] = 0
    said = [step(prompt[last:], last)]
    while len(said) < len(question.answer):
        said.append(step(np.array(said[-1:], np.int32), last + len(said)))
    return said


def test_it_is_the_recorded_file_and_small() -> None:
    weights = (NANO / "model.safetensors").read_bytes()
    assert len(weights) < 500_000
    assert hashlib.sha256(weights).hexdigest() in (ROOT / "tools" / "training" / "README.md").read_text()
    for name in ("LICENSE", "NOTICE", "record.json"):
        assert (NANO / name).is_file()


def test_transformers_gives_the_same_logits(nano: Model) -> None:
    theirs = LlamaForCausalLM.from_pretrained(NANO, dtype=torch.float32).eval()
    ids = np.random.default_rng(2).integers(6, 2048, 300).astype(np.int32)
    with torch.inference_mode():
        expected = theirs(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
    np.testing.assert_allclose(nano.score(ids), expected, rtol=1e-4, atol=1e-4)


def test_it_answers_from_the_cache(nano: Model, questions: list[Question]) -> None:
    right = sum(answer(nano, one, damage=False) == one.answer for one in questions)
    assert right >= 0.9 * len(questions)


def test_a_damaged_block_shows_in_the_answers(nano: Model, questions: list[Question]) -> None:
    right = sum(answer(nano, one, damage=True) == one.answer for one in questions)
    assert right <= 0.2 * len(questions)
