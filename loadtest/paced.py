"""Verification against a cluster whose engine is paced: its tokens are known exactly, no model is needed."""

from __future__ import annotations

from pathlib import Path

from loadtest.errors import VerificationError
from loadtest.record import RequestRecord
from loadtest.text import TokenIds

PACED = "paced:"


class PacedReference:
    """Says what a paced engine answers. Imports the engine's part that is pure, never torch."""

    def __init__(self, model_path: Path) -> None:
        """Raises VerificationError."""
        from engine import EngineError
        from engine.config import read_config
        from worker.paced.tokens import PacedTokens

        try:
            config = read_config(model_path)
        except EngineError as error:
            raise VerificationError(f"cannot verify: {error}") from error
        self._ends = frozenset(config.eos_token_ids)
        self._tokens = PacedTokens.of(model_path, config, 0)

    def judged(self, prompt: TokenIds, record: RequestRecord) -> list[tuple[int, float]]:
        """Per token of the answer (the one that is right, how wrong it is: 0 or infinitely).

        Where an answer that may end by itself does so is not judged: that is the server's setting.
        """
        from worker.paced.tokens import Draw

        found = record.token_ids
        expected = self._tokens.answer(prompt, Draw(record.seed, record.temperature, 0), len(found))
        if found[-1] in self._ends:
            expected[-1] = found[-1]
        return [(right, 0.0 if token == right else float("inf")) for right, token in zip(expected, found, strict=True)]


def told(stand_ins: tuple[str, ...]) -> list[str]:
    """What a report must say of a server that computes nothing."""
    if not stand_ins:
        return []
    named = ", ".join(stand_ins)
    return [f"the server's engine is a stand-in ({named}): nothing was computed, its steps' times are a profile's"]
