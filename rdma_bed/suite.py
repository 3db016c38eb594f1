"""What `make test-rdma` runs: the messenger's behaviour over rdma in one VM, then between two."""

from rdma_bed.bed import Bed, Shape
from rdma_bed.progress import Deadline, say

# Emulation is slow and machines are shared: every time limit of the tests times this.
_PATIENCE = 6
# Each test has a limit of its own; this one ends a run of many slow tests in time to tell what failed.
_SESSION_LIMIT_S = 600
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
case $RDMA_BED_ROLE in
first) {_PYTEST} tests/messenger/rdma/two_hosts ;;
second) python3 tests/messenger/rdma/two_hosts/other_host.py ;;
esac
"""


def run(bed: Bed, deadline: Deadline) -> int:
    """The first exit status that is not 0.

    Raises BedError.
    """
    steps = (
        ("over a verbs device", _ONE_HOST, Shape()),
        ("between two hosts", _TWO_HOSTS, Shape(num_machines=2, memory_mib=1024)),
    )
    for name, script, shape in steps:
        say(f"the messenger's tests {name}")
        status = bed.run(["sh", "-c", script], shape, deadline)
        if status:
            return status
    return 0
