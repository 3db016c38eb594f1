"""Log of a run: one JSON object per line, readable during the run."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Row:
    """One logged step. ``tokens``: in this stage so far; ``loss``: weighted, of that batch, in nats; ``answer_loss``:
    of the answers in it, unweighted; ``rate``: relative to the full learning rate."""

    step: int
    tokens: int
    context: int
    loss: float
    answer_loss: float
    rate: float
    time_s: float


def read(path: Path) -> list[Row]:
    """Return the rows of the log in order."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def resume(path: Path, step: int) -> TextIO:
    """Open the log for appending, after removing rows past ``step``, which were written after the last checkpoint."""
    kept = [row for row in read(path) if row.step <= step] if path.exists() else []
    file = path.open("w", buffering=1)
    for row in kept:
        write(file, row)
    return file


def write(file: TextIO, row: Row) -> None:
    """Append one row."""
    file.write(json.dumps(asdict(row)) + "\n")
