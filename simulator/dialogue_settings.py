"""What a simulation of dialogues is made of, validated once. Nothing else lives here."""

import enum
import math
from dataclasses import dataclass, fields

from kvpool.policy.eviction import POLICIES
from simulator.errors import BadSetting

__all__ = ["DialogueSettings", "Routing"]


class Routing(enum.StrEnum):
    """How the server of a turn is chosen."""

    STICKY = "sticky"
    """Where most of the dialogue's KV is, unless the queue there is longer than the shortest by more than a bound."""
    RANDOM = "random"
    ROUND_ROBIN = "round-robin"


@dataclass(frozen=True)
class DialogueSettings:
    """Raises BadSetting for values that cannot be simulated."""

    dialogues: int = 2_000
    mean_history_messages: float = 180.0
    """Messages (questions and answers) before a turn's question in its dialogue, mean over the turns of all."""
    seed: int = 0
    start_hours: float = 8.0
    """Dialogues begin at even chance in this time."""
    personas: int = 100
    """Different beginnings (a character's description), shared by dialogues; the n-th is chosen with weight 1/n."""
    persona_tokens: float = 300.0
    question_tokens: float = 15.0
    answer_tokens: float = 50.0
    """Means of log-normal lengths."""
    think_s: float = 30.0
    """Mean time from an answer's end to the next question, log-normal."""
    break_share: float = 0.02
    """Share of questions that come after a break instead."""
    break_s: float = 3_000.0
    """Its mean, log-normal."""
    servers: int = 8
    capacity: int = 2_500
    """Blocks that each server's pool holds."""
    block_tokens: int = 128
    policy: str = "lru"
    routing: Routing = Routing.STICKY
    balance_s: float = 2.0
    """A dialogue leaves its server when the queue there is longer than the shortest by more than this."""
    tails: bool = True
    """Whether a partial last block is kept too."""
    prefill_tokens_per_s: float = 2_000.0
    decode_tokens_per_s: float = 125.0
    """How fast one server works its queue off, one turn after the other."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool | str) or field.name in ("seed", "break_share", "balance_s"):
                continue
            if not 0 < value < math.inf or (field.type is int and value < 1):
                raise BadSetting(f"{field.name} must be above 0, not {value}")
        if self.mean_history_messages < 2:
            raise BadSetting(f"mean_history_messages must be at least 2, not {self.mean_history_messages:g}")
        if not 0 <= self.break_share <= 1:
            raise BadSetting(f"break_share is a share from 0 to 1, not {self.break_share:g}")
        if not self.balance_s >= 0:
            raise BadSetting(f"balance_s must be 0 or more seconds, not {self.balance_s:g}")
        if self.policy not in POLICIES:
            raise BadSetting(f"there is no policy {self.policy!r}; choose one of {', '.join(POLICIES)}")
