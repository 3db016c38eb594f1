"""Which ports become rails, why, and which of the peer's they are paired with."""

from dataclasses import replace
from ipaddress import IPv6Address, ip_address
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from messenger.errors import ProtocolError
from messenger.rdma.policy.facts import (
    DeviceFacts,
    Gid,
    PciPosition,
    Rail,
    can_reach,
    rail_from_wire,
    rail_to_wire,
    same_subnet,
)
from messenger.rdma.policy.rail_choice import RailChoice, RailRequest, choose, pair, pair_mtu, usable_gid
from messenger.rdma.topology import pci_place, rdma_ports


def gid_of(text: str, *, index: int = 0, kind: str = "RoCE v2", bits: int = 0) -> Gid:
    address = ip_address(text)
    value = int(address) | (0xFFFF << 32 if address.version == 4 else 0)
    return Gid(index, IPv6Address(value), kind, "eth0", bits)


def roce(name: str = "mlx5_0", *gids: Gid, **changes: Any) -> DeviceFacts:
    table = gids or (gid_of("10.0.0.5", index=3, bits=120),)
    port = DeviceFacts(name, 1, "ACTIVE", "Ethernet", 400.0, 4096, gids=table, netdev="eth0", netdev_mtu=9000)
    return replace(port, **changes)


def infiniband(name: str = "mlx5_0", **changes: Any) -> DeviceFacts:
    gids = (Gid(0, IPv6Address("fe80::b859:9f03:c1:2"), "IB/RoCE v1"),)
    return replace(DeviceFacts(name, 1, "ACTIVE", "InfiniBand", 400.0, 0, lid=7, gids=gids), **changes)


def names(choice: RailChoice) -> list[str]:
    return [f"{rail.device}{' spare' if rail.is_spare else ''}" for rail in choice.rails]


def reasons(choice: RailChoice) -> dict[str, str]:
    return {f"{verdict.device}/{verdict.port}": verdict.reason for verdict in choice.verdicts if not verdict.is_taken}


@pytest.mark.parametrize(
    ("port", "said"),
    [
        (roce(state="DOWN"), "its link is DOWN: check cable and switch, and that eth0 is up"),
        (infiniband(state="INIT"), "its link is INIT"),
        (infiniband(lid=0), "no subnet manager"),
        (roce(gids=()), "its GID table is empty: give eth0 an IP address"),
        (roce("x", gid_of("10.0.0.5", kind="IB/RoCE v1")), "RoCE v1 only"),
        (roce("x", gid_of("fe80::1"), gid_of("169.254.3.4")), "all link-local"),
        (roce("x", gid_of("fe80::1"), netdev=""), "give its interface a routable IP address"),
        (roce("x", gid_of("127.0.0.1"), gid_of("::1")), "all link-local"),
        (roce(link_layer="Unspecified"), "its link layer is Unspecified"),
    ],
)
def test_a_port_that_cannot_be_used_is_left_out_with_its_reason(port: DeviceFacts, said: str) -> None:
    choice = choose([port], RailRequest())
    assert choice.rails == ()
    assert said in choice.verdicts[0].reason
    assert said in choice.why_none


def test_without_devices_that_is_said() -> None:
    assert choose([], RailRequest()).why_none == "this machine has no RDMA device"


def test_a_roce_rail_has_the_v2_gid_that_peers_can_reach() -> None:
    table = (
        gid_of("fe80::1", index=0, kind="IB/RoCE v1"),
        gid_of("fe80::1", index=1),
        gid_of("10.0.0.5", index=2, kind="IB/RoCE v1", bits=120),
        gid_of("2001:db8::5", index=3, bits=64),
        gid_of("10.0.0.5", index=5, bits=120),
    )
    (rail,) = choose([roce("mlx5_0", *table)], RailRequest()).rails
    assert (rail.gid_index, rail.address, rail.prefix_bits, rail.lid, rail.mtu) == (5, "10.0.0.5", 120, 0, 4096)


