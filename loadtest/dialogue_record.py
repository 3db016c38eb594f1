"""What is kept of one turn: the request's record, and its place in the dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.record import Outcome, RequestRecord


@dataclass
class TurnRecord:
    """One turn. `history_tokens`: of prompt and answer of the turn before, whose KV there could be; the answer's last
    token is never computed. 0 in the first turn."""

    dialogue: int
    turn: int
    think_s: float
    history_tokens: int
    request: RequestRecord

    @property
    def completed(self) -> bool:
        """Whether the whole answer came."""
        return self.request.outcome is Outcome.COMPLETED

    @property
    def dropped_messages(self) -> int:
        """Messages that the server left out, as far as it tells."""
        dropped = self.request.extension.get("dropped_messages", 0)
        return dropped if isinstance(dropped, int) else 0

    def as_json(self) -> dict[str, Any]:
        """The record as one line of turns.jsonl."""
        return {
            "dialogue": self.dialogue,
            "turn": self.turn,
            "think_s": round(self.think_s, 6),
            "history_tokens": self.history_tokens,
            "output_tokens": self.request.output_tokens,
            "text": self.request.text,
            **self.request.as_json(),
        }


def share_cached(turns: Sequence[TurnRecord]) -> float | None:
    """Cached tokens over prompt tokens of completed turns after the first; None of none."""
    later = [t.request for t in turns if t.completed and t.turn]
    prompt = sum(r.prompt_tokens for r in later)
    return sum(r.cached_tokens for r in later) / prompt if prompt else None


def share_of_history(turns: Sequence[TurnRecord]) -> float | None:
    """Cached tokens over those that a turn could have found, over completed turns after the first; None of none."""
    later = [t for t in turns if t.completed and t.history_tokens]
    history = sum(min(t.history_tokens, t.request.prompt_tokens) for t in later)
    return sum(t.request.cached_tokens for t in later) / history if history else None
