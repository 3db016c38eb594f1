"""`make gpu-proof` says clearly when nothing was run, and its status tells what happened."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tools import gpu_proof

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_run_and_the_status_is_3() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.gpu_proof"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert "NOTHING WAS RUN, and nothing is proven: torch" in done.stderr
    assert not done.stdout


LATE = subprocess.TimeoutExpired("it", 600.0)


@pytest.mark.parametrize(
    ("tests", "measured", "status"), [(0, 0, 0), (1, 0, 1), (5, 0, 1), (LATE, 0, 1), (0, 1, 1), (0, LATE, 1)]
)
def test_the_status_is_that_of_the_tests_and_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    tests: Any,
    measured: Any,
    status: int,
) -> None:
    def run(command: list[str], **options: Any) -> SimpleNamespace:
        is_measurement = command[1:] == ["benchmarks/engine_gpu.py"]
        if not is_measurement:
            assert command[1:5] == ["-m", "pytest", "-m", "not nightly"]
            assert "tests/gpu" in command
        assert options["timeout"] == 600
        outcome = measured if is_measurement else tests
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(returncode=outcome, stdout='something else\n{"device": "GPU"}\n')

    monkeypatch.setattr(gpu_proof, "missing_gpu", lambda: "")
    monkeypatch.setattr(gpu_proof, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(gpu_proof.subprocess, "run", run)
    assert gpu_proof.main([]) == status
    assert ("FAILED" in capsys.readouterr().err) == bool(status)
    if not status:
        assert (tmp_path / "out" / "engine-gpu.json").read_text() == '{"device": "GPU"}\n'


def test_tests_on_a_gpu_are_selected_by_their_marker_only() -> None:
    def selected(*arguments: str) -> str:
        command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "-q", "tests/gpu", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout

    assert "no tests collected" in selected()
    assert "deselected" not in selected("-m", "gpu")
