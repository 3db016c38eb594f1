"""Runs behind `make test-rdma` and `make soak-rdma`: the messenger's tests in one VM, then between two; a soak."""

import os
import subprocess
import sys

from tools.rdma_vm.launcher import REPOSITORY, SoftRoceVm, VmShape
from tools.rdma_vm.progress import Deadline, say

# Emulation is slow and machines are shared: every time limit of the tests times this.
_PATIENCE = 6
# Each test has a limit of its own; this one ends a run of many slow tests in time to tell what failed.
_SESSION_LIMIT_S = 900

# As much as an emulated machine can move, and trouble that leaves it time to recover.
_SOAKED = "--peers 3 --workers 1 --slot-kib 256 --trouble-every-s 6"


_PYTEST = (
    f"python3 -m pytest -v --tb=short --color=no --durations=10 --session-timeout={_SESSION_LIMIT_S} "
    f"--transport=rdma --patience={_PATIENCE}"
)
# What fails is run once more, in the same boot: what fails twice has failed.
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
    """Run the messenger's soak over rdma and return its exit status; its report is the last line of standard output.

    Raises VmError.
    """
    say(f"the messenger's soak over verbs devices, {seconds:g} s")
    command = f"python3 -m soak --transport rdma --seconds {seconds:g} --patience {_PATIENCE} {_SOAKED}"
    return vm.run([*command.split(), *([] if seed is None else ["--seed", str(seed)])], VmShape(), deadline)


def run(vm: SoftRoceVm, deadline: Deadline, *, one: bool) -> int:
    """Run the tests and return the first exit status that is not 0; `one` limits them to one VM.

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
    """Collect the tests here, so that pytest stores its compiled modules; an emulated machine would need a minute."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/messenger"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, timeout=deadline.left())
    except subprocess.TimeoutExpired:
        raise deadline.error("collecting the tests") from None
