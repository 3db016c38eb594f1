"""Builder of a window: token ids and the loss weight of each.

A window is a chat, with role markers, or plain text, in which messages are lines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.words import ACKNOWLEDGEMENTS

ANSWER_WEIGHT = 4.0
"""Loss weight of what only the context provides."""


@dataclass
class Transcript:
    """Token ids and weights so far; they begin with BOS, like every prompt."""

    rng: np.random.Generator
    tokenizer: Tokenizer
    corpus: Corpus
    chat: bool
    ids: list[int] = field(default_factory=lambda: [bpe.BOS_ID])
    weights: list[float] = field(default_factory=lambda: [1.0])

    def text(self, text: str, weight: float = 1.0) -> None:
        self.tokens(bpe.encode(self.tokenizer, text), weight)

    def tokens(self, ids: list[int], weight: float = 1.0) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def open(self, role: int) -> None:
        if self.chat:
            self.tokens([role])

    def close(self) -> None:
        self.tokens([bpe.EOS_ID] if self.chat else bpe.encode(self.tokenizer, "\n"))

    def message(self, role: int, text: str) -> None:
        self.open(role)
        self.text(text)
        self.close()

    def acknowledge(self) -> None:
        if self.chat:
            self.message(bpe.ASSISTANT_ID, self.pick(ACKNOWLEDGEMENTS))

    def fill(self, longest: float) -> None:
        """Add a message of filler text, of log-uniform length from 12 to ``longest``."""
        length = int(np.exp(self.rng.uniform(np.log(12), np.log(longest))))
        self.open(bpe.USER_ID)
        self.text("Read this: ")
        self.tokens(self.corpus.filler(self.rng, length))
        self.close()
        self.acknowledge()

    def answer(self, stem: str, known_from_context: str) -> None:
        self.open(bpe.ASSISTANT_ID)
        self.text(stem)
        self.text(known_from_context, ANSWER_WEIGHT)
        self.close()

    def pick(self, choices: tuple[str, ...]) -> str:
        return choices[int(self.rng.integers(len(choices)))]


T = TypeVar("T", bound=Transcript)


def complete(
    window: T, turns: Sequence[tuple[float, Callable[[T], None]]], length: int
) -> tuple[list[int], list[float]]:
    """Add turns, drawn by their chances, until there are ``length`` tokens; return as many ids and weights."""
    chances = [chance for chance, _ in turns]
    while len(window.ids) < length:
        turns[int(window.rng.choice(len(turns), p=chances))][1](window)
    return window.ids[:length], window.weights[:length]
