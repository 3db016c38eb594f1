"""Questions for lm-eval: notes that state facts, a question, and the beginning of the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.training.facts import Fact, draw_fact, values_of

STATED = 4
CHOICES = 4
SEED = 11


@dataclass(frozen=True)
class FactQuestion:
    """Multiple-choice question. `choices[answer]` is correct; choices start with a space."""

    context: str
    choices: tuple[str, ...]
    answer: int


def draw_question(rng: np.random.Generator) -> FactQuestion:
    """Draw a question about one of several facts never stated in training; wrong choices are other values."""
    facts: dict[tuple[str, str], Fact] = {}
    while len(facts) < STATED:
        fact = draw_fact(rng, taken=set(facts), held_out=True)
        if fact is not None:
            facts[fact.key] = fact
    asked = list(facts.values())[int(rng.integers(STATED))]
    others = [value for value in values_of(asked.attribute) if value != asked.value]
    wrong = [str(value) for value in rng.choice(others, CHOICES - 1, replace=False)]
    answer = int(rng.integers(CHOICES))
    values = [*wrong[:answer], asked.value, *wrong[answer:]]
    notes = [fact.answer_stem + fact.answer_value for fact in facts.values()]
    context = "\n".join([*notes, asked.question, asked.answer_stem])
    return FactQuestion(context, tuple(f" {value}." for value in values), answer)


def write_questions(path: Path, count: int) -> list[FactQuestion]:
    """Write `count` questions to a JSONL file and return them; they are the same in every run."""
    rng = np.random.default_rng(SEED)
    questions = [draw_question(rng) for _ in range(count)]
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            row = {"context": question.context, "choices": question.choices, "answer": question.answer}
            file.write(json.dumps(row) + "\n")
    return questions
