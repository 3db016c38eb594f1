"""Running VMs: one process each, with streamed output, a common deadline, an exit status, and complete clean-up."""

import contextlib
import fcntl
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.rdma_vm import qemu
from tools.rdma_vm.errors import BootFailed, VmDeadlineExceeded
from tools.rdma_vm.image import Image
from tools.rdma_vm.progress import Deadline, say
from tools.rdma_vm.tools import Tools, require_program

# With KVM a boot takes seconds; if it hangs, as with some nested KVM, the caller retries without.
_BOOT_LIMIT_S, _KVM_BOOT_LIMIT_S = 300.0, 40.0
# Time that the second guest has to end after the first has failed.
_GRACE_S = 20.0
_KVM_GET_API_VERSION, _KVM_CREATE_VM, _KVM_CREATE_VCPU = 0xAE00, 0xAE01, 0xAE41


def kvm_is_usable() -> bool:
    """Return True if /dev/kvm can be opened and creates a machine with a CPU."""
    try:
        with open("/dev/kvm", "rb+", buffering=0) as device:
            fcntl.ioctl(device, _KVM_GET_API_VERSION, 0)
            machine = fcntl.ioctl(device, _KVM_CREATE_VM, 0)
            try:
                os.close(fcntl.ioctl(machine, _KVM_CREATE_VCPU, 0))
            finally:
                os.close(machine)
    except OSError:
        return False
    return True


@dataclass
class _Running:
    """Running VM with its process, folder and output."""

    guest: qemu.Guest
    process: subprocess.Popen[bytes]
    folder: Path
    label: bytes
    began_s: float
    ready_s: float | None = None
    partial: bytes = b""

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def look(self) -> None:
        """Record when the guest became ready."""
        if self.ready_s is None and (self.folder / "ready").exists():
            self.ready_s = time.monotonic() - self.began_s

    def errors(self) -> list[str]:
        """Return QEMU's error output."""
        return (self.folder / "qemu.log").read_text(errors="replace").splitlines()

    def console(self) -> str:
        """Return the output of the guest's kernel."""
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / "console.log").read_text(errors="replace").replace("\r", "")
        return ""


@dataclass(frozen=True)
class VmOutcome:
    """Result of a run. `status`: exit status of the command, 125 if the VM reported none."""

    status: int
    boot_s: float
    command_s: float


@dataclass(frozen=True)
class VmPlan:
    """Guests to boot and the job (a shell script) to run in each."""

    guests: Sequence[qemu.Guest]
    jobs: Sequence[str]
    mounts: Sequence[qemu.Mount]
    image: Image
    tools: Tools
    cache: Path


def run(plan: VmPlan, kvm: bool, deadline: Deadline, output: IO[bytes]) -> VmOutcome:
    """Boot the guests and run a job in each, until all have ended or shortly after one has failed.

    Raises:
        BootFailed: a VM ended or timed out before it was ready.
        VmDeadlineExceeded: `deadline` passed.
    """
    (plan.cache / "runs").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", dir=plan.cache / "runs")))
        wires = [
            [stack.enter_context(end) for end in socket.socketpair()]
            for _ in range(plan.guests[0].num_rails if len(plan.guests) == 2 else 0)
        ]
        machines = []
        for guest, job in zip(plan.guests, plan.jobs, strict=True):
            folder = work / str(guest.number)
            folder.mkdir()
            shutil.copy(Path(__file__).parent / "guest/boot.sh", folder)
            for name, text in qemu.run_files(guest, plan.mounts, job).items():
                (folder / name).write_text(text)
            ends = [pair[guest.number].fileno() for pair in wires]
            command = qemu.arguments(guest, plan.image, plan.tools, folder, plan.mounts, ends, kvm)
            process = stack.enter_context(_started(command, plan.tools, ends, folder / "qemu.log"))
            label = f"[{('first', 'second')[guest.number]}] ".encode() if len(plan.guests) == 2 else b""
            machines.append(_Running(guest, process, folder, label, time.monotonic()))
        return _watch(machines, _KVM_BOOT_LIMIT_S if kvm else _BOOT_LIMIT_S, deadline, output)


