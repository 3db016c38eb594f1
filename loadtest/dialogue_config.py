"""Configuration of a run of dialogues."""

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
    "total": ("--total", lambda value: value >= 0, "a number of dialogues, 0 for the value of --dialogues"),
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
    """Configuration of one run of dialogues."""

    url: str
    """URL of the server, such as http://127.0.0.1:8000."""
    out: Path
    """Folder for dialogues.json, dialogues.html and turns.jsonl."""
    model_path: Path
    """Folder or Hugging Face id of the served model: the tokenizer measures questions, the weights verify answers."""
    model: str = ""
    """Model name in requests; empty: the first model that the server lists."""
    api_key: str = ""
    """API key, sent as bearer token."""
    dialogues: int = 4
    """Number of concurrent dialogues."""
    turns: int = 20
    """Turns per dialogue."""
    total: int = 0
    """Total number of dialogues; 0: `dialogues`. A new one starts when one has ended."""
    think_time_s: float = 1.0
    """Mean time between an answer and the next question, in seconds."""
    system_tokens: int = 32
    """Tokens of the system message shared by all dialogues; 0: no system message."""
    turn_tokens: int = 24
    """Mean length of a question in tokens."""
    answer_tokens: int = 32
    """Mean of the requests' max_tokens; answers may be shorter."""
    temperature: float = 1.0
    """Sampling temperature."""
    truncation: str = "disabled"
    """Handling of dialogues that exceed the context: `auto` lets the server drop the oldest turns, `disabled` ends
    them."""
    seed: int = 0
    """Random seed of texts, lengths, think times and sampling."""
    request_timeout_s: float = 300.0
    """Timeout of a turn in seconds."""
    verify: bool = False
    """Re-score a sample of the answers in this process."""
    verify_sample: int = 100
    """Number of answers to re-score."""
    verify_tolerance: float = 1e-3
    """Largest difference below the maximum score at which a token counts as correct."""
    verify_device: str = "cpu"
    """Device of the reference model."""

    @property
    def base_url(self) -> str:
        """`url` without a trailing slash and without the /v1 of OpenAI base URLs."""
        return server_root(self.url)

    @property
    def num_dialogues(self) -> int:
        """Total number of dialogues."""
        return max(self.total, self.dialogues)

    def __post_init__(self) -> None:
        """Validate the fields. Raises SettingInvalid naming the flag."""
        check_bounds(self, _BOUNDS)
