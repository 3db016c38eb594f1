"""What `make test-rdma` runs: the messenger's tests over rdma in one VM, then between two; its core alone; a soak."""

import os
import subprocess
import sys
from collections.abc import Sequence

from rdma_bed.bed import REPOSITORY, Bed, Shape
from rdma_bed.progress import Deadline, say

# Emulation is slow and machines are shared: every time limit of the tests times this.
_PATIENCE = 6
# Each test has a limit of its own; this one ends a run of many slow tests in time to tell what failed.
_SESSION_LIMIT_S = 900
_CORE_LIMIT_S = 600
_SUBJECTS = ("content", "order", "fencing", "deadlines", "death", "connections", "survival", "machine")
_CORE = ("tests/messenger/rdma/device", *(f"tests/messenger/behaviour/test_{subject}.py" for subject in _SUBJECTS))
"""What only a verbs device can tell, in minutes: bytes, order, rights, fences, ends of peers, connections and rails."""

# As much as an emulated machine can move, and trouble that leaves it time to recover.
_SOAKED = "--peers 3 --workers 1 --slot-kib 256 --trouble-every-s 6"


def _pytest(limit_s: int) -> str:
    return (
        f"python3 -m pytest -v --tb=short --color=no --durations=10 --session-timeout={limit_s} "
        f"--transport=rdma --patience={_PATIENCE}"
    )


def _one_host(limit_s: int, paths: Sequence[str]) -> str:
    """What fails is run once more, in the same boot: what fails twice has failed."""
    pytest, where = _pytest(limit_s), " ".join(paths)
    return f"""
{pytest} {where} && exit 0
[ $? = 1 ] || exit 1
echo "== FAILED above; the failed tests once more"
{pytest} --last-failed --last-failed-no-failures=none {where}
"""


_TWO_HOSTS = f"""
case $RDMA_BED_ROLE in
first) {_pytest(_SESSION_LIMIT_S)} tests/messenger/rdma/two_hosts ;;
second) python3 tests/messenger/rdma/two_hosts/other_host.py ;;
esac
"""


def soak(bed: Bed, deadline: Deadline, seconds: float, seed: int | None) -> int:
    """The exit status of the messenger's soak over rdma; its report is the last line of standard output.

    Raises BedError.
    """
    say(f"the messenger's soak over verbs devices, {seconds:g} s")
    command = f"python3 -m soak --transport rdma --seconds {seconds:g} --patience {_PATIENCE} {_SOAKED}"
    return bed.run([*command.split(), *([] if seed is None else ["--seed", str(seed)])], Shape(), deadline)


def run(bed: Bed, deadline: Deadline, *, core: bool) -> int:
    """The first exit status that is not 0; `core`: of the core in one VM only.

    Raises BedError.
    """
    _compile(deadline)
    if core:
        say("the core of the messenger's tests over a verbs device")
        return bed.run(["sh", "-c", _one_host(_CORE_LIMIT_S, _CORE)], Shape(num_cpus=1), deadline)
    steps = (
        ("over a verbs device", _one_host(_SESSION_LIMIT_S, ["tests/messenger"]), Shape(num_cpus=1)),
        ("between two hosts", _TWO_HOSTS, Shape(num_machines=2, memory_mib=1024, num_cpus=1)),
    )
    for name, script, shape in steps:
        say(f"the messenger's tests {name}")
        status = bed.run(["sh", "-c", script], shape, deadline)
        if status:
            return status
    return 0


def _compile(deadline: Deadline) -> None:
    """Collect the tests here: pytest keeps what it makes of them, which would take an emulated machine a minute."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/messenger"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, timeout=deadline.left())
    except subprocess.TimeoutExpired:
        raise deadline.error("collecting the tests") from None
