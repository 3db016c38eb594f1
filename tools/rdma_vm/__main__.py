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
    build = actions.add_parser("build", help="build and cache the image, if it is not there")
    test = actions.add_parser("test", help="the messenger's tests over rdma, in one VM and between two")
    test.add_argument("--one", action="store_true", help="in one VM only")
    soak = actions.add_parser("soak", help="load and faults for the messenger over rdma, in one VM")
    soak.add_argument("--seconds", type=float, default=600.0, help="of load (%(default)g)")
    soak.add_argument("--seed", type=int, help="of sizes, shapes and trouble; drawn if not given")
    run = actions.add_parser("run", help="run a command in the VM, at the repository's root")
    for action in (build, test, soak, run):
        beside = " beside the soak's own" if action is soak else ""
        action.add_argument("--timeout", type=float, default=2400.0, help=f"seconds for all{beside} (%(default)g)")
    run.add_argument(
        "--two", action="store_true", help="two VMs; each runs the command, RDMA_VM_ROLE tells which it is"
    )
    run.add_argument(
        "--rails", type=int, default=2, help="soft-RoCE devices per VM, each in its own subnet (%(default)d)"
    )
    run.add_argument("--memory", type=int, default=1536, help="MiB per VM (%(default)d)")
    run.add_argument(
        "--count", action="store_true", help="one processor, whose clock counts instructions, one a nanosecond"
    )
    run.add_argument("--results", type=Path, help="a folder that the command may write to, as $RDMA_VM_RESULTS")
    run.add_argument("command", nargs="+", help="the command, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
