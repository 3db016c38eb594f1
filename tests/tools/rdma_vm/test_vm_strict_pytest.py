"""Inside the VM nothing may be skipped, nor be left out unnoticed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.rdma_vm import launcher


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
    assert _status_of(tmp_path, text) == status


def test_a_run_cut_short_by_its_limit_does_not_pass_for_one_in_which_tests_failed(tmp_path: Path) -> None:
    """For those that failed are run again, and then the run is taken for whole."""
    text = "import time\ndef test_fails(): assert False\ndef test_is_slow(): time.sleep(1.1)\ndef test_is_left(): pass"
    assert _status_of(tmp_path, text, "-p", "pytest_timeout", "--session-timeout=1") == 2


def _status_of(folder: Path, text: str, *options: str) -> int:
    (folder / "pytest.ini").touch()
    (folder / "test_file.py").write_text(text)
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(launcher.REPOSITORY)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.rdma_vm.strict_pytest", *options, str(folder)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    return done.returncode
