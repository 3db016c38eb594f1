"""QEMU's command line and the files that configure the guest. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.rdma_vm.image import Image
from tools.rdma_vm.tools import Tools

STATUS_NONE = 125


@dataclass(frozen=True)
class Mount:
    """Folder of the host that is mounted in the guest at `path`."""

    source: Path
    path: Path
    writable: bool = False


@dataclass(frozen=True)
class GuestRail:
    """Soft-RoCE device of the guest with a separate interface and subnet."""

    device: str
    interface: str
    address: str


@dataclass(frozen=True)
class Guest:
    """One VM. `number`: 0 or 1; with `peers` = 2, a wire per rail connects it to the other VM."""

    number: int
    peers: int
    num_rails: int
    memory_mib: int
    num_cpus: int
    counts: bool = False
    """The clock advances by one nanosecond per instruction, so that timings do not depend on the host's load. Requires
    one CPU and no KVM."""

    def rails(self, number: int | None = None) -> list[GuestRail]:
        """Return this guest's rails, or those of guest `number`."""
        host = (self.number if number is None else number) + 1
        kind = "eth" if self.peers == 2 else "dummy"
        return [GuestRail(f"rxe{rail}", f"{kind}{rail}", f"10.77.{rail}.{host}") for rail in range(self.num_rails)]

    def environment(self) -> dict[str, str]:
        """Return the variables that describe the VM to the command.

        RDMA_VM is 1 in every guest; RDMA_VM_RAILS is `device=address` per rail, separated by commas. With two guests,
        RDMA_VM_ROLE is first or second, and RDMA_VM_PEER_RAILS lists the other guest's rails.
        """
        found = {"RDMA_VM": "1", "RDMA_VM_RAILS": _listed(self.rails())}
        if self.peers == 2:
            found["RDMA_VM_ROLE"] = ("first", "second")[self.number]
            found["RDMA_VM_PEER_RAILS"] = _listed(self.rails(1 - self.number))
        return found


def _listed(rails: Sequence[GuestRail]) -> str:
    return ",".join(f"{rail.device}={rail.address}" for rail in rails)


def exit_status(text: str) -> int:
    """Parse the exit status that the guest wrote; return 125 if there is none or it is invalid."""
    return int(text) if text.strip().isdecimal() and int(text) < 256 else STATUS_NONE


def run_files(guest: Guest, mounts: Sequence[Mount], job: str) -> dict[str, str]:
    """Return the files that guest/boot.sh reads, by name."""
    return {
        "mounts": "".join(
            f"mount{number} {mount.path} {'rw' if mount.writable else 'ro'}\n" for number, mount in enumerate(mounts)
        ),
        "rails": "".join(f"{rail.device} {rail.interface} {rail.address}\n" for rail in guest.rails()),
        "job": job,
    }


def job_script(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Return a shell script that runs `command` in `folder`."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    return f"{exports}cd {shlex.quote(str(folder))} || exit {STATUS_NONE}\nexec {shlex.join(command)}\n"


def arguments(
    guest: Guest, image: Image, tools: Tools, run: Path, mounts: Sequence[Mount], wires: Sequence[int], kvm: bool
) -> list[str]:
    """Return QEMU's command line.

    Args:
        run: the folder with `run_files`; the guest's console is written to console.log in it.
        wires: with two guests, the descriptor of a connected stream socket for each rail.
        kvm: use hardware virtualisation. The CPU model is always Nehalem: it supports the instructions that compiled
            Python packages need, is emulated quickly, and needs no features that a hypervisor may lack.
    """
    command = [str(tools.qemu)]
    for folder in tools.qemu_data:
        command += ["-L", str(folder)]
    emulated = "tcg -cpu Nehalem -icount shift=0,sleep=off" if guest.counts else "tcg,thread=multi -cpu Nehalem"
    accelerator = "kvm -cpu Nehalem,enforce" if kvm else emulated
    command += shlex.split(f"-M pc -accel {accelerator} -smp {guest.num_cpus} -m {guest.memory_mib}M")
    command += shlex.split("-nodefaults -no-reboot -display none")
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
    command += ["-append", "console=ttyS0 quiet panic=-1 mitigations=off nokaslr net.ifnames=0"]
    command += ["-drive", f"file={_escaped(image.root)},if=virtio,format=raw,readonly=on"]
    command += ["-serial", f"file:{run / 'console.log'}"]
    command += ["-chardev", "file,id=output,path=/dev/stdout", "-device", "virtio-serial-pci"]
    command += ["-device", "virtserialport,chardev=output,name=output"]
    command += ["-virtfs", f"local,path={_escaped(run)},mount_tag=run,security_model=none,multidevs=remap"]
    for number, mount in enumerate(mounts):
        mode = "" if mount.writable else ",readonly=on"
        share = f"local,path={_escaped(mount.source)},mount_tag=mount{number},security_model=none,multidevs=remap"
        command += ["-virtfs", share + mode]
    for rail, descriptor in enumerate(wires):
        address = f"52:54:00:77:{rail:02x}:{guest.number + 1:02x}"
        command += ["-netdev", f"socket,id=wire{rail},fd={descriptor}"]
        command += ["-device", f"virtio-net-pci,netdev=wire{rail},mac={address},romfile="]
    return [*command, "-device", "isa-debug-exit,iobase=0x501,iosize=1", "-device", "virtio-rng-pci"]


def _escaped(path: Path) -> str:
    """Escape a path for QEMU's options."""
    return str(path).replace(",", ",,")
