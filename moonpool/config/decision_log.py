"""Configuration keys of the decision log."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from moonpool.config.fields import Key, Slice
from moonpool.config.sources import parse_size


@dataclass(frozen=True)
class DecisionLogSettings(Slice):
    """What is kept of the conductor's decisions."""

    panel: ClassVar[str] = "Decision log"
    decision_log: Annotated[
        Path | None,
        Key(
            "Folder for a record of every decision, without text, and for the events to replay them", default_text="off"
        ),
    ] = None
    decision_log_size: Annotated[
        int,
        Key(
            "Size at which a file of the decision log is closed and compressed",
            low=4096,
            parse=parse_size,
            default_text="64MiB",
        ),
    ] = 64 << 20
    decision_log_files: Annotated[
        int, Key("Closed files of records, and as many of events, that are kept", low=1, high=100000)
    ] = 8
    decision_log_block_tokens: Annotated[
        int, Key("Tokens that one hash id of the decision log stands for; 512 in Mooncake's traces", low=1, high=65536)
    ] = 512
    decision_log_candidates: Annotated[
        int, Key("Candidates of each phase whose scores a record has, the best ones", low=1, high=1000)
    ] = 8
    decision_log_events: Annotated[bool, Key("Keep all events, too: what `moonpool replay-decisions` needs")] = True
