"""Stored results of benchmarks: `benchmarks/results/NAME-DATE.json`, of which the latest date of each name counts."""

import datetime
import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PICTURES = RESULTS.parents[1] / "docs" / "pictures"

Result = dict[str, Any]


def store(name: str, result: Result) -> None:
    """Write a benchmark's result under today's date, in UTC."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    (RESULTS / f"{name}-{date}.json").write_text(text, encoding="utf-8")


def latest(name: str) -> tuple[Result, str]:
    """Return the latest result of a benchmark and the name of its file. Raises FileNotFoundError if there is none."""
    paths = sorted(path for path in RESULTS.glob(f"{name}-20*.json") if re.fullmatch(rf"{name}-[\d-]+", path.stem))
    if not paths:
        raise FileNotFoundError(f"no result of {name} in {RESULTS}")
    return json.loads(paths[-1].read_text(encoding="utf-8")), paths[-1].name
