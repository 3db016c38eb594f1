"""A short chaos test with a fixed seed: real faults, no lost request, no wrong token, nothing left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SEED = 11
KINDS = "kill,pause_short,pause_long,cut_frontend_conductor,cut_prefill_decode,disk_errors,disk_full,clock_jump"


@pytest.mark.nightly
def test_a_cluster_under_faults_loses_no_request_and_answers_no_wrong_token(namespaces: None, tmp_path: Path) -> None:
    arguments = ["--seconds", "44", "--seed", str(SEED), "--engines", "paced", "--kinds", KINDS, "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "tools.chaos", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=280,
    )
    report = json.loads(done.stdout.splitlines()[-1])
    assert [line for line in done.stdout.splitlines() if line.startswith("DEFECT")] == []
    found = {name: report[name] for name in ("lost", "wrong_tokens", "wrong_answers", "leaks", "unexpected")}
    assert found == dict.fromkeys(found, 0)
    assert done.returncode == 0
    assert report["kills"] >= 4
    assert sum(report["faults"].values()) >= 8
    assert report["unsupported_faults"] == {}
    assert report["completed"] >= 50
    assert report["verified_tokens"] > 1000
    assert "Chaos test" in (tmp_path / "report.html").read_text()
