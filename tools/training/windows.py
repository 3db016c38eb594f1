"""Training windows: text from the token files, recall windows of facts, filler and questions, and copy windows.

Every window starts with BOS, like every prompt. Each token has a loss weight, which is larger for the parts of answers
that only the context provides.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.facts import Fact, draw_fact
from tools.training.sources import SOURCES
from tools.training.words import ACKNOWLEDGEMENTS, ATTRIBUTES, GREETINGS, NAMES, SYSTEM_PROMPTS

ANSWER_WEIGHT = 4.0
RECALL_SHARE = 0.4
CHAT_SHARE = 0.75
_LISTABLE = (*NAMES, *(value for values in ATTRIBUTES.values() for value in values))


@dataclass(frozen=True)
class Corpus:
    """Tokens of every source of one split; ``shares`` sum to 1 in the order of ``tokens``."""

    tokens: tuple[np.ndarray, ...]
    shares: tuple[float, ...]

    @classmethod
    def load(cls, folder: Path, split: str) -> "Corpus":
        """Memory-map ``{source}.{split}.npy`` of every source."""
        arrays = tuple(np.load(folder / f"{source.name}.{split}.npy", mmap_mode="r") for source in SOURCES)
        return cls(arrays, tuple(source.share for source in SOURCES))

    def span(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return ``length`` consecutive tokens of a random source."""
        tokens = self.tokens[rng.choice(len(self.tokens), p=self.shares)]
        start = int(rng.integers(len(tokens) - length))
        return [int(token) for token in tokens[start : start + length]]

    def filler(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return a span without end-of-document tokens, for use inside a message."""
        return [token for token in self.span(rng, length) if token != bpe.EOS_ID]


@dataclass
class Recall:
    """Builder of a recall window: token ids and their loss weights."""

    rng: np.random.Generator
    corpus: Corpus
    tokenizer: Tokenizer
    chat: bool
    length: int
    ids: list[int] = field(default_factory=lambda: [bpe.BOS_ID])
    weights: list[float] = field(default_factory=lambda: [1.0])
    facts: list[Fact] = field(default_factory=list)
    listed: str = ""

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

    def pick(self, choices: tuple[str, ...]) -> str:
        return choices[int(self.rng.integers(len(choices)))]

    def answer(self, stem: str, known_from_context: str) -> None:
        self.open(bpe.ASSISTANT_ID)
        self.text(stem)
        self.text(known_from_context, ANSWER_WEIGHT)
        self.close()

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

    def fill(self) -> None:
        """Add a message of filler text, of log-uniform length up to a third of the window."""
        length = int(np.exp(self.rng.uniform(np.log(12), np.log(self.length / 3))))
        self.open(bpe.USER_ID)
        self.text("Read this: ")
        self.tokens(self.corpus.filler(self.rng, length))
        self.close()
        self.acknowledge()

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
    (0.13, Recall.fill),
    (0.06, Recall.state_list),
    (0.07, Recall.ask_list),
    (0.06, Recall.echo),
    (0.03, Recall.greet),
)


def recall_window(
    rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, length: int
) -> tuple[list[int], list[float]]:
    """Return ``length`` ids and weights of facts, filler and questions at random distances."""
    window = Recall(rng, corpus, tokenizer, chat=bool(rng.random() < CHAT_SHARE), length=length)
    if window.chat and rng.random() < 0.5:
        window.message(bpe.SYSTEM_ID, window.pick(SYSTEM_PROMPTS))
    chances = [chance for chance, _ in _TURNS]
    while len(window.ids) < length:
        _TURNS[int(rng.choice(len(_TURNS), p=chances))][1](window)
    return window.ids[:length], window.weights[:length]


def copy_window(rng: np.random.Generator, corpus: Corpus, length: int) -> list[int]:
    """Return repetitions of a span of 8 to 128 tokens, shuffled in half of the windows; these teach copying quickly."""
    span = np.array(corpus.span(rng, int(np.exp(rng.uniform(np.log(8), np.log(128))))))
    if rng.random() < 0.5:
        rng.shuffle(span)
    return [bpe.BOS_ID, *(int(token) for token in np.resize(span, length - 1))]


def batch(
    rng: np.random.Generator, corpus: Corpus, tokenizer: Tokenizer, *, windows: int, context: int, copy_share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, targets (int64) and target weights (float32), each [windows, context].

    The fraction ``copy_share`` are copy windows; of the others, RECALL_SHARE are recall windows and the rest is text.
    """
    ids = np.empty((windows, context + 1), np.int64)
    weights = np.ones((windows, context + 1), np.float32)
    for row in range(windows):
        if rng.random() < copy_share:
            ids[row] = copy_window(rng, corpus, context + 1)
        elif rng.random() < RECALL_SHARE:
            ids[row], weights[row] = recall_window(rng, corpus, tokenizer, context + 1)
        else:
            ids[row] = [bpe.BOS_ID, *corpus.span(rng, context)]
    return ids[:, :-1], ids[:, 1:], weights[:, 1:]
