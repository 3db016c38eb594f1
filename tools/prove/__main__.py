"""Command line: run schedules, find which mutants they kill, replay a seed.

    python -m tools.prove [--seconds S | --schedules N] [--first SEED] [--mutants [only]]
    python -m tools.prove --replay SEED [--mutant FILE]

The last line of output is JSON. The exit status is 1 if a schedule violates an invariant, or if a mutant survives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.prove.schedules import Job, load, run_all
from tools.prove.shrink import shrink

MUTANTS = Path(__file__).resolve().parents[2] / "tests" / "tools" / "prove" / "mutants"
MOST_SCHEDULES = 2000  # in which a mutant must be found
KINDS = {
    "lost": ("not ended", "lost"),
    "wrong": ("wrong tokens", "wrong KV"),
    "leaks": ("at rest",),
    "late_writes": ("late write",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.prove", description=__doc__)
    parser.add_argument("--schedules", type=int, default=0, help="number of schedules [as many as fit]")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for schedules without a number [%(default)s]")
    parser.add_argument("--first", type=int, default=0, help="first seed [%(default)s]")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="schedules at a time [%(default)s]")
    parser.add_argument(
        "--mutants",
        nargs="?",
        const="also",
        choices=("also", "only"),
        help="find the mutants in tests/tools/prove/mutants, too; only: run no other schedules",
    )
    parser.add_argument("--mutant", type=Path, help="patch of the roles' source to run with")
    parser.add_argument("--replay", type=int, help="run one seed, and print its story")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the results, each with date and commit; others in it stay"
    )
    given = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    load(given.mutant.read_text(encoding="utf-8") if given.mutant is not None else "")
    if given.replay is not None:
        return _replay(given.replay)
    parts: dict[str, dict[str, Any]] = {}
    if given.mutants != "only":
        stop_at_first = given.mutant is not None
        parts["schedules"] = _prove(
            given.schedules, given.seconds, given.first, given.processes, stop_at_first=stop_at_first
        )
        _record(given.out, parts)
    if given.mutants:
        parts["mutants"] = _find_mutants(given.processes)
        _record(given.out, parts)
    result = {name: value for part in parts.values() for name, value in part.items()}
    print(json.dumps(result))
    survived = result.get("mutants", 0) - result.get("mutants_killed", 0)
    return 1 if result.get("failing_seeds") or survived else 0


def _record(out: Path | None, parts: dict[str, dict[str, Any]]) -> None:
    """Write the parts of the result into the file, in place of those that it has."""
    if out is None:
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    head = {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}
    recorded = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    recorded |= {name: {**head, **part} for name, part in parts.items()}
    out.write_text(json.dumps(recorded, indent=2) + "\n", encoding="utf-8")


def _replay(seed: int) -> int:
    [outcome] = run_all([Job(seed)], 1)
    print("\n".join(outcome["story"]))
    for problem in outcome["problems"]:
        print(f"PROBLEM {problem}")
    del outcome["story"]
    print(json.dumps(outcome))
    return 1 if outcome["problems"] else 0


def _prove(schedules: int, seconds: float, first: int, processes: int, *, stop_at_first: bool) -> dict[str, Any]:
    began_s, shown_s = time.monotonic(), 0.0
    numbers = dict.fromkeys(("schedules", "events", "finished", "placed again", "refused", "excused", "faults"), 0)
    kinds, failing, unknown = dict.fromkeys(KINDS, 0), list[int](), 0

    def enough() -> bool:
        is_over = not schedules and time.monotonic() - began_s >= seconds
        return is_over or (stop_at_first and bool(failing))

    seeds = range(first, first + schedules) if schedules else itertools.count(first)
    for outcome in run_all((Job(seed) for seed in seeds), processes, enough):
        numbers["schedules"] += 1
        numbers["events"] += outcome.get("events", 0)
        for name, count in outcome["counts"].items():
            numbers[name] = numbers.get(name, 0) + count
        if outcome["problems"]:
            failing.append(outcome["seed"])
            for problem in outcome["problems"]:
                print(f"seed {outcome['seed']}: {problem}", flush=True)
                found = [kind for kind, words in KINDS.items() if problem.startswith(words)]
                for kind in found:
                    kinds[kind] += 1
                unknown += not found
            if not stop_at_first and len(failing) == 1:
                _tell(outcome)
        if time.monotonic() - shown_s > 5:
            shown_s = time.monotonic()
            print(f"{numbers['schedules']} schedules, {len(failing)} with problems", file=sys.stderr, flush=True)
    return {
        **numbers,
        **kinds,
        "other": unknown,
        "failing_seeds": failing,
        "seconds": round(time.monotonic() - began_s, 1),
    }


def _tell(outcome: dict[str, Any]) -> None:
    """Print the story of the smallest schedule with the problem."""
    names = [f"r{i}" for i in range(outcome["counts"].get("requests", 0))]

    def run(job: Job) -> dict[str, Any]:
        [found] = run_all([job], 1)
        return found

    job, smallest = shrink(Job(outcome["seed"]), outcome, outcome["counts"].get("faults", 0), names, run)
    print("\n".join(smallest["story"]))
    print(f"without faults {sorted(job.without_faults)} and requests {sorted(job.without_requests)}:")
    print("\n".join(smallest["problems"]), flush=True)


def _find_mutants(processes: int) -> dict[str, Any]:
    """Run each mutant until a schedule finds it."""
    needed: dict[str, int | None] = {}
    for path in sorted(MUTANTS.glob("*.patch")):
        command = [sys.executable, "-m", "tools.prove", "--mutant", str(path), "--schedules", str(MOST_SCHEDULES)]
        ended = subprocess.run([*command, "--processes", str(processes)], capture_output=True, text=True)
        try:
            found = json.loads(ended.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            raise SystemExit(f"{path.name}: the run failed:\n{ended.stderr[-2000:]}") from None
        for outcome in run_all(map(Job, found["failing_seeds"]), processes):  # without the mutant
            if outcome["problems"]:
                raise SystemExit(f"seed {outcome['seed']}: {outcome['problems'][0]}, without {path.name}, too")
        needed[path.stem] = found["schedules"] if found["failing_seeds"] else None
        print(f"{path.stem}: {needed[path.stem] or 'SURVIVED'}", file=sys.stderr, flush=True)
    killed = [count for count in needed.values() if count is not None]
    return {
        "mutants": len(needed),
        "mutants_killed": len(killed),
        "median_schedules_to_kill": statistics.median(killed) if killed else None,
        "schedules_to_kill": needed,
    }


if __name__ == "__main__":
    sys.exit(main())
