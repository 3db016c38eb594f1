"""Properties of RDMA ports and PCI positions: plain data, and arithmetic on it."""

from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv6Address
from typing import Final

from messenger.errors import ProtocolError

ETHERNET: Final = "Ethernet"
INFINIBAND: Final = "InfiniBand"
ROCE_V2: Final = "RoCE v2"
ACTIVE: Final = "ACTIVE"

PATH_MTUS: Final = (256, 512, 1024, 2048, 4096)
"""Possible path MTUs: bytes of payload per packet."""
ROCE_OVERHEAD_NBYTES: Final = 104
"""Excess of an Ethernet interface's MTU over the path MTU: drivers need 80 to 96, and 4200 is usual."""


class Nearness(IntEnum):
    """Distance of two PCI devices; smaller is nearer."""

    SAME_SWITCH = 0
    SAME_ROOT = 1
    SAME_NUMA = 2
    OTHER = 3
    UNKNOWN = 4

    @property
    def text(self) -> str:
        return _NEARNESS_TEXTS[self]


_NEARNESS_TEXTS: Final = {
    Nearness.SAME_SWITCH: "behind the same PCIe switch",
    Nearness.SAME_ROOT: "behind the same root complex",
    Nearness.SAME_NUMA: "on the same NUMA node",
    Nearness.OTHER: "on another NUMA node",
    Nearness.UNKNOWN: "at an unknown distance",
}


@dataclass(frozen=True)
class PciPosition:
    """Position of a device or memory.

    `pci_path` runs from the host bridge to the device, as sysfs names them, such as ("pci0000:00", "0000:00:01.0",
    "0000:01:00.0"), and is () without a PCI device. `numa_node` is -1 if unknown.
    """

    pci_path: tuple[str, ...] = ()
    numa_node: int = -1


ANYWHERE: Final = PciPosition()


def nearness(one: PciPosition, other: PciPosition) -> Nearness:
    """Return the distance of two positions, by their PCI paths and NUMA nodes."""
    if one.pci_path and other.pci_path and one.pci_path[0] == other.pci_path[0]:
        shared = 0
        while shared < min(len(one.pci_path), len(other.pci_path)) and one.pci_path[shared] == other.pci_path[shared]:
            shared += 1
        # The host bridge is shared; a switch behind it is shared too, unless the first bridges (root ports) differ.
        return Nearness.SAME_SWITCH if shared > 1 else Nearness.SAME_ROOT
    if one.numa_node < 0 or other.numa_node < 0:
        return Nearness.UNKNOWN
    return Nearness.SAME_NUMA if one.numa_node == other.numa_node else Nearness.OTHER


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table. `prefix_bits` is the length of its subnet's prefix, counted as in IPv6, or 0."""

    index: int
    address: IPv6Address
    kind: str  # "IB/RoCE v1" or "RoCE v2"
    netdev: str = ""
    prefix_bits: int = 0

    @property
    def is_routable(self) -> bool:
        """True for an IPv4-mapped or global address, neither link-local nor loopback."""
        mapped = self.address.ipv4_mapped
        address = mapped if mapped is not None else self.address
        return not (address.is_link_local or address.is_unspecified or address.is_loopback or address.is_multicast)


@dataclass(frozen=True)
class DeviceFacts:
    """One port of one RDMA device, as reported by the system.

    `speed_gbit` is the link's speed, 0 if unknown. `active_mtu` is the greatest path MTU in bytes, 0 for InfiniBand
    ports until the port is queried. `netdev` and `netdev_mtu` belong to the Ethernet interface of a RoCE port, "" and 0
    for InfiniBand; `bond` is the bond that it belongs to, "" for none.
    """

    name: str
    port: int
    state: str  # "ACTIVE", "DOWN", "INIT", ...
    link_layer: str
    speed_gbit: float
    active_mtu: int
    place: PciPosition = ANYWHERE
    lid: int = 0
    gids: tuple[Gid, ...] = ()
    netdev: str = ""
    netdev_mtu: int = 0
    bond: str = ""

    @property
    def key(self) -> str:
        """Device and port, such as "mlx5_0/1"."""
        return f"{self.name}/{self.port}"


