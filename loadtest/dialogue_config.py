"""The configuration of a run of dialogues: frozen, one line of help per field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loadtest.config import Bound, check_bounds, is_http, server_root

_BOUNDS: Final[dict[str, Bound]] = {
    "url": ("--url", is_http, "http://HOST:PORT"),
    "dialogues": ("--dialogues", lambda value: value >= 1, "at least 1"),
    "turns": ("--turns", lambda value: value >= 1, "at least 1"),
    "total": ("--total", lambda value: value >= 0, "a number of dialogues, 0 for as many as go on at a time"),
    "think_time_s": ("--think-time", lambda value: 0 <= value < math.inf, "seconds, 0 for none"),
    "system_tokens": ("--system-tokens", lambda value: value >= 0, "tokens, 0 for no system message"),
    "turn_tokens": ("--turn-tokens", lambda value: value >= 1, "at least 1 token"),
    "answer_tokens": ("--answer-tokens", lambda value: value >= 1, "at least 1 token"),
    "temperature": ("--temperature", lambda value: 0 <= value <= 2, "a number from 0 to 2"),
    "truncation": ("--truncation", lambda value: value in ("disabled", "auto"), "disabled or auto"),
    "request_timeout_s": ("--request-timeout", lambda value: 0 < value < math.inf, "seconds, above 0"),
    "verify_sample": ("--verify-sample", lambda value: value >= 1, "at least 1 answer"),
    "verify_tolerance": ("--verify-tolerance", lambda value: 0 <= value < math.inf, "a number from 0 on"),
}


@dataclass(frozen=True)
class DialogueConfig:
    """Everything `loadtest.dialogue_runner.run` needs to know."""

    url: str
    """Address of the server, such as http://127.0.0.1:8000."""
    out: Path
    """Folder for dialogues.json, dialogues.html and turns.jsonl."""
    model_path: Path
    """Folder of the served model: its tokenizer measures the questions, its weights verify the answers."""
    model: str = ""
    """Name of the model in requests; empty: the first that the server lists."""
    api_key: str = ""
    """Bearer key for the server."""
    dialogues: int = 4
    """Dialogues that go on at a time."""
    turns: int = 20
    """Turns of each."""
    total: int = 0
    """Dialogues in all, 0 = as many as go on at a time; when one has ended the next begins."""
    think_time_s: float = 1.0
    """Mean of the time between an answer and the next question."""
    system_tokens: int = 32
    """Tokens of the system message, the same in all dialogues; 0 = none."""
    turn_tokens: int = 24
    """Mean of the tokens of a question."""
    answer_tokens: int = 32
    """Mean of the most tokens of an answer; it may end by itself before."""
    temperature: float = 1.0
    """Of all answers."""
    truncation: str = "disabled"
    """What the server is asked to do with a dialogue that outgrows the context; disabled: it ends there."""
    seed: int = 0
    """Of texts, lengths, think times and sampling."""
    request_timeout_s: float = 300.0
    """A turn that takes longer has failed."""
    verify: bool = False
    """Re-score a sample of the answers in this process."""
    verify_sample: int = 100
    """How many answers to re-score."""
    verify_tolerance: float = 1e-3
    """How far below the largest score a token may lie without being wrong."""
    verify_device: str = "cpu"
    """Where the reference runs."""

    @property
    def base_url(self) -> str:
        """`url` without a trailing slash, and without the /v1 that OpenAI's clients are given."""
        return server_root(self.url)

    @property
    def num_dialogues(self) -> int:
        """Dialogues in all."""
        return max(self.total, self.dialogues)

    def __post_init__(self) -> None:
        """Raises SettingInvalid naming the flag."""
        check_bounds(self, _BOUNDS)
