"""Command line: `python -m tools.rdma_vm run [--two] -- COMMAND` runs a command inside a VM with soft-RoCE devices.

The exit status is the command's, or 125 if the VM reported none (crash, deadline) or could not be built or booted.
"""

import argparse
import sys
from pathlib import Path

from tools.rdma_vm import machine, qemu, suite
from tools.rdma_vm.errors import VmError
from tools.rdma_vm.launcher import SoftRoceVm, VmShape
from tools.rdma_vm.progress import Deadline, say


def main() -> int:
    """Run the program and return its exit status."""
    options = _parser().parse_args()
    machine.end_on_signals()
    deadline = Deadline.after(options.timeout + (options.seconds if options.action == "soak" else 0.0))
    try:
        vm = SoftRoceVm.made(deadline)
        if options.action == "run":
            shape = VmShape(
                2 if options.two else 1, options.rails, options.memory, options.results, counts=options.count
            )
            return vm.run(options.command, shape, deadline)
        if options.action == "soak":
            return suite.soak(vm, deadline, options.seconds, options.seed)
        return suite.run(vm, deadline, one=options.one) if options.action == "test" else 0
    except VmError as error:
        say(f"{type(error).__name__}: {error}")
        return qemu.STATUS_NONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.rdma_vm", description="A VM with soft-RoCE devices.")
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="build the image if it is not cached")
    test = actions.add_parser("test", help="run the messenger's tests over RDMA, in one VM and between two")
    test.add_argument("--one", action="store_true", help="run the tests in one VM only")
    soak = actions.add_parser("soak", help="run the messenger's soak test over RDMA, in one VM")
    soak.add_argument("--seconds", type=float, default=600.0, help="duration of the load (%(default)g)")
    soak.add_argument("--seed", type=int, help="random seed of sizes, shapes and faults; random if not given")
    run = actions.add_parser("run", help="run a command in the VM, in the repository's root")
    for action in (build, test, soak, run):
        beside = " in addition to --seconds" if action is soak else ""
        action.add_argument(
            "--timeout", type=float, default=2400.0, help=f"total timeout in seconds{beside} (%(default)g)"
        )
    run.add_argument(
        "--two", action="store_true", help="start two VMs that both run the command; RDMA_VM_ROLE distinguishes them"
    )
    run.add_argument(
        "--rails", type=int, default=2, help="soft-RoCE devices per VM, each in its own subnet (%(default)d)"
    )
    run.add_argument("--memory", type=int, default=1536, help="MiB per VM (%(default)d)")
    run.add_argument(
        "--count", action="store_true", help="use one CPU whose clock advances by one nanosecond per instruction"
    )
    run.add_argument("--results", type=Path, help="folder writable by the command, as $RDMA_VM_RESULTS")
    run.add_argument("command", nargs="+", help="command to run, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