def test_a_global_ipv6_gid_serves_where_there_is_no_ipv4() -> None:
    (rail,) = choose([roce("x", gid_of("fe80::1"), gid_of("2001:db8::5", index=4))], RailRequest()).rails
    assert (rail.gid_index, rail.address) == (4, "2001:db8::5")


def test_an_infiniband_rail_is_reached_by_its_lid() -> None:
    (rail,) = choose([infiniband()], RailRequest()).rails
    assert (rail.lid, rail.gid_index, rail.mtu, rail.is_infiniband) == (7, 0, 0, True)


def test_of_two_ports_with_one_address_the_first_is_taken() -> None:
    choice = choose([roce("mlx5_0", bond="bond0"), roce("mlx5_1", bond="bond0")], RailRequest())
    assert names(choice) == ["mlx5_0"]
    assert reasons(choice) == {"mlx5_1/1": "it shares the address 10.0.0.5 of bond0 with mlx5_0/1"}


def test_named_devices_are_taken_in_the_order_of_the_names(eight_by_eight: Any) -> None:
    choice = choose(rdma_ports(eight_by_eight.root), RailRequest(devices=("mlx5_8", "mlx5_2/1", "mlx5_99", "mlx5_2")))
    assert names(choice) == ["mlx5_8", "mlx5_2"]
    left_out = reasons(choice)
    assert "no such device; this machine has mlx5_0/1, mlx5_1/1" in left_out["mlx5_99/0"]
    assert left_out["mlx5_3/1"] == "others are requested by name (rdma_devices)"


def test_a_named_device_that_is_down_is_no_rail() -> None:
    choice = choose([roce(state="DOWN"), roce("mlx5_1")], RailRequest(devices=("mlx5_0",)))
    assert choice.rails == ()
    assert "mlx5_0/1 left out: its link is DOWN" in choice.why_none


def test_a_gpus_rail_is_the_adapter_behind_its_switch_and_the_others_are_spares(eight_by_eight: Any) -> None:
    memory = pci_place("0000:37:00.0", eight_by_eight.root)
    choice = choose(rdma_ports(eight_by_eight.root), RailRequest(memory=memory))
    near = ["mlx5_0 spare", "mlx5_1 spare", "mlx5_3 spare"]
    far = ["mlx5_4 spare", "mlx5_5 spare", "mlx5_6 spare", "mlx5_7 spare"]
    assert names(choice) == ["mlx5_2", *near, *far]
    assert "behind the same PCIe switch as the memory" in choice.verdicts[2].reason
    assert "slower than a quarter of the fastest" in reasons(choice)["mlx5_8/1"]


def test_where_the_nearest_adapter_is_down_the_next_nearest_serve(eight_by_eight: Any) -> None:
    eight_by_eight.write("sys/class/infiniband/mlx5_2/ports/1/state", "1: DOWN")
    memory = pci_place("0000:37:00.0", eight_by_eight.root)
    choice = choose(rdma_ports(eight_by_eight.root), RailRequest(memory=memory))
    assert names(choice)[:4] == ["mlx5_0", "mlx5_1", "mlx5_3", "mlx5_4 spare"]


def test_memory_of_a_numa_node_gets_the_adapters_of_that_node(eight_by_eight: Any) -> None:
    choice = choose(rdma_ports(eight_by_eight.root), RailRequest(memory=PciPosition(numa_node=1)))
    assert names(choice)[:5] == ["mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7", "mlx5_0 spare"]


def test_memory_that_may_be_anywhere_gets_all_fast_adapters(eight_by_eight: Any) -> None:
    choice = choose(rdma_ports(eight_by_eight.root), RailRequest())
    assert names(choice) == [f"mlx5_{index}" for index in range(8)]


def test_numbers_in_names_count_as_numbers() -> None:
    ports = [roce(f"mlx5_{index}", gid_of(f"10.0.{index}.5")) for index in (10, 9, 2)]
    assert names(choose(ports, RailRequest())) == ["mlx5_2", "mlx5_9", "mlx5_10"]


