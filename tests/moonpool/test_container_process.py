"""Told to end, a container's first process ends, also while it still imports."""

import shutil
import subprocess
import sys

import pytest

UNSHARE = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
AS_THE_FIRST = [*UNSHARE, sys.executable, "-c"]


@pytest.fixture(scope="module")
def can_be_first() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("no unshare")
    tried = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode:
        pytest.skip(f"this machine makes no namespaces: {tried.stderr}")


@pytest.mark.usefixtures("can_be_first")
@pytest.mark.parametrize(("imports", "status"), [("moonpool", 143), ("sys", 7)])
def test_the_first_process_of_a_container_is_ended_by_a_signal_before_it_serves(imports: str, status: int) -> None:
    """Without Moonpool's handler, which the second case shows, the kernel drops it."""
    script = f"import {imports}, os, signal; os.kill(os.getpid(), signal.SIGTERM); os._exit(7)"
    ended = subprocess.run([*AS_THE_FIRST, script], capture_output=True, timeout=100, check=False)
    assert ended.returncode == status, ended.stderr
