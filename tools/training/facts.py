"""Generated facts and questions about them. Pure; the random generator is an argument.

A fact is (attribute, name) -> value. Every answer repeats the fact as a sentence, so it can be produced by attending to
the position at which the fact was stated; a model that reads a damaged cache answers incorrectly.
"""

import zlib
from dataclasses import dataclass

import numpy as np

from tools.training.words import ATTRIBUTES, NAMES

NUMBERS = tuple(str(number) for number in range(10, 100))
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Fact:
    """Statement that the ``attribute`` of ``name`` is ``value``."""

    attribute: str
    name: str
    value: str

    @property
    def key(self) -> tuple[str, str]:
        return self.attribute, self.name

    @property
    def question(self) -> str:
        return f"What is the {self.attribute} of {self.name}?"

    @property
    def answer_stem(self) -> str:
        """Part of the answer that follows from the question."""
        return f"The {self.attribute} of {self.name} is"

    @property
    def answer_value(self) -> str:
        """Part of the answer that only the context provides; starts with a space."""
        return f" {self.value}."

    @property
    def held_out(self) -> bool:
        """True for the combinations that are never stated in training (one in eight, by hash)."""
        return zlib.crc32(f"{self.attribute}/{self.name}/{self.value}".encode()) % HELD_OUT_ONE_IN == 0


def values_of(attribute: str) -> tuple[str, ...]:
    """Return the possible values of the attribute."""
    return ATTRIBUTES[attribute] or NUMBERS


def draw_fact(rng: np.random.Generator, *, taken: set[tuple[str, str]], held_out: bool) -> Fact | None:
    """Draw a fact whose key is not in ``taken`` and whose ``held_out`` is as given; None after 64 failed draws."""
    attributes = tuple(ATTRIBUTES)
    for _ in range(64):
        attribute = attributes[rng.integers(len(attributes))]
        values = values_of(attribute)
        fact = Fact(attribute, NAMES[rng.integers(len(NAMES))], values[rng.integers(len(values))])
        if fact.key not in taken and fact.held_out == held_out:
            return fact
    return None
