"""Prompts out of files: ShareGPT conversations and JSONL lines. Pure apart from reading the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator

from loadtest.bench.config import BenchConfig
from loadtest.bench.prompts import Prompt
from loadtest.errors import DatasetUnusable
from loadtest.tokens import ModelTokens

# Bounds that vLLM holds for ShareGPT, so that figures compare.
_LEAST_TOKENS = 4
_MOST_PROMPT_TOKENS = 1024
_MOST_TOKENS = 2048


def sharegpt_prompts(config: BenchConfig, tokens: ModelTokens, rng: Generator) -> list[Prompt]:
    """First question and answer of each conversation, those of unusual length left out. Raises DatasetUnusable."""
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
    """One prompt a line: {"prompt": text} and, for --custom-output-len -1, output_tokens. Raises DatasetUnusable."""
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
    assert config.dataset_path is not None  # BenchConfig holds that
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
        raise DatasetUnusable(f"{path} is no list; expected a ShareGPT file")
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
                f"{path}, line {number}: output_tokens is {length!r}; expected a number from 1 on, for "
                "--custom-output-len -1"
            )
        yield text, length if isinstance(length, int) else 0
