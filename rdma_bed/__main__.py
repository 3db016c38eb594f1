"""`python -m rdma_bed run [--two] -- COMMAND`: a command inside a VM with soft-RoCE devices.

The exit status is the command's; 125 if the VM gave none (crash, deadline) or could not be built or booted.
"""

import argparse
import os
import sys
import sysconfig
from pathlib import Path

from rdma_bed import machine, qemu
from rdma_bed.errors import BedError, BootFailed
from rdma_bed.image import provide
from rdma_bed.progress import Deadline, say
from rdma_bed.tools import check_host

_REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """The program; its exit status."""
    options = _parser().parse_args()
    machine.end_on_signals()
    deadline = Deadline.after(options.timeout)
    cache = Path(os.environ.get("RDMA_BED_CACHE") or _REPOSITORY / ".rdma_bed").resolve()
    try:
        check_host()
        image, tools = provide(cache, deadline)
        if options.action == "build":
            return 0
        count = 2 if options.two else 1
        cpus = min(os.cpu_count() or 1, 2)
        guests = [qemu.Guest(number, count, options.rails, options.memory, cpus) for number in range(count)]
        jobs = [qemu.job_script(options.command, _REPOSITORY, _environment(guest, options.results)) for guest in guests]
        outcome = _run(machine.Plan(guests, jobs, _mounts(options.results), image, tools, cache), deadline)
        say(f"booted in {outcome.boot_s:.1f} s, ran {outcome.command_s:.1f} s, status {outcome.status}")
        return outcome.status
    except BedError as error:
        say(f"{type(error).__name__}: {error}")
        return qemu.STATUS_NONE


def _run(plan: machine.Plan, deadline: Deadline) -> machine.Outcome:
    """With KVM where it works, which only a boot can tell; else without."""
    say(f"booting {len(plan.guests)} VM{'s' if len(plan.guests) > 1 else ''}")
    accelerator = os.environ.get("RDMA_BED_ACCEL", "auto")
    if accelerator == "kvm" or (accelerator == "auto" and machine.kvm_is_usable()):
        try:
            return machine.run(plan, True, deadline, sys.stdout.buffer)
        except BootFailed as error:
            if accelerator == "kvm":
                raise
            say(f"there is KVM but it does not work here, so without it: {str(error).splitlines()[-2]}")
    return machine.run(plan, False, deadline, sys.stdout.buffer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rdma_bed", description="A VM with soft-RoCE devices.")
    actions = parser.add_subparsers(dest="action", required=True)
    build = actions.add_parser("build", help="build and cache the image, if it is not there")
    run = actions.add_parser("run", help="run a command in the VM, at the repository's root")
    for action in (build, run):
        action.add_argument(
            "--timeout", type=float, default=1200.0, help="seconds for all: build, boot, command (1200)"
        )
    run.add_argument(
        "--two", action="store_true", help="two VMs, joined; each runs the command, RDMA_BED_ROLE tells which"
    )
    run.add_argument("--rails", type=int, default=2, help="soft-RoCE devices per VM, each in its own subnet (2)")
    run.add_argument("--memory", type=int, default=1536, help="MiB per VM (1536)")
    run.add_argument("--results", type=Path, help="a folder that the guest may write to, as $RDMA_BED_RESULTS")
    run.add_argument("command", nargs="+", help="the command, after --")
    return parser


def _mounts(results: Path | None) -> list[qemu.Mount]:
    packages = Path(sysconfig.get_paths()["purelib"]).resolve()
    mounts = [qemu.Mount(_REPOSITORY, _REPOSITORY)]
    if not packages.is_relative_to(_REPOSITORY):
        mounts.append(qemu.Mount(packages, packages))
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        mounts.append(qemu.Mount(results.resolve(), Path("/results"), writable=True))
    return mounts


def _environment(guest: qemu.Guest, results: Path | None) -> dict[str, str]:
    packages = Path(sysconfig.get_paths()["purelib"]).resolve()
    found = {
        "PYTHONPATH": f"{_REPOSITORY}:{_REPOSITORY / 'proto'}:{packages}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **guest.environment(),
    }
    return found | ({"RDMA_BED_RESULTS": "/results"} if results is not None else {})


if __name__ == "__main__":
    sys.exit(main())
