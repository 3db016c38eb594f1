"""Section of docs/guarantees.md with the recorded results of the simulation and of the live matrix."""

import json
from pathlib import Path
from typing import Any, Final

from benchmarks.figures.formatting import table

_TESTS: Final = Path(__file__).resolve().parents[2] / "tests"
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


def guarantees() -> str:
    """Return the simulation's summary, and the tables of the live matrix."""
    proven: dict[str, Any] = json.loads((_TESTS / "prove.json").read_text(encoding="utf-8"))
    matrix: dict[str, Any] = json.loads((_TESTS / "live_matrix.json").read_text(encoding="utf-8"))
    return "\n\n".join([_simulation(proven), *(_of_engine(engine, runs) for engine, runs in matrix.items())])


def _simulation(proven: dict[str, dict[str, Any]]) -> str:
    columns = {
        "schedules": ("schedules", "requests", "placed again", "lost", "wrong", "leaks", "late_writes"),
        "mutants": ("mutants", "mutants_killed", "median_schedules_to_kill"),
    }
    parts = [(proven[part], names) for part, names in columns.items() if part in proven]
    when = "; ".join(f"{part} {proven[part]['date']} at {proven[part]['commit']}" for part in columns if part in proven)
    heads = [name.replace("_", " ") for _, names in parts for name in names]
    row = [f"{part[name]:,}" for part, names in parts for name in names]
    return f"""**Simulation** ({when}):

{table(heads, [row])}"""


def _of_engine(engine: str, runs: dict[str, Any]) -> str:
    faults = [fault for fault in FAULTS if fault in runs]
    kinds = list(dict.fromkeys(kind for fault in faults for kind in runs[fault]["cells"]))
    rows = [[kind, *(runs[fault]["cells"].get(kind, "–") for fault in faults)] for kind in kinds]
    when = sorted({f"{run['date']} at {run['commit']}" for run in runs.values()})
    seconds = sum(run["seconds"] for run in runs.values())
    return f"""**{engine}** ({", ".join(when)}; {seconds / 60:.0f} minutes):

{table(["", *faults], rows)}"""
