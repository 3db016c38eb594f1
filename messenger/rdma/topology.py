"""Detection of RDMA ports and PCI devices from sysfs, without decisions or verbs.

Every function takes the root below which the kernel's file systems are mounted, so that a recorded machine can be read
like the local one. Missing entries keep their defaults; no function raises for an unusual machine.
"""

import itertools
import os
import re
from collections.abc import Iterator, Set
from ipaddress import IPv6Address
from pathlib import Path

from messenger.rdma.policy.facts import ANYWHERE, ETHERNET, DeviceFacts, Gid, PciPosition, roce_mtu

ROOT = Path("/")
_MAX_HOLES = 64
"""Number of unused entries in a row after which the rest of a GID table, which may have thousands, is not read."""
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")


def rdma_ports(root: Path = ROOT) -> tuple[DeviceFacts, ...]:
    """Return every port of every RDMA device, in the order of devices and ports."""
    devices = _entries(root / "sys/class/infiniband")
    prefixes = _Prefixes(root)
    return tuple(
        _port_facts(root, device, folder, prefixes)
        for device in devices
        for folder in _entries(device / "ports")
        if folder.name.isdecimal()
    )


def pci_place(address: str, root: Path = ROOT) -> PciPosition:
    """Return the position of a PCI device, such as "0000:3b:00.0"; ANYWHERE if it does not exist.

    The longer domains and capital letters of CUDA and NVML are accepted.
    """
    return _place(root / "sys/bus/pci/devices" / normal_pci_address(address))


def bound_place(root: Path = ROOT, cpus: Set[int] | None = None) -> PciPosition:
    """Return the NUMA node to which this process's memory is bound; ANYWHERE if it is not bound.

    It is bound by its memory policy (cpuset, numactl --membind), or because all its CPUs belong to one node. `cpus`
    defaults to the CPUs on which the process may run.
    """
    nodes = {
        int(folder.name[4:]): _numbers(_read(folder / "cpulist"))
        for folder in _entries(root / "sys/devices/system/node")
        if re.fullmatch(r"node\d+", folder.name)
    }
    if len(nodes) < 2:
        return ANYWHERE
    allowed = next(
        (_numbers(words[1]) for words in _words(root / "proc/self/status") if words[:1] == ["Mems_allowed_list:"]),
        set(),
    )
    if len(allowed) == 1:
        return PciPosition(numa_node=allowed.pop())
    own = os.sched_getaffinity(0) if cpus is None else cpus
    return next((PciPosition(numa_node=node) for node, its in sorted(nodes.items()) if own <= its), ANYWHERE)


