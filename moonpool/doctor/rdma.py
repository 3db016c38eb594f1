"""RDMA devices as the kernel shows them, and whether user space can reach them. Opens none."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moonpool.doctor.finding import Check, Level, Needs, Purpose, Verdict, optional

_IMPORT_S: Final = 3.0
_LEAST_MTU: Final = 4200  # an interface MTU below it leaves RoCE with packets of 1024 bytes
_NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"


@dataclass(frozen=True)
class RdmaPort:
    """One port of one device."""

    device: str
    port: int
    state: str  # "ACTIVE", "DOWN", ...
    link_layer: str  # "Ethernet" (RoCE) or "InfiniBand"
    rate: str  # "100 Gb/sec (4X EDR)"
    num_gids: int
    num_roce_v2: int
    netdev: str
    mtu: int  # of the Ethernet interface; 0 where there is none


def observe_ports(
    root: Path = Path("/sys/class/infiniband"), net: Path = Path("/sys/class/net")
) -> tuple[RdmaPort, ...]:
    return tuple(
        _port(folder, net)
        for device in (sorted(root.iterdir()) if root.is_dir() else [])
        for folder in sorted((device / "ports").glob("*"))
    )


def judge_ports(seen: tuple[RdmaPort, ...], needs: Needs) -> Verdict:
    if not seen:
        advice = "KV goes over TCP without; for RDMA load the adapter's driver and give the container /dev/infiniband."
        return optional(needs, Purpose.RDMA), "no device", advice
    active = [port for port in seen if port.state == "ACTIVE"]
    found = ", ".join(_port_text(port) for port in seen)
    trouble = Level.FAIL if Purpose.RDMA in needs else Level.WARN
    if not active:
        return trouble, found, "No port is active: check cable, switch and, for Ethernet, that its interface is up."
    ethernet = [port for port in active if port.link_layer == "Ethernet"]
    if any(not port.num_roce_v2 for port in ethernet):
        advice = "Give the port's interface an IP address: without a RoCE v2 GID no connection leaves its segment."
        return trouble, found, advice
    if any(0 < port.mtu < _LEAST_MTU for port in ethernet):
        advice = f"Raise the interface's MTU to {_LEAST_MTU} or more, so that RDMA can send packets of 4096 bytes."
        return Level.NOTE, found, advice
    return Level.OK, found, ""


@dataclass(frozen=True)
class UserSpace:
    """`num_devices` the kernel shows, `num_open` of their files this user may open; pyverbs: "" if it imports."""

    num_devices: int
    num_open: int
    pyverbs_problem: str


def observe_user_space() -> UserSpace:
    files = sorted(Path("/dev/infiniband").glob("uverbs*"))
    devices = list(Path("/sys/class/infiniband").glob("*"))
    num_open = sum(os.access(path, os.R_OK | os.W_OK) for path in files)
    return UserSpace(len(devices), num_open, _import_problem("pyverbs.device"))


def judge_user_space(seen: UserSpace, needs: Needs) -> Verdict:
    level = optional(needs, Purpose.RDMA)
    if seen.pyverbs_problem:
        advice = "For RDMA install rdma-core's libraries and its Python package (apt install python3-pyverbs, or pip)."
        return level, f"pyverbs does not import: {seen.pyverbs_problem}", advice
    if seen.num_open < seen.num_devices:
        found = f"pyverbs imports; {seen.num_open} of {seen.num_devices} devices can be opened"
        return level, found, "Give this user, or the container (--device /dev/infiniband), the uverbs files."
    return Level.OK, f"pyverbs imports; {seen.num_open} devices can be opened", ""


def _port(folder: Path, net: Path) -> RdmaPort:
    gids = {path.name for path in (folder / "gids").glob("*") if _read(path) not in ("", _NO_GID)}
    kinds = [_read(folder / "gid_attrs" / "types" / name) for name in gids]
    netdevs = [name for gid in sorted(gids) if (name := _read(folder / "gid_attrs" / "ndevs" / gid))]
    netdev = netdevs[0] if netdevs else ""
    return RdmaPort(
        device=folder.parents[1].name,
        port=int(folder.name),
        state=_read(folder / "state").partition(":")[2].strip() or "UNKNOWN",
        link_layer=_read(folder / "link_layer"),
        rate=_read(folder / "rate"),
        num_gids=len(gids),
        num_roce_v2=sum(kind == "RoCE v2" for kind in kinds),
        netdev=netdev,
        mtu=int(_read(net / netdev / "mtu") or 0) if netdev else 0,
    )


def _port_text(port: RdmaPort) -> str:
    behind = f" on {port.netdev} MTU {port.mtu}" if port.netdev else ""
    gids = f"{port.num_gids} GIDs, {port.num_roce_v2} of RoCE v2"
    return f"{port.device}/{port.port} {port.state}, {port.link_layer}{behind}, {port.rate}, {gids}"


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
        return path.read_text().strip()
    except OSError:
        return ""


CHECKS: Final = (
    Check("RDMA ports", observe_ports, judge_ports),
    Check("RDMA user space", observe_user_space, judge_user_space),
)