ADDRESSES = st.sampled_from(["fe80::1", "10.0.0.1", "10.0.1.1", "2001:db8::1", "169.254.0.1"])
PORTS = st.builds(
    DeviceFacts,
    name=st.sampled_from([f"mlx5_{index}" for index in range(12)]),
    port=st.integers(1, 2),
    state=st.sampled_from(["ACTIVE", "DOWN"]),
    link_layer=st.sampled_from(["Ethernet", "InfiniBand", ""]),
    speed_gbit=st.sampled_from([0.0, 10.0, 100.0, 400.0]),
    active_mtu=st.sampled_from([0, 1024, 4096]),
    place=st.builds(PciPosition, st.sampled_from([(), ("pci0000:00", "0000:00:01.0")]), st.integers(-1, 1)),
    lid=st.integers(0, 3),
    gids=st.lists(
        st.builds(gid_of, ADDRESSES, index=st.integers(0, 9), kind=st.sampled_from(["RoCE v2", "IB/RoCE v1"])),
        max_size=4,
    ).map(tuple),
)
MACHINES = st.lists(PORTS, max_size=8, unique_by=lambda port: port.key)
WISHES = st.builds(
    RailRequest,
    devices=st.lists(st.sampled_from(["mlx5_0", "mlx5_1/1", "mlx5_3", "none"]), max_size=3).map(tuple),
    memory=st.builds(PciPosition, st.just(()), st.integers(-1, 1)),
)


@given(MACHINES, WISHES)
def test_every_port_gets_one_verdict_and_every_rail_can_be_reached(
    machine: list[DeviceFacts], request: RailRequest
) -> None:
    choice = choose(machine, request)
    found = [(verdict.device, verdict.port) for verdict in choice.verdicts if verdict.port]
    assert sorted(found) == sorted((port.name, port.port) for port in machine)
    taken = {(verdict.device, verdict.port) for verdict in choice.verdicts if verdict.is_taken}
    assert {(rail.device, rail.port) for rail in choice.rails} == taken
    assert all(verdict.reason for verdict in choice.verdicts)
    for rail in choice.rails:
        assert rail.is_infiniband or not rail.address.startswith(("fe80", "169.254"))
        assert rail_from_wire(list(rail_to_wire(rail))) == rail
    assert [rail.is_spare for rail in choice.rails] == sorted(rail.is_spare for rail in choice.rails)


@given(MACHINES, WISHES, st.randoms(use_true_random=False))
def test_the_order_in_which_ports_are_found_changes_nothing(
    machine: list[DeviceFacts], request: RailRequest, random: Any
) -> None:
    shuffled = list(machine)
    random.shuffle(shuffled)
    assert choose(shuffled, request) == choose(machine, request)


@given(MACHINES)
def test_a_gid_that_is_chosen_is_routable_and_of_v2(machine: list[DeviceFacts]) -> None:
    for port in machine:
        chosen = usable_gid(port)
        assert (chosen is not None) == any(gid.kind == "RoCE v2" and gid.is_routable for gid in port.gids)
        assert chosen is None or (chosen.kind == "RoCE v2" and chosen.is_routable)


# Pairs.


def rail(name: str, address: str, *, bits: int = 120, spare: bool = False, mtu: int = 4096) -> Rail:
    return Rail(name, 1, "Ethernet", 3, gid_of(address).address.packed, bits, 0, mtu, 400.0, 0, spare)


def test_rails_of_one_subnet_go_together() -> None:
    local = [rail("a0", "10.0.0.1"), rail("a1", "10.0.1.1"), rail("a2", "10.0.2.1")]
    remote = [rail("b0", "10.0.2.2"), rail("b1", "10.0.0.2"), rail("b2", "10.0.1.2")]
    assert pair(local, remote) == ((0, 1), (1, 2), (2, 0))


