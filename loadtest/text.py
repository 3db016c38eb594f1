"""The text of a block id: English that is the same for ever for one (seed, id), as ids of the model's own tokenizer.

Trace ids are of chained hashes: an equal id means an equal prefix. A text that depends on the id alone therefore gives
equal prompts exactly where the trace had them. Pure apart from the tokenizer.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadtest.errors import PromptPlanError

TokenIds = NDArray[np.int32]

_SLOT = re.compile(r"\{(\w+)\}")
_BATCH = 1024


class Encoder(Protocol):
    """What the text needs of a tokenizer."""

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""


@cache
def _vocabulary() -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Sentence patterns and the word lists that fill their slots (data/words.toml)."""
    data = tomllib.loads(resources.files("loadtest").joinpath("data", "words.toml").read_text())
    return tuple(data["patterns"]), {name: tuple(words.split()) for name, words in data["words"].items()}


def sentence(rng: Random) -> str:
    """One English sentence."""
    patterns, words = _vocabulary()

    def fill(slot: re.Match[str]) -> str:
        name = slot[1]
        word = rng.choice(words[name.lower()])
        return word.capitalize() if name[0].isupper() else word

    return _SLOT.sub(fill, rng.choice(patterns))


def block_text(seed: int, block_id: int, num_words: int) -> str:
    """At least `num_words` words of sentences, with a space before the first: determined by (seed, block_id), and the
    text for fewer words is a prefix of that for more."""
    digest = hashlib.blake2b(f"{seed}:{block_id}".encode(), digest_size=16).digest()
    rng = Random(int.from_bytes(digest, "little"))
    sentences: list[str] = []
    count = 0
    while count < num_words:
        sentences.append(sentence(rng))
        count += sentences[-1].count(" ") + 1
    return " " + " ".join(sentences)


class TextBook:
    """Token ids per block id, each exactly `tokens_per_block` long; made once per id and kept."""

    def __init__(self, encoder: Encoder, *, tokens_per_block: int, seed: int) -> None:
        self._encoder = encoder
        self._tokens_per_block = tokens_per_block
        self._seed = seed
        self._blocks: dict[int, TokenIds] = {}

    def prepare(self, block_ids: Iterable[int]) -> None:
        """Make the blocks of all these ids, in batches."""
        missing = [i for i in dict.fromkeys(block_ids) if i not in self._blocks]
        for start in range(0, len(missing), _BATCH):
            self._make(missing[start : start + _BATCH])

    def block(self, block_id: int) -> TokenIds:
        """int32 [tokens_per_block], not to be written to."""
        if block_id not in self._blocks:
            self._make([block_id])
        return self._blocks[block_id]

    def _make(self, block_ids: list[int]) -> None:
        # A word is at least one token with any usual tokenizer, so the first round nearly always suffices.
        num_words = self._tokens_per_block
        while block_ids:
            texts = [block_text(self._seed, i, num_words) for i in block_ids]
            short = []
            for block_id, ids in zip(block_ids, self._encoder.encode_all(texts), strict=True):
                if len(ids) < self._tokens_per_block:
                    short.append(block_id)
                    continue
                block = np.array(ids[: self._tokens_per_block], np.int32)
                block.flags.writeable = False
                self._blocks[block_id] = block
            block_ids = short
            num_words *= 2
            if num_words > 64 * self._tokens_per_block + 64:
                raise PromptPlanError(
                    f"the tokenizer makes fewer than {self._tokens_per_block} tokens of {num_words // 2} words"
                )
