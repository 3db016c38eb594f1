"""Questions for lm-eval: notes that state facts, a question, and the answer begun. Pure but for the file it writes."""

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
    """`choices[answer]` is right; each begins with a space, as in the text."""

    context: str
    choices: tuple[str, ...]
    answer: int


def draw_question(rng: np.random.Generator) -> FactQuestion:
    """Facts that training never stated, one of them asked; the wrong choices are other values of its attribute."""
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
    """The same `count` questions every time, as a JSONL file too."""
    rng = np.random.default_rng(SEED)
    questions = [draw_question(rng) for _ in range(count)]
    with path.open("w", encoding="utf-8") as file:
        for question in questions:
            row = {"context": question.context, "choices": question.choices, "answer": question.answer}
            file.write(json.dumps(row) + "\n")
    return questions
