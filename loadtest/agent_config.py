"""Configuration of a closed-loop run of agents."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from loadtest.config import Bound, check_bounds, is_http, server_root
from traces.agents import AgentSettings

AgentHints = Literal["none", "pauses", "priorities", "all"]
"""What agents announce with their turns."""

_BOUNDS: Final[dict[str, Bound]] = {
    "url": ("--url", is_http, "http://HOST:PORT"),
    "hints": ("--hints", lambda value: value in get_args(AgentHints), "none, pauses, priorities or all"),
    "wait_scale": ("--wait-scale", lambda value: 0 <= value < math.inf, "a number from 0 on"),
    "request_timeout_s": ("--request-timeout", lambda value: 0 < value < math.inf, "seconds, above 0"),
}


@dataclass(frozen=True)
class AgentRunConfig:
    """Configuration of one run of agents."""

    url: str
    """URL of the server, such as http://127.0.0.1:8000."""
    out: Path
    """Folder for agents.json and turns.jsonl."""
    model_path: Path
    """Folder or Hugging Face id of the served model, whose tokenizer gives the number of token ids."""
    agents: AgentSettings = field(default_factory=AgentSettings)
    """Turns, lengths and tools, and the seed of all random choices."""
    model: str = ""
    """Model name in requests; empty: the first model that the server lists."""
    api_key: str = ""
    """API key, sent as bearer token."""
    hints: AgentHints = "none"
    """What agents announce: the mean wait of each turn's tool, and that those which began first precede."""
    wait_scale: float = 1.0
    """Factor on tool waits and on start times."""
    request_timeout_s: float = 900.0
    """Timeout of a turn in seconds."""

    @property
    def base_url(self) -> str:
        """`url` without a trailing slash and without the /v1 of OpenAI base URLs."""
        return server_root(self.url)

    @property
    def announces_pauses(self) -> bool:
        """True if turns announce how long their tool will take."""
        return self.hints in ("pauses", "all")

    @property
    def has_priorities(self) -> bool:
        """True if agents that began earlier have priority."""
        return self.hints in ("priorities", "all")

    def __post_init__(self) -> None:
        """Validate the fields. Raises SettingInvalid naming the flag."""
        check_bounds(self, _BOUNDS)
