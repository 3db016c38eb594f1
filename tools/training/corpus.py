"""Token files of the text sources, and spans of them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.training import tokenizer as bpe
from tools.training.sources import SOURCES

DEFINITIONS_FILE = "definitions.json"
LINES_SPAN = 400
"""Tokens among which whole lines are looked for."""


@dataclass(frozen=True)
class Corpus:
    """Tokens of every source of one split; ``shares`` sum to 1 in the order of ``tokens``."""

    tokens: tuple[np.ndarray, ...]
    shares: tuple[float, ...]
    definitions: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, folder: Path, split: str) -> "Corpus":
        """Memory-map ``{source}.{split}.npy`` of every source, and read the definitions, which have no splits."""
        arrays = tuple(np.load(folder / f"{source.name}.{split}.npy", mmap_mode="r") for source in SOURCES)
        definitions = json.loads((folder / DEFINITIONS_FILE).read_text())
        return cls(arrays, tuple(source.share for source in SOURCES), tuple((noun, text) for noun, text in definitions))

    def span(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return ``length`` consecutive tokens of a random source."""
        tokens = self.tokens[rng.choice(len(self.tokens), p=self.shares)]
        start = int(rng.integers(len(tokens) - length))
        return [int(token) for token in tokens[start : start + length]]

    def filler(self, rng: np.random.Generator, length: int) -> list[int]:
        """Return a span without end-of-document tokens, for use inside a message."""
        return [token for token in self.span(rng, length) if token != bpe.EOS_ID]

    def lines(self, rng: np.random.Generator, tokenizer: Tokenizer, source: str, count: int) -> list[str]:
        """Return up to ``count`` whole lines of one document of a source."""
        tokens = self.tokens[[each.name for each in SOURCES].index(source)]
        start = int(rng.integers(len(tokens) - LINES_SPAN))
        text: str = tokenizer.decode(tokens[start : start + LINES_SPAN].tolist(), skip_special_tokens=False)
        return text.split(bpe.EOS)[0].split("\n")[1:-1][:count]
