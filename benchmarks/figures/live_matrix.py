"""Section of docs/guarantees.md on the live matrix, from the results that its tests have recorded."""

import json
from pathlib import Path
from typing import Any, Final

from benchmarks.figures.formatting import table

RESULTS: Final = Path(__file__).resolve().parents[2] / "tests" / "live_matrix.json"
FAULTS: Final = (
    "kill frontend",
    "kill conductor",
    "kill prefill",
    "kill decode",
    "kill pool",
    "hang",
    "partition",
    "flipped bit",
)


def live_matrix() -> str:
    """Return the tables of all engines."""
    matrix: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return "\n\n".join(_of_engine(engine, runs) for engine, runs in matrix.items())


def _of_engine(engine: str, runs: dict[str, Any]) -> str:
    faults = [fault for fault in FAULTS if fault in runs]
    kinds = list(dict.fromkeys(kind for fault in faults for kind in runs[fault]["cells"]))
    rows = [[kind, *(runs[fault]["cells"].get(kind, "–") for fault in faults)] for kind in kinds]
    when = sorted({f"{run['date']} at {run['commit']}" for run in runs.values()})
    seconds = sum(run["seconds"] for run in runs.values())
    return f"""**{engine}** ({", ".join(when)}; {seconds / 60:.0f} minutes):

{table(["", *faults], rows)}"""
