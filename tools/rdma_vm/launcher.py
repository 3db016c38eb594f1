"""Run of a command in the test VM: image, environment, boot, and exit status."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.rdma_vm import machine, qemu
from tools.rdma_vm.errors import BootFailed
from tools.rdma_vm.image import Image, provide
from tools.rdma_vm.progress import Deadline, say
from tools.rdma_vm.tools import Tools, check_host

REPOSITORY = Path(__file__).resolve().parents[2]
# The pytest plugins that the tests need; loading all installed ones takes half a minute in an emulated machine.
_PYTEST_PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "tools.rdma_vm.strict_pytest")


@dataclass(frozen=True)
class VmShape:
    """Number and size of the VMs. `results`: folder of the host that the command may write to."""

    num_machines: int = 1
    num_rails: int = 2
    memory_mib: int = 1536
    results: Path | None = None
    num_cpus: int = 2
    """Two emulated CPUs mostly wait for each other; a single one saves a third of the time."""
    counts: bool = False
    """The clock counts instructions (`qemu.Guest`)."""


@dataclass(frozen=True)
class SoftRoceVm:
    """Test VM that is ready to boot."""

    image: Image
    tools: Tools
    cache: Path

    @classmethod
    def made(cls, deadline: Deadline) -> "SoftRoceVm":
        """Build the image and fetch the tools if they are not in the cache folder.

        The cache folder is $RDMA_VM_CACHE or `.rdma_vm` in the repository. Raises VmError.
        """
        check_host()
        cache = Path(os.environ.get("RDMA_VM_CACHE") or REPOSITORY / ".rdma_vm").resolve()
        image, tools = provide(cache, deadline)
        return cls(image, tools, cache)

    def run(self, command: Sequence[str], shape: VmShape, deadline: Deadline) -> int:
        """Boot, run the command in every VM with its output on standard output, and return its exit status.

        With two VMs, returns the first nonzero status; 125 if a VM reported none. Raises VmError.
        """
        _compile(deadline)
        cpus = 1 if shape.counts else min(os.cpu_count() or 1, shape.num_cpus)
        guests = [
            qemu.Guest(number, shape.num_machines, shape.num_rails, shape.memory_mib, cpus, shape.counts)
            for number in range(shape.num_machines)
        ]
        jobs = [qemu.job_script(command, REPOSITORY, _environment(guest, shape)) for guest in guests]
        plan = machine.VmPlan(guests, jobs, _mounts(shape), self.image, self.tools, self.cache)
        say(f"booting {len(guests)} VM{'s' if len(guests) > 1 else ''}")
        outcome = _run(plan, deadline)
        say(f"booted in {outcome.boot_s:.1f} s, ran {outcome.command_s:.1f} s, status {outcome.status}")
        return outcome.status


def _run(plan: machine.VmPlan, deadline: Deadline) -> machine.VmOutcome:
    """Boot with KVM, or without if a boot with KVM fails or the clock counts instructions."""
    accelerator = "tcg" if plan.guests[0].counts else os.environ.get("RDMA_VM_ACCEL", "auto")
    if accelerator == "kvm" or (accelerator == "auto" and machine.kvm_is_usable()):
        try:
            return machine.run(plan, True, deadline, sys.stdout.buffer)
        except BootFailed as error:
            if accelerator == "kvm":
                raise
            say(f"booting with KVM failed, retrying without: {error.reason}")
    return machine.run(plan, False, deadline, sys.stdout.buffer)


def _compile(deadline: Deadline) -> None:
    """Compile the Python modules on the host; the guest cannot store them and would compile in every process."""
    folders = [REPOSITORY / "proto", *(path.parent for path in REPOSITORY.glob("*/__init__.py"))]
    try:
        subprocess.run([sys.executable, "-m", "compileall", "-q", *folders], timeout=deadline.left())
    except subprocess.TimeoutExpired:
        raise deadline.error("compiling the repository") from None


def _packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"]).resolve()


def _mounts(shape: VmShape) -> list[qemu.Mount]:
    mounts = [qemu.Mount(REPOSITORY, REPOSITORY)]
    if not _packages().is_relative_to(REPOSITORY):
        mounts.append(qemu.Mount(_packages(), _packages()))
    if shape.results is not None:
        shape.results.mkdir(parents=True, exist_ok=True)
        mounts.append(qemu.Mount(shape.results.resolve(), Path("/results"), writable=True))
    return mounts


def _environment(guest: qemu.Guest, shape: VmShape) -> dict[str, str]:
    found = {
        "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'proto'}:{_packages()}",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": ",".join(_PYTEST_PLUGINS),
        "PYTEST_ADDOPTS": "-o cache_dir=/tmp/pytest",
        **guest.environment(),
    }
    return found | ({"RDMA_VM_RESULTS": "/results"} if shape.results is not None else {})
