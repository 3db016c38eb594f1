"""Builder of a window: token ids and the loss weight of each.

A window is a chat, with role markers, or plain text, in which messages are lines.
"""

from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe

ANSWER_WEIGHT = 4.0
"""Loss weight of what only the context provides."""


@dataclass
class Transcript:
    """Token ids and weights so far; they begin with BOS, like every prompt."""

    rng: np.random.Generator
    tokenizer: Tokenizer
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

    def answer(self, stem: str, known_from_context: str) -> None:
        self.open(bpe.ASSISTANT_ID)
        self.text(stem)
        self.text(known_from_context, ANSWER_WEIGHT)
        self.close()

    def pick(self, choices: tuple[str, ...]) -> str:
        return choices[int(self.rng.integers(len(choices)))]
