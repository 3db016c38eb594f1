"""Checks of RDMA: ports and which of them a node would use, packet sizes, access from user space, access to GPU memory.

Opens no device. `messenger.rdma.policy.rail_choice` selects the ports, as in a running node.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonpool.doctor.checks import ONE_AT_A_TIME, Check, Level, Needs, Purpose, Verdict, optional, read_text, run_script

if TYPE_CHECKING:
    from messenger.rdma.policy.facts import DeviceFacts
    from messenger.rdma.policy.rail_choice import RailChoice

_IMPORT_S: Final = 3.0  # in a child process, since it loads a driver's library
_LEAST_MTU: Final = 4200  # of an interface, for 4096-byte packets
_FULL_PATH_MTU: Final = 4096
_ROOT: Final = Path("/")
_MODULES: Final = ("ib_uverbs", "rdma_ucm")


@dataclass(frozen=True)
class Ports:
    """The kernel's RDMA ports, and those that a node would use."""

    found: "tuple[DeviceFacts, ...]"
    choice: "RailChoice"


def observe_ports(devices: Sequence[str] = (), root: Path = _ROOT) -> Ports:
    """List the RDMA ports; `devices` are the values of rdma_devices, empty to choose them by topology."""
    with ONE_AT_A_TIME:
        from messenger.rdma.policy.rail_choice import RailRequest, choose
        from messenger.rdma.topology import rdma_ports

    found = rdma_ports(root)
    return Ports(found, choose(found, RailRequest(devices=tuple(devices))))


def judge_ports(seen: Ports, needs: Needs) -> Verdict:
    verdicts = seen.choice.verdicts
    if not verdicts:
        advice = "KV goes over TCP. For RDMA load the adapter's driver, and give a container access to /dev/infiniband."
        return optional(needs, Purpose.RDMA), "no device", advice
    found = "\n".join(verdict.text for verdict in verdicts)
    if not seen.choice.rails:
        level = Level.FAIL if Purpose.RDMA in needs else Level.WARN
        return level, found, "Fix one of them, or select another with rdma_devices. KV goes over TCP until then."
    unknown = [verdict for verdict in verdicts if not verdict.is_taken and verdict.port == 0]
    if unknown:
        level = Level.FAIL if Purpose.RDMA in needs else Level.WARN
        return level, found, "Correct the names in rdma_devices: `rdma link` or `ibv_devices` lists the devices."
    broken = [facts.key for facts in seen.found if facts.state != "ACTIVE"]
    if broken:
        return Level.NOTE, found, f"Check {', '.join(broken)} if it is supposed to be in use."
    return Level.OK, found, ""


def judge_mtu(seen: Ports, needs: Needs) -> Verdict:
    rails = {(rail.device, rail.port) for rail in seen.choice.rails}
    ethernet = [facts for facts in seen.found if (facts.name, facts.port) in rails and facts.netdev]
    if not ethernet:
        return Level.OK, "no RoCE port is used", ""
    found = ", ".join(
        f"{facts.key}: {facts.active_mtu}-byte packets ({facts.netdev} MTU {facts.netdev_mtu})" for facts in ethernet
    )
    small = [facts.netdev for facts in ethernet if facts.active_mtu < _FULL_PATH_MTU]
    if small:
        advice = (
            f"Set an MTU of {_LEAST_MTU} or more (ip link set {small[0]} mtu 9000) on both hosts and all switches "
            f"between them: {_FULL_PATH_MTU}-byte packets need fewer headers and interrupts."
        )
        return Level.NOTE, found, advice
    return Level.OK, found, ""


@dataclass(frozen=True)
class UserSpace:
    """Prerequisites of RDMA in user space: kernel modules, device files, pyverbs.

    `denied` names the device files that this process may not open; `pyverbs_problem` is "" if pyverbs imports.
    """

    num_devices: int
    missing_modules: tuple[str, ...]
    num_files: int
    denied: tuple[str, ...]
    pyverbs_problem: str


def observe_user_space(root: Path = _ROOT) -> UserSpace:
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    return UserSpace(
        num_devices=len(list((root / "sys/class/infiniband").glob("*"))),
        missing_modules=tuple(name for name in _MODULES if not _has_module(root, name)),
        num_files=len(files),
        denied=tuple(path.name for path in files if not os.access(path, os.R_OK | os.W_OK)),
        pyverbs_problem=run_script("import pyverbs.device", _IMPORT_S)[1],
    )


