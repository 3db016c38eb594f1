"""RDMA ports and which of them Moonpool would use, their packets' size, and whether user space can reach them.

Opens no device. What a port must be to be used is decided by `messenger.rdma.policy.rail_choice`, as in a running node.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moonpool.doctor.checks import ONE_AT_A_TIME, Check, Level, Needs, Purpose, Verdict, optional

if TYPE_CHECKING:
    from messenger.rdma.policy.facts import DeviceFacts
    from messenger.rdma.policy.rail_choice import RailChoice

_IMPORT_S: Final = 3.0
_LEAST_MTU: Final = 4200  # of an interface, for packets of 4096 bytes
_FULL_PATH_MTU: Final = 4096
_ROOT: Final = Path("/")
_MODULES: Final = ("ib_uverbs", "rdma_ucm")


@dataclass(frozen=True)
class Ports:
    """The ports as the kernel shows them, and what a node would choose of them."""

    found: "tuple[DeviceFacts, ...]"
    choice: "RailChoice"


def observe_ports(devices: Sequence[str] = (), root: Path = _ROOT) -> Ports:
    """`devices`: those asked for by name, as in rdma_devices; none to have them chosen."""
    with ONE_AT_A_TIME:
        from messenger.rdma.policy.rail_choice import RailRequest, choose
        from messenger.rdma.topology import rdma_ports

    found = rdma_ports(root)
    return Ports(found, choose(found, RailRequest(devices=tuple(devices))))


def judge_ports(seen: Ports, needs: Needs) -> Verdict:
    verdicts = seen.choice.verdicts
    if not verdicts:
        advice = "KV goes over TCP without; for RDMA load the adapter's driver and give the container /dev/infiniband."
        return optional(needs, Purpose.RDMA), "no device", advice
    found = "\n".join(verdict.text for verdict in verdicts)
    if not seen.choice.rails:
        level = Level.FAIL if Purpose.RDMA in needs else Level.WARN
        return level, found, "Mend one of them as said, or name another with rdma_devices; until then KV goes over TCP."
    asked_in_vain = [verdict for verdict in verdicts if not verdict.is_taken and verdict.port == 0]
    if asked_in_vain:
        level = Level.FAIL if Purpose.RDMA in needs else Level.WARN
        return level, found, "Correct the names in rdma_devices: `rdma link` or `ibv_devices` lists what is there."
    broken = [facts.key for facts in seen.found if facts.state != "ACTIVE"]
    if broken:
        return Level.NOTE, found, f"Check {', '.join(broken)} if it should be in use."
    return Level.OK, found, ""


def judge_mtu(seen: Ports, needs: Needs) -> Verdict:
    rails = {(rail.device, rail.port) for rail in seen.choice.rails}
    ethernet = [facts for facts in seen.found if (facts.name, facts.port) in rails and facts.netdev]
    if not ethernet:
        return Level.OK, "no RoCE port is used", ""
    found = ", ".join(
        f"{facts.key}: packets of {facts.active_mtu} ({facts.netdev} MTU {facts.netdev_mtu})" for facts in ethernet
    )
    small = [facts.netdev for facts in ethernet if facts.active_mtu < _FULL_PATH_MTU]
    if small:
        advice = (
            f"Set an MTU of {_LEAST_MTU} or more (ip link set {small[0]} mtu 9000) on both hosts and the switches "
            f"between: packets of {_FULL_PATH_MTU} bytes cost fewer headers and interrupts."
        )
        return Level.NOTE, found, advice
    return Level.OK, found, ""


@dataclass(frozen=True)
class UserSpace:
    """How far this process gets: modules of the kernel that are missing, device files that it may not open, pyverbs.

    `denied` are the files that exist and may not be opened; `pyverbs_problem` is "" if it imports.
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
        pyverbs_problem=_import_problem("pyverbs.device"),
    )


def judge_user_space(seen: UserSpace, needs: Needs) -> Verdict:
    level = optional(needs, Purpose.RDMA)
    if seen.pyverbs_problem:
        advice = (
            "For RDMA install pyverbs for the Python that runs Moonpool: apt install python3-pyverbs (dnf: "
            "python3-pyverbs), or pip install pyverbs with rdma-core's headers."
        )
        return level, f"pyverbs does not import: {seen.pyverbs_problem}", advice
    if not seen.num_devices:
        return Level.OK, "pyverbs imports; no device to open", ""
    if "ib_uverbs" in seen.missing_modules:
        return level, "the module ib_uverbs is not loaded", "modprobe ib_uverbs (on the host, for a container)."
    if not seen.num_files:
        advice = "Give the container the device files: docker run --device /dev/infiniband, or an RDMA device plugin."
        return level, "the kernel shows devices, but /dev/infiniband has no uverbs file", advice
    if seen.denied:
        advice = "Give this user read and write access to them (a udev rule, or membership of their group)."
        return level, f"{', '.join(seen.denied)} in /dev/infiniband may not be opened", advice
    if "rdma_ucm" in seen.missing_modules:
        found = f"pyverbs imports; {seen.num_files} devices can be opened; rdma_ucm is not loaded"
        return (
            Level.NOTE,
            found,
            "Moonpool needs it not; tools such as rping and ib_write_bw -R do (modprobe rdma_ucm).",
        )
    return Level.OK, f"pyverbs imports; {seen.num_files} devices can be opened", ""


@dataclass(frozen=True)
class GpuPath:
    """Path by which an adapter reaches GPU memory.

    `exports_dmabuf`: the driver exports it, as the open kernel modules do. Otherwise a module must make GPU memory
    known to the adapters' drivers.
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
        exports_dmabuf="Open Kernel Module" in _read(root / "proc/driver/nvidia/version"),
        has_peer_memory=has_peer_memory(root),
    )


def judge_gpu_path(seen: GpuPath, needs: Needs) -> Verdict:
    if not seen.num_gpus or not seen.num_devices:
        return Level.OK, "needs a GPU and an RDMA device", ""
    ways = [*(["dmabuf"] if seen.exports_dmabuf else []), *(["peer memory"] if seen.has_peer_memory else [])]
    if ways:
        return Level.OK, f"can be registered by {' or '.join(ways)}", ""
    level = Level.FAIL if {Purpose.RDMA, Purpose.GPU} <= needs else Level.NOTE
    advice = "Install the driver's open kernel modules, or modprobe nvidia-peermem; until then KV goes by host memory."
    return level, "adapters cannot reach it: no open kernel modules, no nvidia-peermem", advice


def _has_module(root: Path, name: str) -> bool:
    """Loaded, or built in: then its class or its files are there all the same."""
    marks = {"ib_uverbs": "sys/class/infiniband_verbs", "rdma_ucm": "dev/infiniband/rdma_cm"}
    return (root / "sys/module" / name).is_dir() or (root / marks[name]).exists()


def _import_problem(module: str) -> str:
    """Why a module does not import, "" if it does; in a process of its own, for it loads a driver's library."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stderr.strip().splitlines() or ["it ends the interpreter"])[-1] if done.returncode else ""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def checks(devices: Sequence[str] = ()) -> tuple[Check, ...]:
    """With the devices that are to be used; none to have them chosen."""
    return (
        Check("RDMA ports", lambda: observe_ports(devices), judge_ports),
        Check("RDMA packets", lambda: observe_ports(devices), judge_mtu),
        Check("RDMA user space", observe_user_space, judge_user_space),
        Check("RDMA to GPU memory", observe_gpu_path, judge_gpu_path),
    )
