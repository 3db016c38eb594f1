"""What a log can be told: where it stands and how large it may become. Nothing else lives here."""

from dataclasses import dataclass
from pathlib import Path

from conductor.errors import ConfigError

__all__ = ["DecisionLogConfig"]

_LEAST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class DecisionLogConfig:
    """Records and events each have `num_files` closed files, compressed, beside the one that is written."""

    folder: Path
    file_bytes: int = 64 << 20  # size at which a file is turned over
    num_files: int = 8
    block_tokens: int = 512  # that one hash id stands for; 512 in Mooncake's traces
    with_events: bool = True  # also what replays need: every event
    num_candidates: int = 8  # per phase whose scores are kept, the best ones

    def __post_init__(self) -> None:
        for name, least in (("file_bytes", _LEAST_BYTES), ("num_files", 1), ("block_tokens", 1), ("num_candidates", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"decision log: {name} is {getattr(self, name)}: must be at least {least}")