def test_rails_of_no_common_subnet_go_together_by_their_number() -> None:
    local = [rail(f"a{index}", f"10.1.{index}.1") for index in range(3)]
    remote = [rail(f"b{index}", f"10.2.{index}.1") for index in range(3)]
    assert pair(local, remote) == ((0, 0), (1, 1), (2, 2))


def test_one_rail_serves_every_rail_of_a_wider_peer() -> None:
    assert pair([rail("a", "10.0.0.1")], [rail(f"b{n}", f"10.0.0.{n + 2}") for n in range(3)]) == (
        (0, 0),
        (0, 1),
        (0, 2),
    )


def test_pairs_with_spares_come_last() -> None:
    local = [rail("a0", "10.0.0.1", spare=True), rail("a1", "10.0.0.2")]
    remote = [rail("b0", "10.0.0.3"), rail("b1", "10.0.0.4")]
    assert pair(local, remote) == ((1, 1), (0, 0))


def test_what_cannot_reach_each_other_is_no_pair() -> None:
    lid = choose([infiniband()], RailRequest()).rails[0]
    assert pair([rail("a", "10.0.0.1")], [lid]) == ()
    assert pair([rail("a", "10.0.0.1")], [rail("b", "2001:db8::1")]) == ()
    other_fabric = replace(lid, gid=IPv6Address("fe80:0:0:1::7").packed)
    assert pair([lid], [other_fabric]) == ()
    assert pair([lid], [lid]) == ((0, 0),)


def test_a_pair_has_the_lesser_mtu() -> None:
    assert pair_mtu(rail("a", "10.0.0.1"), rail("b", "10.0.0.2", mtu=1024)) == 1024


def test_a_subnet_is_shared_only_by_the_shorter_prefix_that_both_know() -> None:
    assert same_subnet(rail("a", "10.0.0.1", bits=120), rail("b", "10.0.0.200", bits=112))
    assert not same_subnet(rail("a", "10.0.0.1", bits=120), rail("b", "10.0.1.1", bits=120))
    assert not same_subnet(rail("a", "10.0.0.1", bits=0), rail("b", "10.0.0.2", bits=120))


RAILS = st.lists(
    st.builds(rail, st.just("x"), st.sampled_from(["10.0.0.1", "10.0.1.1", "2001:db8::1"]), spare=st.booleans()),
    max_size=6,
)


@given(RAILS, RAILS)
def test_pairs_use_every_rail_that_reaches_anything_and_spread_evenly(local: list[Rail], remote: list[Rail]) -> None:
    pairs = pair(local, remote)
    assert len(set(pairs)) == len(pairs)
    assert all(can_reach(local[i], remote[j]) for i, j in pairs)
    able_local = {i for i, mine in enumerate(local) if any(can_reach(mine, theirs) for theirs in remote)}
    able_remote = {j for j, theirs in enumerate(remote) if any(can_reach(mine, theirs) for mine in local)}
    assert {i for i, _ in pairs} == able_local
    assert {j for _, j in pairs} == able_remote
    for i, j in pairs:  # nobody is shared on both sides
        assert sum(a == i for a, _ in pairs) == 1 or sum(b == j for _, b in pairs) == 1


@pytest.mark.parametrize(
    "change",
    [
        {0: 5}, {3: True}, {4: b"short"}, {4: "0" * 16}, {2: "carrier pigeon"}, {5: 129}, {6: 1 << 16}, {7: 1500},
        {8: float("nan")}, {8: -1.0}, {10: 1}, {1: -1}, {3: -1}, {3: 256},
    ],
)  # fmt: skip
def test_a_rail_that_cannot_be_is_refused(change: dict[int, object]) -> None:
    fields: list[object] = list(rail_to_wire(rail("a", "10.0.0.1")))
    for index, value in change.items():
        fields[index] = value
    with pytest.raises(ProtocolError):
        rail_from_wire(fields)


@pytest.mark.parametrize("value", [None, [], [1, 2], "rail", {}])
def test_what_is_no_rail_at_all_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        rail_from_wire(value)