@dataclass(frozen=True)
class Rail:
    """One port in use, with everything that a peer needs to reach it.

    `gid_index` is 0 on InfiniBand, where `lid` addresses the port within its subnet; RoCE has lid 0. `gid` is 16 bytes.
    `mtu` 0 means that the port must be queried. A spare (`is_spare`) is farther from the memory than others and is used
    only if none of them works. `numa_node` is -1 if unknown.
    """

    device: str
    port: int
    link_layer: str
    gid_index: int
    gid: bytes
    prefix_bits: int
    lid: int
    mtu: int
    speed_gbit: float
    numa_node: int = -1
    is_spare: bool = False

    @property
    def name(self) -> str:
        """Name for logs, counters and errors, such as "mlx5_0/1"."""
        return f"{self.device}/{self.port}"

    @property
    def is_infiniband(self) -> bool:
        return self.link_layer == INFINIBAND

    @property
    def address(self) -> str:
        """The GID as text; as an IPv4 address if it is IPv4-mapped."""
        parsed = IPv6Address(self.gid)
        return str(parsed.ipv4_mapped or parsed)


WireRail = tuple[str, int, str, int, bytes, int, int, int, float, int, bool]


def rail_to_wire(rail: Rail) -> WireRail:
    """Return the fields in order, as types that msgpack encodes."""
    return (
        rail.device, rail.port, rail.link_layer, rail.gid_index, rail.gid, rail.prefix_bits, rail.lid, rail.mtu,
        rail.speed_gbit, rail.numa_node, rail.is_spare,
    )  # fmt: skip


def rail_from_wire(value: object) -> Rail:
    """Parse a rail. Raises ProtocolError for an invalid one."""
    kinds = (str, int, str, int, bytes, int, int, int, float, int, bool)
    if not isinstance(value, list | tuple) or len(value) != len(kinds):
        raise ProtocolError(f"a rail must have {len(kinds)} fields")
    if any(type(field) is not kind for field, kind in zip(value, kinds, strict=True)):
        raise ProtocolError("a rail has fields of wrong types")
    rail = Rail(*value)
    if len(rail.gid) != 16 or rail.link_layer not in (ETHERNET, INFINIBAND) or not 0 <= rail.prefix_bits <= 128:
        raise ProtocolError(f"rail {rail.device[:64]!r} has an invalid address")
    if not 1 <= rail.port <= 255 or not 0 <= rail.gid_index <= 255 or len(rail.device) > 64:
        raise ProtocolError(f"rail {rail.device[:64]!r} has an invalid port or GID index")
    if rail.mtu not in (0, *PATH_MTUS) or not 0 <= rail.lid < 1 << 16 or not rail.speed_gbit >= 0:
        raise ProtocolError(f"rail {rail.device[:64]!r} has an invalid path MTU, LID or speed")
    return rail


def roce_mtu(netdev_mtu: int) -> int:
    """Return the greatest path MTU that an Ethernet interface of this MTU carries; 0 if it carries none."""
    return max((mtu for mtu in PATH_MTUS if mtu + ROCE_OVERHEAD_NBYTES <= netdev_mtu), default=0)


def same_subnet(one: Rail, other: Rail) -> bool:
    """Return True if both are known to be in the same IP subnet (RoCE) or have the same subnet prefix (InfiniBand)."""
    if one.link_layer != other.link_layer:
        return False
    bits = 64 if one.is_infiniband else min(one.prefix_bits, other.prefix_bits)
    if not bits:
        return False
    shift = 128 - bits
    return int.from_bytes(one.gid) >> shift == int.from_bytes(other.gid) >> shift


def can_reach(one: Rail, other: Rail) -> bool:
    """Return True if a connection between the two is possible: the same link type and address family."""
    if one.link_layer != other.link_layer:
        return False
    if one.is_infiniband:
        return same_subnet(one, other)
    return (IPv6Address(one.gid).ipv4_mapped is None) == (IPv6Address(other.gid).ipv4_mapped is None)