def judge_user_space(seen: UserSpace, needs: Needs) -> Verdict:
    level = optional(needs, Purpose.RDMA)
    if seen.pyverbs_problem:
        advice = (
            "For RDMA install pyverbs in the Python environment of Moonpool: apt install python3-pyverbs (dnf: "
            "python3-pyverbs), or pip install pyverbs, which needs rdma-core's headers."
        )
        return level, f"pyverbs does not import: {seen.pyverbs_problem}", advice
    if not seen.num_devices:
        return Level.OK, "pyverbs imports; there is no device", ""
    if "ib_uverbs" in seen.missing_modules:
        return (
            level,
            "the kernel module ib_uverbs is not loaded",
            "Run modprobe ib_uverbs, for a container on its host.",
        )
    if not seen.num_files:
        advice = "Give the container the device files: docker run --device /dev/infiniband, or an RDMA device plugin."
        return level, "the kernel has RDMA devices, but /dev/infiniband has no uverbs file", advice
    if seen.denied:
        advice = "Give this user read and write access to the files, by a udev rule or membership in their group."
        return level, f"{', '.join(seen.denied)} in /dev/infiniband: permission denied", advice
    if "rdma_ucm" in seen.missing_modules:
        found = f"pyverbs imports; {seen.num_files} devices can be opened; rdma_ucm is not loaded"
        return (
            Level.NOTE,
            found,
            "Moonpool does not need it; tools such as rping and ib_write_bw -R do (modprobe rdma_ucm).",
        )
    return Level.OK, f"pyverbs imports; {seen.num_files} devices can be opened", ""


@dataclass(frozen=True)
class GpuPath:
    """Path by which an adapter reaches GPU memory.

    `exports_dmabuf`: the driver exports GPU memory as dmabuf, as the open kernel modules do. `has_peer_memory`: the
    alternative, the module nvidia-peermem, is loaded.
    """

    num_gpus: int
    num_devices: int
    exports_dmabuf: bool
    has_peer_memory: bool


def observe_gpu_path(root: Path = _ROOT) -> GpuPath:
    with ONE_AT_A_TIME:
        from messenger.rdma.gpu_memory import has_peer_memory

    return GpuPath(
        num_gpus=len(list((root / "dev").glob("nvidia[0-9]*"))),
        num_devices=len(list((root / "sys/class/infiniband").glob("*"))),
        exports_dmabuf="Open Kernel Module" in read_text(root / "proc/driver/nvidia/version"),
        has_peer_memory=has_peer_memory(root),
    )


def judge_gpu_path(seen: GpuPath, needs: Needs) -> Verdict:
    if not seen.num_gpus or not seen.num_devices:
        return Level.OK, "needs a GPU and an RDMA device", ""
    ways = [*(["dmabuf"] if seen.exports_dmabuf else []), *(["peer memory"] if seen.has_peer_memory else [])]
    if ways:
        return Level.OK, f"GPU memory can be registered by {' or '.join(ways)}", ""
    level = Level.FAIL if {Purpose.RDMA, Purpose.GPU} <= needs else Level.NOTE
    advice = "Install the driver's open kernel modules, or run modprobe nvidia-peermem. Until then KV uses host memory."
    return (
        level,
        "adapters cannot access it: no open kernel modules, no nvidia-peermem",
        advice,
    )


def _has_module(root: Path, name: str) -> bool:
    """Return True if a kernel module is loaded or built in; a built-in one shows only its device class or file."""
    marks = {"ib_uverbs": "sys/class/infiniband_verbs", "rdma_ucm": "dev/infiniband/rdma_cm"}
    return (root / "sys/module" / name).is_dir() or (root / marks[name]).exists()


def checks(devices: Sequence[str] = ()) -> tuple[Check, ...]:
    """Return the checks of RDMA; `devices` are the values of rdma_devices, empty to choose them by topology."""
    return (
        Check("RDMA ports", lambda: observe_ports(devices), judge_ports),
        Check("RDMA packets", lambda: observe_ports(devices), judge_mtu),
        Check("RDMA user space", observe_user_space, judge_user_space),
        Check("RDMA to GPU memory", observe_gpu_path, judge_gpu_path),
    )
