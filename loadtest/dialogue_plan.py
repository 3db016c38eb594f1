"""What is said in dialogues, how long and when: determined by the seed and the dialogue's number. Pure but for the
tokenizer."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Protocol

from loadtest.dialogue_config import DialogueConfig
from loadtest.text import block_text

_SPREAD = 0.5  # sigma of the logarithm of lengths: a tenth is longer than 1.7 times the mean
_SYSTEM = -1


class Cutter(Protocol):
    """What the plan needs of a tokenizer."""

    def cut(self, text: str, num_tokens: int) -> str:
        """The beginning of a text that has `num_tokens` tokens."""


@dataclass(frozen=True)
class PlannedTurn:
    """One question. `think_s`: how long after the answer before it."""

    turn: int
    question: str
    num_tokens: int  # of the question by itself, about
    max_tokens: int
    think_s: float
    seed: int


def system_text(config: DialogueConfig, cutter: Cutter) -> str:
    """The system message of all dialogues; empty for none."""
    return _text(config.seed, _SYSTEM, config.system_tokens, cutter) if config.system_tokens else ""


def planned_turns(config: DialogueConfig, dialogue: int, cutter: Cutter) -> Iterator[PlannedTurn]:
    """The turns of one dialogue."""
    rng = Random(_number(config.seed, dialogue, "lengths"))
    for turn in range(config.turns):
        num_tokens = _length(rng, config.turn_tokens)
        max_tokens = _length(rng, config.answer_tokens)
        think_s = rng.expovariate(1 / config.think_time_s) if turn and config.think_time_s else 0.0
        yield PlannedTurn(
            turn=turn,
            question=_text(config.seed, dialogue * config.turns + turn, num_tokens, cutter),
            num_tokens=num_tokens,
            max_tokens=max_tokens,
            think_s=think_s,
            seed=_number(config.seed, dialogue, f"turn {turn}") % 2**63,
        )


def _length(rng: Random, mean: int) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - _SPREAD**2 / 2, _SPREAD)))


def _text(seed: int, number: int, num_tokens: int, cutter: Cutter) -> str:
    return cutter.cut(block_text(seed, number, num_tokens).strip(), num_tokens)


def _number(seed: int, dialogue: int, what: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{dialogue}:{what}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
