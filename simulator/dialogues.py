"""Synthetic dialogues: settings, and the turns' lengths and pauses, determined by settings and seed. Pure.

A turn is a question and its answer. Some dialogues are far longer than most: the number of turns is log-normal, scaled
to the requested mean history of a turn.
"""

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from random import Random

from kvpool.policy.eviction import POLICIES
from simulator.errors import BadSetting


class Routing(enum.StrEnum):
    """Routing of turns to servers."""

    STICKY = "sticky"
    """To the server with most of the dialogue's KV, unless its queue exceeds the shortest by more than `balance_s`."""
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True)
class DialogueSettings:
    """Settings of a simulation of dialogues. Raises BadSetting for invalid values."""

    dialogues: int = 2_000
    mean_history_messages: float = 180.0
    """Messages (questions and answers) before a turn's question in its dialogue, mean over all turns."""
    seed: int = 0
    start_hours: float = 8.0
    """Dialogues start at uniformly random times in this period."""
    personas: int = 100
    """Distinct shared beginnings of dialogues (a character's description); the n-th is chosen with weight 1/n."""
    persona_tokens: float = 300.0
    question_tokens: float = 15.0
    answer_tokens: float = 50.0
    """Mean length; lengths are log-normal, like those of personas and questions."""
    think_s: float = 30.0
    """Mean time from an answer's end to the next question, log-normal."""
    break_share: float = 0.02
    """Fraction of questions that follow a break instead."""
    break_s: float = 3_000.0
    """Mean duration of a break, log-normal."""
    servers: int = 8
    capacity: int = 2_500
    """Capacity of each server's pool in blocks."""
    block_tokens: int = 128
    policy: str = "lru"
    routing: Routing = Routing.STICKY
    balance_s: float = 2.0
    """Largest difference to the shortest queue at which a dialogue stays on its server."""
    tails: bool = True
    """Store a partial last block, too."""
    prefill_tokens_per_s: float = 2_000.0
    decode_tokens_per_s: float = 125.0
    """Decode rate of a server, which runs one turn at a time."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool | str) or field.name in ("seed", "break_share", "balance_s"):
                continue
            if not 0 < value < math.inf or (field.type is int and value < 1):
                raise BadSetting(f"{field.name} must be above 0, got {value}")
        if self.mean_history_messages < 2:
            raise BadSetting(f"mean_history_messages must be at least 2, got {self.mean_history_messages:g}")
        if not 0 <= self.break_share <= 1:
            raise BadSetting(f"break_share must be from 0 to 1, got {self.break_share:g}")
        if not self.balance_s >= 0:
            raise BadSetting(f"balance_s must be at least 0, got {self.balance_s:g}")
        if self.policy not in POLICIES:
            raise BadSetting(f"unknown policy {self.policy!r}; choose one of {', '.join(POLICIES)}")


_TURNS_SIGMA = 0.8
_LENGTH_SIGMA = 0.5
_PAUSE_SIGMA = 1.0


@dataclass(frozen=True, slots=True)
class DialogueTurn:
    """Lengths of one turn. `pause_s`: from the previous answer to this question."""

    pause_s: float
    question_tokens: int
    answer_tokens: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns of one dialogue. `persona`: index of its shared beginning of `persona_tokens`."""

    number: int
    start_s: float
    persona: int
    persona_tokens: int
    turns: tuple[DialogueTurn, ...]


def make_dialogues(settings: DialogueSettings) -> list[Dialogue]:
    """Return all dialogues, in order of their number."""
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
    """Return the mean, over all turns, of the messages that precede a turn's question in its dialogue."""
    # Two messages a turn: the history of turn k (from 0) is 2 k.
    return sum(turns * (turns - 1) for turns in num_turns) / sum(num_turns)


def _turns_for(history: float, shares: Sequence[float]) -> list[int]:
    """Return numbers of turns in the ratio of `shares` whose mean history is closest to the requested one."""
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


def _turn(rng: Random, settings: DialogueSettings, turn: int) -> DialogueTurn:
    mean_s = settings.break_s if rng.random() < settings.break_share else settings.think_s
    pause_s = _lognormal(rng, mean_s, _PAUSE_SIGMA) if turn else 0.0
    return DialogueTurn(pause_s, _length(rng, settings.question_tokens), _length(rng, settings.answer_tokens))


def _length(rng: Random, mean: float) -> int:
    return max(1, round(_lognormal(rng, mean, _LENGTH_SIGMA)))


def _lognormal(rng: Random, mean: float, sigma: float) -> float:
    return rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
