"""Choice of the ports that become rails, with reasons, and pairing with the peer's rails."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from messenger.rdma.policy.facts import (
    ACTIVE,
    ANYWHERE,
    ETHERNET,
    INFINIBAND,
    ROCE_V2,
    DeviceFacts,
    Gid,
    Nearness,
    PciPosition,
    Rail,
    can_reach,
    nearness,
    same_subnet,
)

SLOW_FRACTION: Final = 0.25
"""A port slower than this fraction of the fastest, such as a management port, is not used unless it is requested."""


@dataclass(frozen=True)
class RailRequest:
    """Criteria of the choice.

    `devices` are the devices to use ("mlx5_0", or "mlx5_0/1" for one port), in this order; () means free choice.
    `memory` is the position of the registered memory, a GPU or a NUMA node; ANYWHERE if it is not fixed.
    """

    devices: tuple[str, ...] = ()
    memory: PciPosition = ANYWHERE


@dataclass(frozen=True)
class PortVerdict:
    """Decision on one port. `reason` continues a sentence that begins with the port's name."""

    device: str
    port: int
    is_taken: bool
    reason: str

    @property
    def text(self) -> str:
        where = f"{self.device}/{self.port}" if self.port else self.device
        return f"{where} {'taken' if self.is_taken else 'left out'}: {self.reason}"


@dataclass(frozen=True)
class RailChoice:
    """The chosen rails, nearest or requested first and spares last, and a verdict for every port."""

    rails: tuple[Rail, ...]
    verdicts: tuple[PortVerdict, ...]

    @property
    def why_none(self) -> str:
        """Reason for which no rail was chosen, in one line."""
        if not self.verdicts:
            return "this machine has no RDMA device"
        return "; ".join(verdict.text for verdict in self.verdicts if not verdict.is_taken)


def choose(ports: Sequence[DeviceFacts], request: RailRequest) -> RailChoice:
    """Choose the rails of this process.

    If devices are requested by name, the rails are their working ports, in the order of the names. Otherwise they are
    the working ports that are at least a quarter as fast as the fastest: those nearest to the memory, and the others as
    spares. Ties are broken by name and number, so that every process of a host gets the same order.
    """
    ordered = sorted(ports, key=lambda facts: (_natural(facts.name), facts.port))
    return _named(ordered, request) if request.devices else _nearest(ordered, request.memory)


def usable_gid(facts: DeviceFacts) -> Gid | None:
    """Return the routable RoCE v2 GID to use, preferring IPv4 and known subnets; None if there is none."""
    usable = [gid for gid in facts.gids if gid.kind == ROCE_V2 and gid.is_routable]
    return min(usable, key=lambda gid: (gid.address.ipv4_mapped is None, not gid.prefix_bits, gid.index), default=None)


def pair(local: Sequence[Rail], remote: Sequence[Rail]) -> tuple[tuple[int, int], ...]:
    """Pair the rails of two peers; return pairs of indices, as many as the side with more rails has.

    Rails of the same subnet are paired first, then those of equal number (in rail-optimised networks, rail n of every
    host is attached to the same switch), then in order; on the side with fewer rails, the pairs are spread evenly. A
    rail that reaches no rail of the other side is in no pair. Pairs of spares come last.
    """
    reachable = sorted(
        (not same_subnet(mine, theirs), mine.is_spare + theirs.is_spare, abs(i - j), i, j)
        for i, mine in enumerate(local)
        for j, theirs in enumerate(remote)
        if can_reach(mine, theirs)
    )
    num_pairs = max(len({i for *_, i, _ in reachable}), len({j for *_, j in reachable}))
    pairs: list[tuple[int, int]] = []
    local_uses: Counter[int] = Counter()
    remote_uses: Counter[int] = Counter()
    for most_uses in range(1, num_pairs + 1):  # one each first: no rail is used twice while another is idle
        for *_, i, j in reachable:
            fewer, more = sorted((local_uses[i], remote_uses[j]))
            if fewer == 0 and more < most_uses:
                local_uses[i] += 1
                remote_uses[j] += 1
                pairs.append((i, j))
    return tuple(sorted(pairs, key=lambda each: (local[each[0]].is_spare or remote[each[1]].is_spare, *each)))


def pair_mtu(local: Rail, remote: Rail) -> int:
    """Return the path MTU of a connection between the two rails."""
    return min(local.mtu, remote.mtu)


def _named(ports: Sequence[DeviceFacts], request: RailRequest) -> RailChoice:
    rails: list[Rail] = []
    verdicts: list[PortVerdict] = []
    for name in dict.fromkeys(request.devices):
        asked = [facts for facts in ports if name in (facts.name, facts.key)]
        if not asked:
            there = ", ".join(facts.key for facts in ports) or "no RDMA device"
            verdicts.append(PortVerdict(name, 0, False, f"there is no such device; this machine has {there}"))
        for facts in asked:
            problem = _problem(facts) or _shared_address(facts, rails)
            if not problem:
                rails.append(_rail(facts))
            verdicts.append(_verdict(facts, problem, f"requested, {_what(facts)}"))
    named = {(verdict.device, verdict.port) for verdict in verdicts}
    verdicts += [
        PortVerdict(facts.name, facts.port, False, "others are requested by name (rdma_devices)")
        for facts in ports
        if (facts.name, facts.port) not in named
    ]
    return RailChoice(tuple(rails), tuple(verdicts))


