"""Inside the VM nothing may be skipped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rdma_bed import bed


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("def test_runs(): pass", 0),
        ("import pytest\ndef test_skips(): pytest.skip('no device')", 1),
        ("import pytest\n@pytest.mark.skip\ndef test_is_skipped(): pass", 1),
        ("import pytest\n@pytest.mark.xfail\ndef test_is_known_to_fail(): assert False", 0),
        ("import pytest\npytest.importorskip('no_such_module')\ndef test_runs(): pass", 2),
    ],
)
def test_what_skips_itself_fails(tmp_path: Path, text: str, status: int) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_file.py").write_text(text)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(bed.REPOSITORY)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "rdma_bed.strict_pytest", str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == status, done.stdout
