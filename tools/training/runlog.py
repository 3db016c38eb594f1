"""The run's log: one JSON object a line, readable while the run goes on."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True)
class Row:
    """One logged step: tokens seen so far, weighted loss of that batch (nats), rate as a part of the full rate."""

    step: int
    tokens: int
    context: int
    loss: float
    rate: float
    time_s: float


def read(path: Path) -> list[Row]:
    """Every row of the log in order."""
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def resume(path: Path, step: int) -> TextIO:
    """The log opened for appending, without the rows past ``step`` that came after the last checkpoint."""
    kept = [row for row in read(path) if row.step <= step] if path.exists() else []
    file = path.open("w", buffering=1)
    for row in kept:
        write(file, row)
    return file


def write(file: TextIO, row: Row) -> None:
    """Append one row."""
    file.write(json.dumps(asdict(row)) + "\n")
