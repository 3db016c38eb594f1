"""Report on test runs from their JUnit files: the slowest test files, and the tests that passed only when run again.

    python .ci/report_tests.py FIRST.xml [SECOND.xml] [--with OTHER.xml] [--record FILE] [--live-matrix FILE]

FIRST is the whole run, OTHER a part of it that ran in another environment, SECOND the run of its failed tests alone.
Prints the ten slowest files of the run, and `FLAKY name` for each test that failed in it and passed in SECOND. Exits
with 1 when a test failed and did not pass in SECOND, and when FIRST or OTHER names no test. With --record, the outcome
is written to FILE as JSON, with the date and the commit. With --live-matrix, the cells that the tests of the live
matrix have recorded replace those of the same engines and faults in FILE.
"""

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

NUM_SLOWEST = 10
CELL = "live matrix: "  # begins the name of a recorded cell: engine, fault and kind of request follow


def main(
    first: Path, second: Path | None, other: Path | None, record: Path | None = None, live_matrix: Path | None = None
) -> int:
    cases = list[ElementTree.Element]()
    for path in filter(None, (first, other)):
        found = list(ElementTree.parse(path).iter("testcase"))
        if not found:
            print(f"{path} names no test: expected the JUnit file of a run that executed tests")
            return 1
        cases += found
    per_file: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        per_file[name_of(case).split("::")[0]].append(float(case.get("time", "0")))
    slowest = sorted(per_file.items(), key=lambda item: -sum(item[1]))[:NUM_SLOWEST]
    print(f"== the {len(slowest)} slowest of {len(per_file)} test files, {len(cases)} tests in all")
    for file, seconds in slowest:
        print(f"{sum(seconds):8.1f} s  {len(seconds):4d} tests  {file}")
    failed = {name_of(case) for case in cases if has_failed(case)}
    again = list(ElementTree.parse(second).iter("testcase")) if second else []
    failed_again = {name_of(case) for case in again if has_failed(case)}
    flaky = failed & ({name_of(case) for case in again} - failed_again)
    for name in sorted(flaky):
        print(f"FLAKY {name}")
    for name in sorted(failed - flaky):
        print(f"FAILED {name}")
    if record:
        write_record(record, cases, failed - flaky)
    if live_matrix:
        write_live_matrix(live_matrix, cases)
    return int(bool(failed - flaky))


def write_record(path: Path, cases: list[ElementTree.Element], failed: set[str]) -> None:
    """Write date, commit, counts and durations of a run; the names of what failed are among them."""
    outcome = {
        **date_and_commit(),
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": sorted(failed),
        "seconds": {name_of(case): round(float(case.get("time", "0")), 1) for case in cases},
    }
    path.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")


def write_live_matrix(path: Path, cases: list[ElementTree.Element]) -> None:
    """Write the cells of each run of the live matrix, with its date, commit and duration, by engine and fault."""
    matrix = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for case in cases:
        cells = dict[str, str]()
        for recorded in case.iter("property"):
            name, value = recorded.get("name", ""), recorded.get("value", "")
            if name.startswith(CELL):
                engine, fault, kind = name.removeprefix(CELL).split(": ")
                cells[kind] = value
        if cells:
            run = {**date_and_commit(), "seconds": round(float(case.get("time", "0")), 1), "cells": cells}
            matrix.setdefault(engine, {})[fault] = run
    path.write_text(json.dumps(matrix, indent=2) + "\n", encoding="utf-8")


def date_and_commit() -> dict[str, str]:
    """Return today's date, in UTC, and the commit that is checked out."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit.stdout.strip()}


def name_of(case: ElementTree.Element) -> str:
    """Return `file::test`, or `module::test` of a test whose code stands in a library (Hypothesis's state machines)."""
    file = case.get("file") or ""
    return f"{file if file.startswith('tests/') else case.get('classname')}::{case.get('name')}"


def has_failed(case: ElementTree.Element) -> bool:
    """A test that did not end, or whose fixtures broke, has failed, too."""
    return case.find("failure") is not None or case.find("error") is not None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Report the slowest test files and the flaky tests.")
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path, nargs="?")
    parser.add_argument("--with", dest="other", type=Path)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--live-matrix", type=Path)
    given = parser.parse_args()
    sys.exit(main(given.first, given.second, given.other, given.record, given.live_matrix))
