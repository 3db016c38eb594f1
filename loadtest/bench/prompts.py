"""Prompts that are made up: random tokens, with or without shared beginnings. Pure apart from the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from loadtest.bench.config import BenchConfig
from loadtest.text import TokenIds
from loadtest.tokens import ModelTokens

_FIT_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Prompt:
    """`ids`: int32, of the local tokenizer; `text`: what they stand for, "" where it was not asked for."""

    ids: TokenIds
    text: str
    output_tokens: int


def random_prompts(config: BenchConfig, tokens: ModelTokens, rng: Generator, *, as_text: bool) -> Iterator[Prompt]:
    """Prompts of a common random prefix and random tokens, lengths uniform within the ratio."""
    vocabulary = ordinary_ids(tokens)
    low, high = 1 - config.random_range_ratio, 1 + config.random_range_ratio
    prefix = rng.choice(vocabulary, config.random_prefix_len)
    inputs = _lengths(rng, config.random_input_len, low, high, config.num_prompts)
    outputs = _lengths(rng, config.random_output_len, low, high, config.num_prompts)
    for input_len, output_len in zip(inputs, outputs, strict=True):
        ids = np.concatenate([prefix, rng.choice(vocabulary, input_len)])
        yield _prompt(ids, int(output_len), tokens, vocabulary, rng, as_text=as_text)


def repeated_prefixes(config: BenchConfig, tokens: ModelTokens, rng: Generator, *, as_text: bool) -> Iterator[Prompt]:
    """Prompts that share their beginnings, each with as many of the others as any, in random order."""
    vocabulary = ordinary_ids(tokens)
    prefixes = [
        rng.choice(vocabulary, config.prefix_repetition_prefix_len)
        for _ in range(min(config.prefix_repetition_num_prefixes, config.num_prompts))
    ]
    for number in rng.permutation(config.num_prompts):
        suffix = rng.choice(vocabulary, config.prefix_repetition_suffix_len)
        ids = np.concatenate([prefixes[number % len(prefixes)], suffix])
        yield _prompt(ids, config.prefix_repetition_output_len, tokens, vocabulary, rng, as_text=as_text)


def ordinary_ids(tokens: ModelTokens) -> TokenIds:
    """All ids of the vocabulary but the special ones, which mean something to a server."""
    special = {i for i, added in tokens.tokenizer.get_added_tokens_decoder().items() if added.special}
    return np.array([i for i in range(tokens.tokenizer.get_vocab_size()) if i not in special], np.int32)


def _lengths(rng: Generator, mean: int, low: float, high: float, count: int) -> Any:
    return rng.integers(max(int(mean * low), 1), max(int(np.ceil(mean * high)), 1), count, endpoint=True)


def _prompt(
    ids: TokenIds, output_len: int, tokens: ModelTokens, vocabulary: TokenIds, rng: Generator, *, as_text: bool
) -> Prompt:
    text = ""
    if as_text:
        ids, text = fitted_text(ids, tokens, vocabulary, rng)
    return Prompt(np.asarray(ids, np.int32), text, output_len)


def fitted_text(ids: TokenIds, tokens: ModelTokens, vocabulary: TokenIds, rng: Generator) -> tuple[TokenIds, str]:
    """A text of these tokens that has as many tokens again when it is read, and those tokens.

    Tokens put together at random read otherwise than they were written; what is too much is cut, what is missing is
    drawn, a few times. A tokenizer that comes to no rest leaves a length that differs a little.
    """
    wanted, text = len(ids), ""
    for _ in range(_FIT_ROUNDS):
        text = tokens.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        read = np.array(tokens.encode_all([text])[0], np.int32)
        if len(read) == wanted:
            return read, text
        ids = (
            read[:wanted] if len(read) > wanted else np.concatenate([read, rng.choice(vocabulary, wanted - len(read))])
        )
    return read, text
