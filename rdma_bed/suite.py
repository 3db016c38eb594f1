"""What `make test-rdma` runs: the messenger's behaviour over rdma in one VM, then between two."""

from rdma_bed.bed import Bed, Shape
from rdma_bed.progress import Deadline, say

# Emulation is slow, and the machines are shared: every limit of the tests times this.
_PATIENCE = 6
# A test that failed is run once more, as in .ci/run: what fails twice has failed.
_ONE = f"""
pytest="python3 -m pytest -q --color=no --transport rdma --patience {_PATIENCE} --durations 10"
$pytest tests/messenger && exit 0
[ $? = 1 ] || exit
echo "== FAILED above; the failed tests once more"
$pytest --last-failed --last-failed-no-failures none tests/messenger
"""
_TWO = f"""
case $RDMA_BED_ROLE in
first) python3 -m pytest -q --color=no --patience {_PATIENCE} tests/messenger/rdma/two_hosts ;;
second) python3 tests/messenger/rdma/two_hosts/other_host.py ;;
esac
"""


def run(bed: Bed, deadline: Deadline) -> int:
    """The first exit status that is not 0.

    Raises BedError.
    """
    steps = (("over a verbs device", _ONE, Shape()), ("between two hosts", _TWO, Shape(num_machines=2)))
    for name, script, shape in steps:
        say(f"the messenger's tests {name}")
        status = bed.run(["sh", "-c", script], shape, deadline)
        if status:
            return status
    return 0
