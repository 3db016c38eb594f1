"""Tokenizer of the model folder, and the text of block ids.

A block id's text is English that depends only on (seed, id). Trace ids are chained hashes: an equal id means an equal
prefix, so prompts are equal exactly where the trace's were.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from random import Random
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from loadtest.errors import PromptPlanError, TokenizerUnusable


@dataclass(frozen=True)
class ModelTokens:
    """Tokenizer of a model folder. `bos`: ids prepended to a prompt. `max_model_len`: from config.json, if present."""

    path: Path
    tokenizer: Any
    bos: tuple[int, ...]
    max_model_len: int | None

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def cut(self, text: str, num_tokens: int) -> str:
        """Return the first `num_tokens` tokens of the text, as text; a shorter text is returned unchanged."""
        offsets = self.tokenizer.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= num_tokens else text[: offsets[num_tokens - 1][1]]


def load_model_tokens(model_path: Path, *, flag: str = "--model-path") -> ModelTokens:
    """Read a Hugging Face model folder's tokenizer. Raises TokenizerUnusable, naming `flag`."""
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerUnusable(
            f"no tokenizer at {file}; give the folder or the Hugging Face id of the served model with {flag}"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises plain Exception
        raise TokenizerUnusable(f"{file} cannot be read as a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json_object(model_path / "tokenizer_config.json")
    return ModelTokens(
        path=model_path,
        tokenizer=tokenizer,
        bos=_bos(tokenizer, settings),
        max_model_len=_context(_json_object(model_path / "config.json")),
    )


def _bos(tokenizer: Any, settings: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that the tokenizer prepends to a text, by its post-processor or by `add_bos_token`."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    marked = tokenizer.encode("a", add_special_tokens=True).ids
    if plain and plain[0] in marked and marked.index(plain[0]) > 0:
        return tuple(marked[: marked.index(plain[0])])
    if settings.get("add_bos_token"):
        token = settings.get("bos_token")
        token = token.get("content") if isinstance(token, dict) else token
        found = tokenizer.token_to_id(token) if isinstance(token, str) else None
        return () if found is None else (found,)
    return ()


def _context(config: dict[str, Any]) -> int | None:
    value = config.get("max_position_embeddings")
    return value if isinstance(value, int) and value > 0 else None


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise TokenizerUnusable(f"{file} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


TokenIds = NDArray[np.int32]


def ordinary_ids(tokens: ModelTokens) -> TokenIds:
    """Return all token ids except special ones, which servers interpret."""
    special = {i for i, added in tokens.tokenizer.get_added_tokens_decoder().items() if added.special}
    return np.array([i for i in range(tokens.tokenizer.get_vocab_size()) if i not in special], np.int32)


_SLOT = re.compile(r"\{(\w+)\}")
_BATCH = 1024


class Encoder(Protocol):
    """Interface of the tokenizer used by TextBook."""

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of each text, without special tokens."""


@cache
def _vocabulary() -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    """Return the sentence patterns and the word lists of their slots (data/words.toml)."""
    data = tomllib.loads(resources.files("loadtest").joinpath("data", "words.toml").read_text())
    return tuple(data["patterns"]), {name: tuple(words.split()) for name, words in data["words"].items()}


def sentence(rng: Random) -> str:
    """Return a random English sentence."""
    patterns, words = _vocabulary()

    def fill(slot: re.Match[str]) -> str:
        name = slot[1]
        word = rng.choice(words[name.lower()])
        return word.capitalize() if name[0].isupper() else word

    return _SLOT.sub(fill, rng.choice(patterns))


def block_text(seed: int, block_id: int, num_words: int) -> str:
    """Return sentences of at least `num_words` words in total, with a leading space.

    The text is determined by (seed, block_id); a text of fewer words is a prefix of one of more.
    """
    digest = hashlib.blake2b(f"{seed}:{block_id}".encode(), digest_size=16).digest()
    rng = Random(int.from_bytes(digest, "little"))
    sentences: list[str] = []
    count = 0
    while count < num_words:
        sentences.append(sentence(rng))
        count += sentences[-1].count(" ") + 1
    return " " + " ".join(sentences)


class TextBook:
    """Cache of the token ids of each block id, exactly `tokens_per_block` per block."""

    def __init__(self, encoder: Encoder, *, tokens_per_block: int, seed: int) -> None:
        self._encoder = encoder
        self._tokens_per_block = tokens_per_block
        self._seed = seed
        self._blocks: dict[int, TokenIds] = {}

    def prepare(self, block_ids: Iterable[int]) -> None:
        """Create the blocks of these ids in batches."""
        missing = [i for i in dict.fromkeys(block_ids) if i not in self._blocks]
        for start in range(0, len(missing), _BATCH):
            self._make(missing[start : start + _BATCH])

    def block(self, block_id: int) -> TokenIds:
        """Return the token ids of a block, int32 [tokens_per_block], read-only."""
        if block_id not in self._blocks:
            self._make([block_id])
        return self._blocks[block_id]

    def _make(self, block_ids: list[int]) -> None:
        # With usual tokenizers a word is at least one token, so the first round nearly always suffices.
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
                    f"the tokenizer produces fewer than {self._tokens_per_block} tokens from {num_words // 2} words"
                )
