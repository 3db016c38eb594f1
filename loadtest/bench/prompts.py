"""Prompts (random, shared prefixes, ShareGPT or JSONL files) and arrival times, generated as in vLLM's benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from loadtest.bench.config import BenchConfig
from loadtest.errors import DatasetUnusable
from loadtest.tokens import ModelTokens, TokenIds, ordinary_ids


def arrival_times(count: int, *, rate: float, burstiness: float, rng: Generator) -> NDArray[np.float64]:
    """Return arrival times in seconds after the start, float64 [count], non-decreasing.

    At an infinite rate all are 0. Otherwise intervals follow a gamma distribution with shape `burstiness` (1: a Poisson
    process; infinite: constant intervals), scaled so that the last request is due at exactly count / rate.
    """
    if math.isinf(rate):
        return np.zeros(count)
    if math.isinf(burstiness):
        return np.arange(1, count + 1) / rate
    times = np.cumsum(rng.gamma(burstiness, 1 / (rate * burstiness), count))
    return times * (count / rate / times[-1]) if times[-1] > 0 else np.arange(1, count + 1) / rate


_FIT_ROUNDS = 8


@dataclass(frozen=True, eq=False)
class Prompt:
    """Prompt of a benchmark. `ids`: int32, by the local tokenizer; `text`: their text, or "" if not requested."""

    ids: TokenIds
    text: str
    output_tokens: int


def random_prompts(config: BenchConfig, tokens: ModelTokens, rng: Generator, *, as_text: bool) -> Iterator[Prompt]:
    """Yield prompts of a shared random prefix and random tokens, with lengths uniform within the range ratio."""
    vocabulary = ordinary_ids(tokens)
    low, high = 1 - config.random_range_ratio, 1 + config.random_range_ratio
    prefix = rng.choice(vocabulary, config.random_prefix_len)
    inputs = _lengths(rng, config.random_input_len, low, high, config.num_prompts)
    outputs = _lengths(rng, config.random_output_len, low, high, config.num_prompts)
    for input_len, output_len in zip(inputs, outputs, strict=True):
        ids = np.concatenate([prefix, rng.choice(vocabulary, input_len)])
        yield _prompt(ids, int(output_len), tokens, vocabulary, rng, as_text=as_text)


def repeated_prefixes(config: BenchConfig, tokens: ModelTokens, rng: Generator, *, as_text: bool) -> Iterator[Prompt]:
    """Yield prompts that share prefixes, in random order; prefixes are used equally often (differing by at most 1)."""
    vocabulary = ordinary_ids(tokens)
    prefixes = [
        rng.choice(vocabulary, config.prefix_repetition_prefix_len)
        for _ in range(min(config.prefix_repetition_num_prefixes, config.num_prompts))
    ]
    for number in rng.permutation(config.num_prompts):
        suffix = rng.choice(vocabulary, config.prefix_repetition_suffix_len)
        ids = np.concatenate([prefixes[number % len(prefixes)], suffix])
        yield _prompt(ids, config.prefix_repetition_output_len, tokens, vocabulary, rng, as_text=as_text)


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
    """Return a text that tokenizes to `len(ids)` tokens, and those tokens.

    Random tokens decoded to text usually tokenize differently. The sequence is therefore cut or extended by random
    tokens and decoded again, up to 8 times. If that does not converge, the length differs slightly.
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


# vLLM's length limits for ShareGPT, so that results are comparable.
_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048


def sharegpt_prompts(config: BenchConfig, tokens: ModelTokens, rng: Generator) -> list[Prompt]:
    """Return the first question and answer of each conversation within vLLM's length limits. Raises DatasetUnusable."""
    path = _path(config)
    pairs = list(_conversations(path))
    if not config.disable_shuffle:
        pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    found: list[Prompt] = []
    for question, answer in pairs:
        if len(found) == config.num_prompts:
            break
        ids, answer_ids = tokens.encode_all([question, answer])
        output = config.sharegpt_output_len or len(answer_ids)
        fits = _LEAST_TOKENS <= len(ids) <= _MOST_PROMPT_TOKENS and len(ids) + output <= _MOST_TOKENS
        if fits and (config.sharegpt_output_len or output >= _LEAST_TOKENS):
            found.append(Prompt(np.array(ids, np.int32), question, output))
    return _as_many_as_asked(found, config, path, rng)


def custom_prompts(config: BenchConfig, tokens: ModelTokens, rng: Generator) -> list[Prompt]:
    """Return one prompt per line: {"prompt": text} and, for --custom-output-len -1, output_tokens.

    Raises DatasetUnusable.
    """
    path = _path(config)
    rows = list(_custom_rows(path, needs_length=config.custom_output_len == -1))
    if not config.disable_shuffle:
        rows = [rows[i] for i in rng.permutation(len(rows))]
    rows = rows[: config.num_prompts]
    encoded = tokens.encode_all([text for text, _ in rows])
    found = [
        Prompt(np.array(ids, np.int32), text, length if config.custom_output_len == -1 else config.custom_output_len)
        for ids, (text, length) in zip(encoded, rows, strict=True)
    ]
    return _as_many_as_asked(found, config, path, rng)


def _as_many_as_asked(found: list[Prompt], config: BenchConfig, path: Path, rng: Generator) -> list[Prompt]:
    if not found:
        raise DatasetUnusable(f"{path} has no prompt of a usable length; expected at least one")
    missing = config.num_prompts - len(found)
    if missing > 0 and not config.no_oversample:
        found += [found[i] for i in rng.integers(0, len(found), missing)]
    return found


def _path(config: BenchConfig) -> Path:
    assert config.dataset_path is not None  # checked by BenchConfig
    return config.dataset_path


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetUnusable(f"--dataset-path {path} cannot be read: {error}") from error


def _conversations(path: Path) -> Iterator[tuple[str, str]]:
    try:
        rows = json.loads(_read(path))
    except ValueError as error:
        raise DatasetUnusable(f"{path} is not JSON ({error}); expected a ShareGPT file") from error
    if not isinstance(rows, list):
        raise DatasetUnusable(f"{path} is not a JSON list; expected a ShareGPT file")
    for number, row in enumerate(rows):
        turns = row.get("conversations", row.get("conversation")) if isinstance(row, dict) else None
        if not isinstance(turns, list):
            raise DatasetUnusable(f"{path}: entry {number} has no list `conversations`; expected a ShareGPT file")
        texts = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
        if len(texts) == 2 and all(isinstance(text, str) for text in texts):
            yield str(texts[0]), str(texts[1])


def _custom_rows(path: Path, *, needs_length: bool) -> Iterator[tuple[str, int]]:
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise DatasetUnusable(f"{path}, line {number}: not JSON ({error})") from error
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text:
            raise DatasetUnusable(f'{path}, line {number}: expected {{"prompt": "some text"}}')
        length = row.get("output_tokens")
        if needs_length and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
            raise DatasetUnusable(
                f"{path}, line {number}: output_tokens is {length!r}; --custom-output-len -1 requires an integer, at "
                "least 1"
            )
        yield text, length if isinstance(length, int) else 0
