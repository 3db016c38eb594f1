"""Ports and PCI places as they are read from the kernel's files."""

from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest

from messenger.rdma.policy.facts import ANYWHERE, DeviceFacts, Gid, Nearness, PciPosition, nearness
from messenger.rdma.topology import bound_place, normal_pci_address, pci_place, rdma_ports


def test_a_roce_port_is_read_whole(rdma_machine: Any) -> None:
    rdma_machine.interface("eth7", mtu=9000)
    rdma_machine.nic(
        "mlx5_0", "pci0000:15/0000:15:01.0/0000:16:00.0", numa_node=1, netdev="eth7", addresses=("10.1.2.3/20",)
    )
    address = IPv6Address("::ffff:10.1.2.3")
    assert rdma_ports(rdma_machine.root) == (
        DeviceFacts(
            name="mlx5_0",
            port=1,
            state="ACTIVE",
            link_layer="Ethernet",
            speed_gbit=400.0,
            active_mtu=4096,
            place=PciPosition(("pci0000:15", "0000:15:01.0", "0000:16:00.0"), 1),
            gids=(Gid(0, address, "IB/RoCE v1", "eth7", 96 + 20), Gid(1, address, "RoCE v2", "eth7", 96 + 20)),
            netdev="eth7",
            netdev_mtu=9000,
        ),
    )


def test_an_infiniband_port_has_a_lid_and_no_interface(rdma_machine: Any) -> None:
    rdma_machine.nic(
        "mlx5_1", "pci0000:15/0000:15:02.0/0000:17:00.0",
        layer="InfiniBand", lid="0x1f", addresses=("fe80::b859:9f03:c1:2/64",), kinds=("IB/RoCE v1",),
    )  # fmt: skip
    (port,) = rdma_ports(rdma_machine.root)
    assert (port.link_layer, port.lid, port.netdev, port.active_mtu) == ("InfiniBand", 31, "", 0)


def test_both_ports_of_a_device_are_read(rdma_machine: Any) -> None:
    for port, state in ((1, "4: ACTIVE"), (2, "1: DOWN")):
        rdma_machine.nic("mlx4_0", "pci0000:00/0000:00:01.0/0000:01:00.0", port=port, netdev=f"eth{port}", state=state)
    one, other = rdma_ports(rdma_machine.root)
    assert (one.key, one.state, other.key, other.state) == ("mlx4_0/1", "ACTIVE", "mlx4_0/2", "DOWN")
    assert (one.netdev, other.netdev) == ("eth1", "eth2")  # found without a GID


def test_a_software_device_sits_anywhere(rdma_machine: Any) -> None:
    rdma_machine.interface("eth0", mtu=1500)
    rdma_machine.nic("rxe0", netdev="eth0", addresses=("10.0.2.15/24",))
    (port,) = rdma_ports(rdma_machine.root)
    assert (port.place, port.active_mtu) == (ANYWHERE, 1024)


def test_a_port_of_a_bond_names_it(rdma_machine: Any) -> None:
    rdma_machine.interface("eth0", bond="bond0")
    rdma_machine.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0", netdev="eth0", addresses=("10.0.0.1/24",))
    rdma_machine.interface("bond0")
    rdma_machine.nic("mlx5_bond_0", netdev="bond0", addresses=("10.0.0.2/24",))
    assert [(port.name, port.bond) for port in rdma_ports(rdma_machine.root)] == [
        ("mlx5_0", "bond0"),
        ("mlx5_bond_0", "bond0"),
    ]


@pytest.mark.parametrize(
    ("mtu", "path_mtu"), [(1500, 1024), (4200, 4096), (4199, 2048), (9000, 4096), (1280, 1024), (576, 256), (68, 0)]
)
def test_the_path_mtu_follows_from_the_interfaces(rdma_machine: Any, mtu: int, path_mtu: int) -> None:
    rdma_machine.interface("eth0", mtu=mtu)
    rdma_machine.nic("rxe0", netdev="eth0", addresses=("10.0.2.15/24",))
    assert rdma_ports(rdma_machine.root)[0].active_mtu == path_mtu