def _nearest(ports: Sequence[DeviceFacts], memory: PciPosition) -> RailChoice:
    working = [facts for facts in ports if not _problem(facts)]
    fastest_gbit = max((facts.speed_gbit for facts in working), default=0.0)
    fast = [facts for facts in working if facts.speed_gbit >= SLOW_FRACTION * fastest_gbit]
    distances = {facts.key: _distance(facts, memory) for facts in fast}
    nearest = min(distances.values(), default=Nearness.UNKNOWN)
    rails: list[Rail] = []
    verdicts: dict[str, PortVerdict] = {}
    for facts in sorted(fast, key=lambda each: distances[each.key]):  # stable: names decide among equals
        distance = distances[facts.key]
        problem = _shared_address(facts, rails)
        if not problem:
            rails.append(replace(_rail(facts), is_spare=distance > nearest))
        where = "" if memory == ANYWHERE else f", {distance.text} as the memory"
        role = "as a spare, " if distance > nearest else ""
        verdicts[facts.key] = _verdict(facts, problem, f"{role}{_what(facts)}{where}")
    slow = f"slower than a quarter of the fastest ({fastest_gbit:g} Gb/s); name it in rdma_devices to use it"
    for facts in ports:
        if facts.key not in verdicts:
            verdicts[facts.key] = _verdict(facts, _problem(facts) or slow, "")
    return RailChoice(tuple(rails), tuple(verdicts[facts.key] for facts in ports))


def _distance(facts: DeviceFacts, memory: PciPosition) -> Nearness:
    """Return the distance to the memory, which is the same for all ports if the memory is not fixed."""
    return Nearness.UNKNOWN if memory == ANYWHERE else nearness(facts.place, memory)


def _problem(facts: DeviceFacts) -> str:
    """Return the reason for which the port cannot be a rail; "" if it can."""
    if facts.link_layer not in (ETHERNET, INFINIBAND):
        return f"its link layer is {facts.link_layer or 'unknown'}"
    if facts.state != ACTIVE:
        return f"its link is {facts.state}: check cable and switch{_interface_hint(facts)}"
    if facts.link_layer == INFINIBAND:
        return "" if facts.lid else "it has no LID: no subnet manager answers"
    if usable_gid(facts) is not None:
        return ""
    if not facts.gids:
        return f"its GID table is empty: give {_interface(facts)} an IP address"
    if all(gid.kind != ROCE_V2 for gid in facts.gids):
        return "it has GIDs of RoCE v1 only, which is not routable: switch it to RoCE v2"
    return f"its RoCE v2 GIDs are all link-local: give {_interface(facts)} a routable IP address"


def _interface_hint(facts: DeviceFacts) -> str:
    return f", and that {facts.netdev} is up" if facts.netdev else ""


def _interface(facts: DeviceFacts) -> str:
    return facts.netdev or "its interface"


def _shared_address(facts: DeviceFacts, rails: Sequence[Rail]) -> str:
    """Return the reason if a chosen rail has the same address, as ports of a bond do; otherwise "".

    Traffic to that address arrives at one of the ports only.
    """
    gid = usable_gid(facts)
    if facts.link_layer == INFINIBAND or gid is None:
        return ""
    for rail in rails:
        if rail.gid == gid.address.packed:
            bond = f" of {facts.bond}" if facts.bond else ""
            return f"it shares the address {rail.address}{bond} with {rail.name}"
    return ""


def _rail(facts: DeviceFacts) -> Rail:
    gid = usable_gid(facts) if facts.link_layer == ETHERNET else next((g for g in facts.gids if g.index == 0), None)
    return Rail(
        device=facts.name,
        port=facts.port,
        link_layer=facts.link_layer,
        gid_index=gid.index if gid is not None else 0,
        gid=gid.address.packed if gid is not None else bytes(16),
        prefix_bits=gid.prefix_bits if gid is not None else 0,
        lid=facts.lid if facts.link_layer == INFINIBAND else 0,
        mtu=facts.active_mtu,
        speed_gbit=facts.speed_gbit,
        numa_node=facts.place.numa_node,
    )


def _what(facts: DeviceFacts) -> str:
    speed = f"{facts.speed_gbit:g} Gb/s"
    if facts.link_layer == INFINIBAND:
        return f"InfiniBand LID {facts.lid}, {speed}"
    rail = _rail(facts)
    return f"RoCE v2 at {rail.address} (GID {rail.gid_index}), {speed}"


def _verdict(facts: DeviceFacts, problem: str, reason: str) -> PortVerdict:
    return PortVerdict(facts.name, facts.port, not problem, problem or reason)


def _natural(name: str) -> tuple[tuple[str, int], ...]:
    """Return a sort key that puts "mlx5_10" after "mlx5_9"."""
    return tuple((text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name))
