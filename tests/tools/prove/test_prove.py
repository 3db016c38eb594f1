"""Schedules of the whole cluster: no invariant is violated, the same seed is the same run, and mutants are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.long_cases import others_long
from tools.prove.schedule import MOMENTS

ROOT = Path(__file__).parents[3]
MUTANTS = sorted((Path(__file__).parent / "mutants").glob("*.patch"))
SECONDS = 150
PATHS = (
    *(f"moment {name}" for name in MOMENTS),
    "answers ended early",
    "grown",
    "layers loaded",
    "placed by another conductor",
    "preempted",
    "rolling windows slid",
    "tokens of grammars",
    "window steps",
)


def prove(*arguments: str, hash_seed: str = "0") -> dict[str, Any]:
    """Run the command, and return its last line of output."""
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}",
        "PYTHONHASHSEED": hash_seed,
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tools.prove", "--processes", "1", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.stdout, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.strip().splitlines()[-1])
    return found | {"output": ended.stdout}


@pytest.mark.long
def test_no_schedule_violates_an_invariant() -> None:
    found = prove("--seconds", str(SECONDS))
    assert found["failing_seeds"] == [], found["output"]
    assert found["schedules"] >= 30
    assert found["placed again"] > 10  # faults do hit running requests
    assert found["finished"] > 0.7 * found["requests"]  # the others' clients leave
    assert [path for path in PATHS if not found.get(path)] == []


@pytest.mark.parametrize("seed", others_long(["3", "41", "58", "106"], ["3"]))
def test_a_seed_is_the_same_run_in_another_process(seed: str) -> None:
    runs = [prove("--replay", seed, hash_seed=hash_seed) for hash_seed in ("1", "2")]
    assert runs[0]["events"] > 100
    assert runs[0]["digest"] == runs[1]["digest"]
    assert runs[0]["output"] == runs[1]["output"]


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: path.stem)
def test_a_mutant_still_applies(path: Path) -> None:
    applied = subprocess.run(["git", "apply", "--check", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert applied.returncode == 0, applied.stderr


@pytest.mark.parametrize("name", others_long(["choice_lost", "indexed_before_computed"], ["choice_lost"]))
def test_a_mutant_is_found(name: str) -> None:
    found = prove("--mutant", str(Path(__file__).parent / "mutants" / f"{name}.patch"), "--schedules", "20")
    assert found["failing_seeds"]
    assert "seed" in found["output"]