def test_a_machine_without_devices_has_no_ports(tmp_path: Path) -> None:
    assert rdma_ports(tmp_path) == ()


def test_strange_files_leave_defaults(rdma_machine: Any) -> None:
    folder = "sys/class/infiniband/odd0/ports/1"
    for file, text in {"state": "?", "rate": "fast", "lid": "none", "link_layer": "Ethernet"}.items():
        rdma_machine.write(f"{folder}/{file}", text)
    rdma_machine.write(f"{folder}/gids/0", "no address")
    rdma_machine.write("proc/net/route", "nonsense\n\x00 1 2 3 4 5 6 7 8")
    assert rdma_ports(rdma_machine.root) == (DeviceFacts("odd0", 1, "UNKNOWN", "Ethernet", 0.0, 0),)


@pytest.mark.parametrize("written", ["0000:17:00.0", "00000000:17:00.0", "0000:17:00.0\n"])
def test_a_gpu_is_found_by_each_way_to_write_its_address(eight_by_eight: Any, written: str) -> None:
    place = pci_place(written, eight_by_eight.root)
    assert place.pci_path[0] == "pci0000:14"
    assert place.pci_path[-1] == "0000:17:00.0"
    assert place.numa_node == 0


def test_pci_addresses_are_normalised() -> None:
    assert normal_pci_address("00000000:3B:00.0") == "0000:3b:00.0"
    assert normal_pci_address("10000:E1:00.0") == "10000:e1:00.0"


def test_a_gpu_that_is_not_there_sits_anywhere(rdma_machine: Any) -> None:
    assert pci_place("0000:99:00.0", rdma_machine.root) == ANYWHERE


def test_distances_on_the_box_are_those_of_its_switches(eight_by_eight: Any) -> None:
    gpu = pci_place("0000:37:00.0", eight_by_eight.root)
    found = [nearness(gpu, port.place) for port in rdma_ports(eight_by_eight.root)]
    numa, other = Nearness.SAME_NUMA, Nearness.OTHER
    assert found == [numa, numa, Nearness.SAME_SWITCH, numa, other, other, other, other, numa]


def test_devices_of_one_host_bridge_behind_different_root_ports_share_the_root(rdma_machine: Any) -> None:
    rdma_machine.pci("pci0000:00/0000:00:01.0/0000:01:00.0", 0)
    rdma_machine.pci("pci0000:00/0000:00:02.0/0000:02:00.0", 0)
    one, other = (pci_place(address, rdma_machine.root) for address in ("0000:01:00.0", "0000:02:00.0"))
    assert nearness(one, other) is Nearness.SAME_ROOT


def test_nothing_is_known_of_distances_without_places() -> None:
    assert nearness(ANYWHERE, PciPosition(("pci0000:00", "0000:00:01.0"), 0)) is Nearness.UNKNOWN


@pytest.mark.parametrize(
    ("mems", "cpus", "expected"),
    [
        ("0-1", {0, 1, 2, 3}, ANYWHERE),
        ("0-1", {2, 3}, PciPosition(numa_node=1)),
        ("0-1", {1, 2}, ANYWHERE),
        ("1", {0, 1, 2, 3}, PciPosition(numa_node=1)),
        ("0,1", {0}, PciPosition(numa_node=0)),
    ],
)
def test_a_process_bound_to_one_node_has_its_memory_there(
    rdma_machine: Any, mems: str, cpus: set[int], expected: PciPosition
) -> None:
    rdma_machine.write("sys/devices/system/node/node0/cpulist", "0-1")
    rdma_machine.write("sys/devices/system/node/node1/cpulist", "2-3")
    rdma_machine.write("sys/devices/system/node/possible", "0-1")
    rdma_machine.write("proc/self/status", f"Name:\tx\n\nMems_allowed_list:\t{mems}")
    assert bound_place(rdma_machine.root, cpus) == expected


def test_on_a_machine_of_one_node_memory_may_be_anywhere(rdma_machine: Any) -> None:
    rdma_machine.write("sys/devices/system/node/node0/cpulist", "0-1")
    rdma_machine.write("proc/self/status", "Mems_allowed_list:\t0")
    assert bound_place(rdma_machine.root, {0}) == ANYWHERE