@contextlib.contextmanager
def _started(
    command: Sequence[str], tools: Tools, descriptors: Sequence[int], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that is killed when this one ends for any reason."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [require_program("setpriv", "util-linux"), "--pdeathsig", "KILL", *command],
            env=tools.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            pass_fds=descriptors,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _watch(machines: Sequence[_Running], boot_limit_s: float, deadline: Deadline, output: IO[bytes]) -> VmOutcome:
    """Forward output until all machines have ended, and return the result."""
    status, limit_s = 0, deadline.at_s
    with selectors.DefaultSelector() as selector:
        for machine in machines:
            selector.register(machine.output, selectors.EVENT_READ, machine)
        while selector.get_map():
            for key, _ in selector.select(0.2):
                machine = key.data
                chunk = os.read(key.fd, 1 << 16)
                _forward(machine, chunk, output)
                if not chunk:
                    selector.unregister(machine.output)
                    status = status or _ended(machine)
                    if status:
                        limit_s = min(limit_s, time.monotonic() + _GRACE_S)
            for machine in machines:
                machine.look()
                if machine.ready_s is None and time.monotonic() - machine.began_s > boot_limit_s:
                    raise _boot_failed(machine, f"was not ready within {boot_limit_s:g} s")
            if time.monotonic() >= limit_s:
                if status:
                    break
                for machine in machines:
                    _forward(machine, b"", output)
                raise VmDeadlineExceeded(
                    "\n".join(_story(machine, f"was not done within {deadline.given_s:g} s") for machine in machines)
                )
    boot_s = max(machine.ready_s or 0.0 for machine in machines)
    return VmOutcome(status, boot_s, time.monotonic() - machines[0].began_s - boot_s)


def _forward(machine: _Running, chunk: bytes, output: IO[bytes]) -> None:
    """Write the machine's output; with a label, in complete lines."""
    if machine.label:
        *lines, machine.partial = (machine.partial + chunk).split(b"\n")
        if not chunk and machine.partial:
            lines, machine.partial = [*lines, machine.partial], b""
        chunk = b"".join(machine.label + line + b"\n" for line in lines)
    if chunk:
        output.write(chunk)
        output.flush()


def _ended(machine: _Running) -> int:
    """Return the status of a machine whose output has ended. Raises BootFailed if it was never ready."""
    machine.process.wait()
    machine.look()
    if machine.ready_s is None:
        raise _boot_failed(machine, f"ended (QEMU's status {machine.process.returncode}) before it was ready")
    left = machine.folder / "status"
    status = qemu.exit_status(left.read_text()) if left.exists() else qemu.STATUS_NONE
    if status == qemu.STATUS_NONE and not left.exists():
        say(_story(machine, f"ended (QEMU's status {machine.process.returncode}) without the command's exit status"))
    troubles = [line for line in machine.console().splitlines() if "Oops" in line or "BUG:" in line]
    for line in troubles:
        say(f"the guest's kernel: {line}")
    return status


def _boot_failed(machine: _Running, what: str) -> BootFailed:
    reason = (machine.errors() or [f"the VM {what}"])[-1]
    advice = "RDMA_VM_ACCEL=tcg boots without KVM; an empty folder as RDMA_VM_CACHE excludes a damaged image."
    return BootFailed(reason, f"{_story(machine, what)}\n{advice}")


def _story(machine: _Running, what: str) -> str:
    """Describe a failed VM: its own message, QEMU's errors and the end of its console."""
    told = machine.folder / "failed"
    lines = [f"the VM {what}", *([told.read_text().strip()] if told.exists() else [])]
    lines += [f"QEMU: {line}" for line in machine.errors()[-5:]]
    return "\n".join([*lines, *(f"console: {line}" for line in machine.console().splitlines()[-20:])])


def end_on_signals() -> None:
    """Make SIGTERM and SIGHUP exit like Ctrl-C, so that VMs and temporary folders are removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
