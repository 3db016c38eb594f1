"""Report on test runs from their JUnit files: the slowest test files, and the tests that passed only when run again.

    python .ci/report_tests.py FIRST.xml [SECOND.xml]

FIRST is the whole run, SECOND the run of its failed tests alone. Prints the ten slowest files of FIRST, and
`FLAKY name` for each test that failed in FIRST and passed in SECOND. Exits with 1 when a test failed in FIRST and did not pass in
SECOND, and when FIRST names no test.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

NUM_SLOWEST = 10


def main(first: Path, second: Path | None) -> int:
    cases = list(ElementTree.parse(first).iter("testcase"))
    if not cases:
        print(f"{first} names no test: expected the JUnit file of a run that executed tests")
        return 1
    per_file: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        per_file[case.get("file") or case.get("classname", "")].append(float(case.get("time", "0")))
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
    return int(bool(failed - flaky))


def name_of(case: ElementTree.Element) -> str:
    return f"{case.get('file') or case.get('classname')}::{case.get('name')}"


def has_failed(case: ElementTree.Element) -> bool:
    """A test that did not end, or whose fixtures broke, has failed, too."""
    return case.find("failure") is not None or case.find("error") is not None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None))
