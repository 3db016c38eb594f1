"""What `make test-rdma` runs: the messenger's behaviour over rdma in one VM, then between two; and its core alone."""

from collections.abc import Sequence

from rdma_bed.bed import Bed, Shape
from rdma_bed.progress import Deadline, say

# Emulation is slow and machines are shared: every time limit of the tests times this.
_PATIENCE = 6
# Each test has a limit of its own; this one ends a run of many slow tests in time to tell what failed.
_SESSION_LIMIT_S = 900
_CORE_LIMIT_S = 300
_CORE = (
    "tests/messenger/rdma/device",
    *(f"tests/messenger/behaviour/test_{subject}.py" for subject in ("content", "fencing")),
)
"""What only a verbs device can tell, in minutes: bytes, rights, fences, rails that fail."""


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


def run(bed: Bed, deadline: Deadline, *, core: bool) -> int:
    """The first exit status that is not 0; `core`: of the core in one VM only.

    Raises BedError.
    """
    if core:
        say("the core of the messenger's tests over a verbs device")
        return bed.run(["sh", "-c", _one_host(_CORE_LIMIT_S, _CORE)], Shape(), deadline)
    steps = (
        ("over a verbs device", _one_host(_SESSION_LIMIT_S, ["tests/messenger"]), Shape()),
        ("between two hosts", _TWO_HOSTS, Shape(num_machines=2, memory_mib=1024)),
    )
    for name, script, shape in steps:
        say(f"the messenger's tests {name}")
        status = bed.run(["sh", "-c", script], shape, deadline)
        if status:
            return status
    return 0