def normal_pci_address(address: str) -> str:
    """Return a PCI address in the form of sysfs, such as "0000:3b:00.0" for "00000000:3B:00.0"."""
    domain, _, rest = address.strip().lower().partition(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{rest}"


def _port_facts(root: Path, device: Path, folder: Path, prefixes: "_Prefixes") -> DeviceFacts:
    link_layer = _read(folder / "link_layer")
    gids = tuple(_gids(folder, prefixes))
    netdev = _netdev(device, int(folder.name), gids) if link_layer == ETHERNET else ""
    netdev_mtu = _number(_read(root / "sys/class/net" / netdev / "mtu")) if netdev else 0
    return DeviceFacts(
        name=device.name,
        port=int(folder.name),
        state=_read(folder / "state").partition(":")[2].strip() or "UNKNOWN",
        link_layer=link_layer,
        speed_gbit=_speed_gbit(_read(folder / "rate")),
        active_mtu=roce_mtu(netdev_mtu),
        place=_place(device / "device"),
        lid=_number(_read(folder / "lid")),
        gids=gids,
        netdev=netdev,
        netdev_mtu=netdev_mtu,
        bond=_bond(root, netdev),
    )


def _netdev(device: Path, port: int, gids: tuple[Gid, ...]) -> str:
    """Return the Ethernet interface of a port, from its GIDs or, without any, from the common PCI device."""
    by_gid = next((gid.netdev for gid in gids if gid.netdev), "")
    siblings = _entries(device / "device/net")
    return by_gid or next((path.name for path in siblings if _number(_read(path / "dev_port")) == port - 1), "")


def _gids(folder: Path, prefixes: "_Prefixes") -> Iterator[Gid]:
    """Yield the used entries of the GID table, by index. Unused ones are zero, and their type is unreadable."""
    last_used = -1
    for index in itertools.count():
        if index - last_used > _MAX_HOLES:
            return
        address = _gid_address(_read(folder / f"gids/{index}"))
        if address is None:
            continue
        last_used = index
        kind = _read(folder / f"gid_attrs/types/{index}")
        netdev = _read(folder / f"gid_attrs/ndevs/{index}")
        yield Gid(index, address, kind, netdev, prefixes.bits_of(netdev, address))


def _gid_address(text: str) -> IPv6Address | None:
    if text.strip("0:") == "":
        return None
    try:
        return IPv6Address(text)
    except ValueError:
        return None


def _place(link: Path) -> PciPosition:
    """Return the position of the device that a sysfs link points to."""
    if not link.exists():
        return ANYWHERE
    real = link.resolve()
    parts = real.parts
    bridge = next((index for index, part in enumerate(parts) if _HOST_BRIDGE.fullmatch(part)), None)
    if bridge is None:
        return PciPosition(numa_node=_numa_node(real))
    path = [parts[bridge]]
    for part in parts[bridge + 1 :]:
        if not _PCI_ADDRESS.fullmatch(part):
            break  # not a PCI device any more: a virtio port, a bus of another kind
        path.append(part)
    return PciPosition(tuple(path), _numa_node(Path(*parts[: bridge + len(path)])))


def _numa_node(device: Path) -> int:
    text = _read(device / "numa_node")
    return int(text) if re.fullmatch(r"-?\d+", text) else -1


def _bond(root: Path, netdev: str) -> str:
    """Return the bond that the interface belongs to, or the interface if it is a bond; "" if there is none."""
    if not netdev:
        return ""
    folder = root / "sys/class/net" / netdev
    if (folder / "bonding").is_dir():
        return netdev
    master = folder / "master"
    return master.resolve().name if (master / "bonding").is_dir() else ""


class _Prefixes:
    """Prefix lengths of this host's subnets by interface, from the kernel's tables."""

    def __init__(self, root: Path) -> None:
        self._subnets: list[tuple[str, int, int]] = []  # interface, the subnet's address, bits of its prefix
        for words in _words(root / "proc/net/route"):
            if len(words) >= 8 and re.fullmatch(r"[0-9A-F]{8}", words[1]) and words[2] == "00000000":
                network, mask = (int.from_bytes(bytes.fromhex(words[column])[::-1]) for column in (1, 7))
                if mask:
                    self._subnets.append((words[0], (0xFFFF << 32) | network, 96 + mask.bit_count()))
        for words in _words(root / "proc/net/if_inet6"):
            if len(words) >= 6 and re.fullmatch(r"[0-9a-f]{32}", words[0]):
                self._subnets.append((words[5], int(words[0], 16), int(words[2], 16)))

    def bits_of(self, netdev: str, address: IPv6Address) -> int:
        """Return the length of the interface's longest prefix that contains the address; 0 if there is none."""
        value = int(address)
        return max(
            (
                bits
                for name, subnet, bits in self._subnets
                if name == netdev and subnet >> (128 - bits) == value >> (128 - bits)
            ),
            default=0,
        )


def _speed_gbit(text: str) -> float:
    """Parse a rate such as "400 Gb/sec (4X NDR)" into 400.0; 0 if it is invalid."""
    found = re.match(r"[\d.]+", text)
    return float(found.group()) if found else 0.0


def _numbers(text: str) -> set[int]:
    """Parse a list of numbers such as "0-2,5" into {0, 1, 2, 5}; an invalid list is empty."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _number(text: str) -> int:
    """Parse a number, decimal or hexadecimal with 0x; return 0 if it is invalid."""
    try:
        return int(text, 0)
    except ValueError:
        return 0


def _entries(folder: Path) -> list[Path]:
    """Return the entries in the order of their names, numbers by value; empty if the folder cannot be read."""
    try:
        found = list(folder.iterdir())
    except OSError:
        return []
    return sorted(found, key=lambda path: (int(path.name) if path.name.isdecimal() else -1, path.name))


def _words(path: Path) -> Iterator[list[str]]:
    for line in _read(path).splitlines():
        yield line.split()


def _read(path: Path) -> str:
    try:
        with open(path, "rb", buffering=0) as file:  # unbuffered, because there are hundreds of small files
            return file.read().decode().strip()
    except (OSError, UnicodeDecodeError):
        return ""
