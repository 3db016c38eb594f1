"""Tokens of the paced engine, a function of (preceding ids, seed, choice, index): equal on all nodes and attempts.

At temperature 0 the seed is ignored, as with a model: equal prompts get equal answers. Pure.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from engine import LogitSteering
from engine.config import ModelConfig
from worker.paced.kernels import kernels, mixed

_LENGTH_SIGMA = 0.8  # of the logarithm of answers' lengths: a few answers are several times as long as most
_LENGTH_DRAW = 0x6C656E677468  # separates the draw of a length from those of tokens


def states_after(ids: NDArray[np.int32], before: int = 0) -> NDArray[np.uint64]:
    """Return the states of these tokens, which follow a token with state `before` (0: none)."""
    out = np.empty(len(ids), np.uint64)
    kernels().states(ids, np.uint64(before), out)
    return out


@dataclass(frozen=True, slots=True)
class Draw:
    """Parameters of a request that determine its tokens."""

    seed: int
    temperature: float
    choice: int

    @property
    def key(self) -> int:
        """Key of the random draw; 0 for greedy requests."""
        return mixed(mixed(self.seed & (2**64 - 1)) ^ self.choice) if self.temperature > 0 else 0


class PacedTokens:
    """Tokens of one model folder. `plain` [n]: ids of text; `end_ids`: ids that end an answer."""

    def __init__(self, plain: NDArray[np.int64], end_ids: tuple[int, ...], answer_tokens: int, vocab_size: int) -> None:
        """`answer_tokens` is the mean length of answers that end by themselves; 0: none do."""
        self._plain = plain
        self._all = np.arange(vocab_size)
        self._ends = end_ids
        self._mean = answer_tokens

    @classmethod
    def of(cls, folder: Path, config: ModelConfig, answer_tokens: int) -> PacedTokens:
        """Read the special ids from the folder's tokenizer; without one, only the end ids are special."""
        special = set(config.eos_token_ids) | ({config.bos_token_id} if config.bos_token_id is not None else set())
        try:
            added = json.loads((folder / "tokenizer.json").read_bytes()).get("added_tokens", [])
            special |= {int(token["id"]) for token in added}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # code that needs the tokenizer reports the error
        plain = np.array([i for i in range(config.vocab_size) if i not in special], np.int64)
        ends = tuple(i for i in config.eos_token_ids if i < config.vocab_size)
        plain = plain if len(plain) else np.arange(config.vocab_size)
        return cls(plain, ends, answer_tokens, config.vocab_size)

    def length(self, prompt_state: int, draw: Draw) -> int:
        """Return the length of an answer that ends by itself, including its end token; 0 if it does not end.

        `prompt_state` is the state of the last token of the client's own prompt.
        """
        if not self._mean:
            return 0
        u = (mixed(prompt_state ^ draw.key ^ _LENGTH_DRAW) + 0.5) / 2.0**64
        z = NormalDist().inv_cdf(min(max(u, 1e-9), 1 - 1e-9))
        return 1 + round(self._mean * math.exp(_LENGTH_SIGMA * z - _LENGTH_SIGMA**2 / 2))

    def end(self, stop_ids: frozenset[int]) -> int | None:
        """Return the id that ends an answer with these stop ids; None if there is none."""
        return next((i for i in self._ends if i in stop_ids), None)

    def choices(self, row: LogitSteering | None) -> NDArray[np.int64] | None:
        """Return the ids allowed by a steered row, at least one; None if all text ids are allowed."""
        if row is None or (row.allowed is None and row.barred is None):
            return None
        ids = self._plain if row.allowed is None else np.flatnonzero(row.allowed)
        if row.barred is None:
            return ids
        left = ids[~np.isin(ids, row.barred)]
        return left if len(left) else np.setdiff1d(self._all, row.barred)

    def token(self, state: int, draw: Draw, index: int, choices: NDArray[np.int64] | None = None) -> int:
        """Return token number `index` of the answer after ids that end in `state`; one of `choices` if given."""
        ids = self._plain if choices is None else choices
        return int(ids[mixed(state ^ draw.key ^ mixed(index + 1)) % len(ids)])

    def answer(self, prompt: NDArray[np.int32], draw: Draw, num_tokens: int) -> list[int]:
        """Return the answer to a request without stop ids or steering, for external verification."""
        state, answer = int(states_after(prompt)[-1]), []
        for index in range(num_tokens):
            answer.append(self.token(state, draw, index))
            state = int(states_after(np.array(answer[-1:], np.int32), state)[0])
        return answer
