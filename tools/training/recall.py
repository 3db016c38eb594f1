"""Recall windows: facts, filler and questions at random distances, in one form of sentence."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.corpus import Corpus
from tools.training.facts import Fact, draw_fact
from tools.training.transcript import ANSWER_WEIGHT, Transcript, complete
from tools.training.words import ATTRIBUTES, GREETINGS, NAMES, SYSTEM_PROMPTS

CHAT_SHARE = 0.75
_LISTABLE = (*NAMES, *(value for values in ATTRIBUTES.values() for value in values))


@dataclass(kw_only=True)
class Recall(Transcript):
    """Builder of a recall window of at least ``length`` tokens."""

    length: int
    facts: list[Fact] = field(default_factory=list)
    listed: str = ""

    def state(self) -> None:
        """Add a message with one to three new facts."""
        taken = {fact.key for fact in self.facts}
        drawn = list[Fact]()
        for _ in range(int(self.rng.integers(1, 4))):
            fact = draw_fact(self.rng, taken=taken, held_out=False)
            if fact is not None:
                taken.add(fact.key)
                drawn.append(fact)
        self.facts += drawn
        self.message(bpe.USER_ID, " ".join(fact.answer_stem + fact.answer_value for fact in drawn))
        self.acknowledge()

    def ask(self) -> None:
        """Add a question about a random fact stated so far, and its answer."""
        if not self.facts:
            self.state()
        fact = self.facts[int(self.rng.integers(len(self.facts)))]
        self.message(bpe.USER_ID, fact.question)
        self.answer(fact.answer_stem, fact.answer_value)

    def state_list(self) -> None:
        """Add a list of four to ten words; `ask_list` refers to the last list stated."""
        words = self.rng.choice(_LISTABLE, size=int(self.rng.integers(4, 11)), replace=False)
        self.listed = f" {' '.join(words)}."
        self.message(bpe.USER_ID, f"The list is{self.listed}")
        self.acknowledge()

    def ask_list(self) -> None:
        """Add a question about the list, and its answer."""
        if not self.listed:
            self.state_list()
        self.message(bpe.USER_ID, "What is the list?")
        self.answer("The list is", self.listed)

    def echo(self) -> None:
        """Add a span and its immediate repetition."""
        span = self.corpus.filler(self.rng, int(self.rng.integers(8, 25)))
        self.open(bpe.USER_ID)
        self.text("Repeat:")
        self.tokens(span)
        self.close()
        self.open(bpe.ASSISTANT_ID)
        self.text("Repeat:")
        self.tokens(span, ANSWER_WEIGHT / 2)
        self.close()

    def greet(self) -> None:
        """Add a greeting and its reply."""
        greeting, reply = GREETINGS[int(self.rng.integers(len(GREETINGS)))]
        self.message(bpe.USER_ID, greeting)
        self.message(bpe.ASSISTANT_ID, reply)


_TURNS: tuple[tuple[float, Callable[[Recall], None]], ...] = (
    (0.17, Recall.state),
    (0.48, Recall.ask),
    (0.13, lambda window: window.fill(longest=window.length / 3)),
    (0.06, Recall.state_list),
    (0.07, Recall.ask_list),
    (0.06, Recall.echo),
    (0.03, Recall.greet),
)


def recall_window(
    rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[float]]:
    """Return ``length`` ids and weights of facts, filler and questions at random distances."""
    chat = bool(rng.random() < CHAT_SHARE)
    window = Recall(rng=rng, tokenizer=tokenizer, chat=chat, corpus=corpus, length=length)
    if window.chat and rng.random() < 0.5:
        window.message(bpe.SYSTEM_ID, window.pick(SYSTEM_PROMPTS))
    return complete(window, _TURNS, length)
