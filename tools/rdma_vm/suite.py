"""Implementation of `make test-rdma` (the messenger's tests in one VM, then between two) and `make soak-rdma`."""

import os
import subprocess
import sys

from tools.rdma_vm.launcher import REPOSITORY, SoftRoceVm, VmShape
from tools.rdma_vm.progress import Deadline, say

# Factor of the tests' time limits, since emulation is slow and machines are shared.
_PATIENCE = 6
# Time limit of a test session, in addition to that of each test, so that failures are reported before the deadline.
_SESSION_LIMIT_S = 900

# Load that an emulated machine can handle, and faults that leave it time to recover.
_SOAKED = "--peers 3 --workers 1 --slot-kib 256 --trouble-every-s 6"


_PYTEST = (
    f"python3 -m pytest -v --tb=short --color=no --durations=10 --session-timeout={_SESSION_LIMIT_S} "
    f"--transport=rdma --patience={_PATIENCE}"
)
# Failed tests run once more in the same VM; only those that fail twice count.
_ONE_HOST = f"""
{_PYTEST} tests/messenger && exit 0
[ $? = 1 ] || exit 1
echo "== FAILED above; the failed tests once more"
{_PYTEST} --last-failed --last-failed-no-failures=none tests/messenger
"""

_TWO_HOSTS = f"""
case $RDMA_VM_ROLE in
first) {_PYTEST} tests/messenger/rdma/two_hosts ;;
second) python3 tests/messenger/rdma/two_hosts/other_host.py ;;
esac
"""


def soak(vm: SoftRoceVm, deadline: Deadline, seconds: float, seed: int | None) -> int:
    """Run the messenger's soak over RDMA and return its exit status; the last line of standard output is its report.

    Raises VmError.
    """
    say(f"the messenger's soak over verbs devices, {seconds:g} s")
    command = f"python3 -m tools.soak --transport rdma --seconds {seconds:g} --patience {_PATIENCE} {_SOAKED}"
    return vm.run([*command.split(), *([] if seed is None else ["--seed", str(seed)])], VmShape(), deadline)


def run(vm: SoftRoceVm, deadline: Deadline, *, one: bool) -> int:
    """Run the tests and return the first nonzero exit status, else 0; `one` skips those between two VMs.

    Raises VmError.
    """
    _compile(deadline)
    steps = [("over a verbs device", _ONE_HOST, VmShape(num_cpus=1))]
    if not one:
        steps.append(("between two hosts", _TWO_HOSTS, VmShape(num_machines=2, memory_mib=1024, num_cpus=1)))
    for name, script, shape in steps:
        say(f"the messenger's tests {name}")
        status = vm.run(["sh", "-c", script], shape, deadline)
        if status:
            return status
    return 0


def _compile(deadline: Deadline) -> None:
    """Collect the tests on the host, so that pytest caches compiled modules; this takes a minute when emulated."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/messenger"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, timeout=deadline.left())
    except subprocess.TimeoutExpired:
        raise deadline.error("collecting the tests") from None
