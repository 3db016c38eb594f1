"""Dialogues to simulate: who asks what length after what pause. Determined by the settings and their seed. Pure.

A turn is a question and its answer. Some dialogues go on for far longer than most: the number of turns is log-normal,
and scaled until the mean history of a turn is what was asked for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from simulator.dialogue_settings import DialogueSettings

__all__ = ["Dialogue", "Turn", "make_dialogues", "mean_history"]

_TURNS_SIGMA = 0.8
_LENGTH_SIGMA = 0.5
_PAUSE_SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class Turn:
    """`pause_s`: from the answer before it to the question."""

    pause_s: float
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """`persona`: which shared beginning of `persona_tokens` it has."""

    number: int
    start_s: float
    persona: int
    persona_tokens: int
    turns: tuple[Turn, ...]


def make_dialogues(settings: DialogueSettings) -> list[Dialogue]:
    """All dialogues, in order of their number."""
    rng = Random(settings.seed)
    personas = [_length(rng, settings.persona_tokens) for _ in range(settings.personas)]
    popularity = list(accumulate(1 / (rank + 1) for rank in range(settings.personas)))
    num_turns = _turns_for(
        settings.mean_history_messages, [rng.lognormvariate(0, _TURNS_SIGMA) for _ in range(settings.dialogues)]
    )
    dialogues = []
    for number, turns in enumerate(num_turns):
        persona = rng.choices(range(settings.personas), cum_weights=popularity)[0]
        start_s = rng.uniform(0, settings.start_hours * 3600)
        planned = tuple(_turn(rng, settings, turn) for turn in range(turns))
        dialogues.append(Dialogue(number, start_s, persona, personas[persona], planned))
    return dialogues


def mean_history(num_turns: Sequence[int]) -> float:
    """Messages before a turn's question in its dialogue, mean over all turns of dialogues with so many turns."""
    # Two messages a turn: the history of turn k (from 0) is 2 k.
    return sum(turns * (turns - 1) for turns in num_turns) / sum(num_turns)


def _turns_for(history: float, shares: Sequence[float]) -> list[int]:
    """Numbers of turns in the ratio of `shares` with this mean history, as near as whole numbers come."""
    low, high = 0.0, 1.0
    while mean_history([_scaled(high, share) for share in shares]) < history:
        low, high = high, 2 * high
    for _ in range(40):
        scale = (low + high) / 2
        if mean_history([_scaled(scale, share) for share in shares]) < history:
            low = scale
        else:
            high = scale
    return [_scaled(high, share) for share in shares]


def _scaled(scale: float, share: float) -> int:
    return max(1, round(scale * share))


def _turn(rng: Random, settings: DialogueSettings, turn: int) -> Turn:
    mean_s = settings.break_s if rng.random() < settings.break_share else settings.think_s
    pause_s = _lognormal(rng, mean_s, _PAUSE_SIGMA) if turn else 0.0
    return Turn(pause_s, _length(rng, settings.question_tokens), _length(rng, settings.answer_tokens))


def _length(rng: Random, mean: float) -> int:
    return max(1, round(_lognormal(rng, mean, _LENGTH_SIGMA)))


def _lognormal(rng: Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
