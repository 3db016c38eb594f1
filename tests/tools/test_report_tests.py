"""`.ci/report_tests.py` records the cells of the live matrix run by run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CASE = (
    """<testcase file="tests/e2e/test_live_matrix.py" name="one" time="12.34"><properties>{}</properties></testcase>"""
)
CELL = """<property name="live matrix: {}: {}: {}" value="{}"/>"""


def report(folder: Path, *cells: tuple[str, str, str, str]) -> dict[str, dict[str, dict[str, object]]]:
    """Return the recorded matrix after a run of one test with these cells."""
    case = CASE.format("".join(CELL.format(*cell) for cell in cells))
    (folder / "run.xml").write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    command = [
        sys.executable,
        ".ci/report_tests.py",
        str(folder / "run.xml"),
        "--live-matrix",
        str(folder / "matrix.json"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    matrix: dict[str, dict[str, dict[str, object]]] = json.loads((folder / "matrix.json").read_text())
    return matrix


def test_a_run_of_the_live_matrix_replaces_its_own_cells_only(tmp_path: Path) -> None:
    report(tmp_path, ("native", "hang", "greedy", "equal"), ("native", "hang", "n &gt; 1", "equal"))
    report(tmp_path, ("vLLM", "kill pool", "greedy", "equal"))
    matrix = report(tmp_path, ("native", "hang", "greedy", "equal, resumed"))
    assert matrix["native"]["hang"]["cells"] == {"greedy": "equal, resumed"}
    assert matrix["native"]["hang"]["seconds"] == 12.3
    assert matrix["vLLM"]["kill pool"]["cells"] == {"greedy": "equal"}
