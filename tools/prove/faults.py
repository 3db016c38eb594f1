"""The faults of a schedule: each begins at its instant, after its step, or at its moment, and ends when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tools.prove import adversary
from tools.prove.cluster import AskedRequest, Node, SimCluster
from tools.prove.schedule import LINK_FAULTS, LOAD_S, SimFault
from tools.prove.world.network import SimNetwork
from tools.prove.world.process import Process
from tools.prove.world.scheduler import Moment, World

_SLOWER = 300.0
_PATIENCE_S = 5e-3  # mean
_DISK_FAULTS = {"slow": (50.0, 1.0), "read_errors": (0.3, 0.0), "write_errors": (0.3, 0.0)}  # and without the fault


class Faults:
    """All faults of one schedule. `pending` counts those that are not over."""

    def __init__(
        self,
        world: World,
        network: SimNetwork,
        cluster: SimCluster,
        asked: Mapping[str, AskedRequest],
        faults: Sequence[SimFault],
    ) -> None:
        self.world, self.network, self.cluster = world, network, cluster
        self.pending = len(faults)
        self.changed_ns = 0  # when a fault last began or ended
        self.lasting: list[SimFault] = []  # faults that have begun and are not over
        self._asked = asked
        self._faults = faults
        self._expected: list[SimFault] = []  # faults that wait for their moment
        self._seen: dict[SimFault, int] = {}
        self.moments: dict[str, int] = {}  # how many of each there were

    def begin(self) -> None:
        """Let the faults come, counted from now."""
        world = self.world
        world.on_moment = self._on_moment
        for fault in self._faults:
            world.at(fault.at_s, lambda fault=fault: self._arm(fault))  # type: ignore[misc]
        world.at(LOAD_S, self._expire)

    def _arm(self, fault: SimFault) -> None:
        if fault.moment:
            self._expected.append(fault)
            return
        process = None if not fault.after_steps else self.cluster.nodes[fault.target].process
        if process is None or process.is_dead:
            self._begin(fault)
        else:
            process.call_after(fault.after_steps, lambda: self._begin(fault))

    def _on_moment(self, moment: Moment) -> None:
        self.moments[moment.name] = self.moments.get(moment.name, 0) + 1
        if moment.name == "answered" and any(each.kind == "impatient" for each in self.lasting):
            self._leave_soon(moment.request_id)
        for fault in [each for each in self._expected if each.moment == moment.name]:
            there = moment.there or moment.here.name
            here = self.cluster.nodes[moment.here.name]
            if fault.target == "there" and there == here.name and fault.kind != "leave":
                continue
            self._seen[fault] = self._seen.get(fault, 0) + 1
            if self._seen[fault] < fault.nth:
                continue
            self._expected.remove(fault)
            self.world.tell("moment", f"{here.name} {moment.name} {moment.there} {moment.request_id[-6:]}")
            nodes = self.cluster.nodes
            partner = nodes.get(there, here)
            target, other = {"here": (here, partner), "there": (partner, here)}.get(
                fault.target, (nodes.get(fault.target, here), here)
            )
            if fault.kind in (*LINK_FAULTS, "host"):
                found = replace(fault, target=target.host, other=other.host)
            elif fault.kind == "leave":
                found = replace(fault, target=self._name_of(moment.request_id, its_own=fault.target == "here"))
            else:
                found = replace(fault, target=target.name, other=other.name)
            self.world.at(fault.delay_s, lambda found=found: self._begin(found))  # type: ignore[misc]

    def _name_of(self, request_id: str, *, its_own: bool) -> str:
        """Return the client of a request, or another one; any whose request is open if there is none."""
        open_ = [each for each in self._asked.values() if each.leave is not None and not each.ended]
        own = [each for each in open_ if any(one.request_id == request_id for one in each.requests)]
        chosen = (own if its_own else [each for each in open_ if each not in own]) or open_
        return self.world.chance.choice(chosen).name if chosen else ""

    def _expire(self) -> None:
        """No fault begins at a moment after the load."""
        for fault in self._expected:
            self._over(fault)
        self._expected = []

    def _begin(self, fault: SimFault) -> None:
        self.world.tell("fault", f"{fault.kind} {fault.target} {fault.other} for {fault.for_s} s")
        self.changed_ns = self.world.now_ns
        self.lasting.append(fault)
        begin = {
            "cut": self._cut,
            "cut one way": self._cut,
            "slow": self._cut,
            "garbles": self._cut,
            "reset": self._reset,
            "disk": self._disk,
            "host": self._host,
            "flip": self._flip,
            "leave": self._leave,
            "all leave": self._all_leave,
            "impatient": self._impatient,
            "forge": self._forge,
        }.get(fault.kind, self._node)
        begin(fault)

    def _over(self, fault: SimFault) -> None:
        self.pending -= 1
        if fault in self.lasting:
            self.lasting.remove(fault)
            self.changed_ns = self.world.now_ns
            self.world.tell("fault", f"{fault.kind} {fault.target} is over")

    # The network

    def _cut(self, fault: SimFault) -> None:
        network = self.network
        ways = [(fault.target, fault.other), (fault.other, fault.target)][: 1 if "one" in fault.kind else 2]
        for way in ways:
            if fault.kind == "slow":
                network.link(*way).slower = _SLOWER
            elif fault.kind == "garbles":
                network.link(*way).garbles = True
            else:
                network.cut(*way)

        def heal() -> None:
            for way in ways:
                network.link(*way).slower = 1.0
                network.link(*way).garbles = False
                network.heal(*way)
            self._over(fault)

        self.world.at(fault.for_s, heal)

    def _reset(self, fault: SimFault) -> None:
        self.network.reset(fault.target, fault.other)
        self._over(fault)

    def _host(self, fault: SimFault) -> None:
        cluster, network = self.cluster, self.network
        network.kill_host(fault.target)
        nodes = [node for node in cluster.nodes.values() if node.host == fault.target]
        for node in nodes:
            cluster.kill(node)
        if fault.target in cluster.disks:
            cluster.disks[fault.target].crash(self.world.chance)

        def revive() -> None:
            network.revive_host(fault.target)
            for node in nodes:
                self._restart(node)
            self._over(fault)

        self.world.at(fault.for_s, revive)

    # Disks and memory

    def _disk(self, fault: SimFault) -> None:
        disk = self.cluster.disks.get(fault.target)
        if disk is None:
            self._over(fault)
            return
        if fault.other == "flip":
            self.world.tell("fault", f"a bit is flipped: {disk.flip(self.world.chance, under='/disk')}")
            self._over(fault)
            return
        faulty, whole = _DISK_FAULTS.get(fault.other, (True, False))
        setattr(disk, fault.other, faulty)

        def mend() -> None:
            setattr(disk, fault.other, whole)
            self._over(fault)

        self.world.at(fault.for_s, mend)

    def _flip(self, fault: SimFault) -> None:
        node = self.cluster.nodes[fault.target]
        arenas = node.process.objects.get("arena", []) if node.process is not None and node.is_alive else []
        for arena in arenas:
            array = arena()
            used, chance = array.nonzero()[0], self.world.chance
            count = chance.choice((1, 100)) if len(used) else 0
            for _ in range(count):
                array[int(used[chance.randrange(len(used))])] ^= 1 << chance.randrange(8)
            self.world.tell("fault", f"{count} bits of the arena of {node.name} are flipped")
        self._over(fault)

    # Clients

    def _leave(self, fault: SimFault) -> None:
        asked = self._asked.get(fault.target)
        if asked is not None and asked.leave is not None:
            asked.leave()
        self._over(fault)

    def _all_leave(self, fault: SimFault) -> None:
        """All clients leave at almost the same time, as when a proxy in front of the cluster ends."""
        for asked in self._asked.values():
            if asked.leave is not None and not asked.ended:
                self.world.at(self.world.chance.expovariate(1000.0), asked.leave)
        self._over(fault)

    def _impatient(self, fault: SimFault) -> None:
        """For a while, the client whose request is next to get slots leaves when an answer ends, which frees some."""
        self.world.at(fault.for_s, lambda: self._over(fault))

    def _leave_soon(self, request_id: str) -> None:
        for asked in self._asked.values():
            if asked.leave is not None and any(each.request_id == request_id for each in asked.requests):
                self.world.at(self.world.chance.expovariate(1 / _PATIENCE_S), asked.leave)

    # Nodes

    def _forge(self, fault: SimFault) -> None:
        victim, sender = self.cluster.nodes[fault.target].process, self.cluster.nodes[fault.other].process
        if victim is not None and sender is not None and not victim.is_dead and not sender.is_dead:
            adversary.forge(victim, sender)
        self._over(fault)

    def _node(self, fault: SimFault) -> None:
        node = self.cluster.nodes[fault.target]
        process = node.process
        if process is None or process.is_dead or process.is_paused:
            self._over(fault)
        elif fault.kind == "kill":
            self.cluster.kill(node)
            self.world.at(fault.for_s, lambda: self._restart_after(fault, node))
        elif fault.kind == "hang":
            self.world.pause(process)
            self.world.at(fault.for_s, lambda: self._go_on_after(fault, process))
        elif fault.kind == "stall":
            self._stall(fault, node, process)
        elif fault.kind == "stop":
            self.cluster.shut_down(node)
            self.world.at(fault.for_s, lambda: self._restart_when_ended(fault, node, process))
        else:
            raise AssertionError(f"unknown fault {fault.kind}")

    def _stall(self, fault: SimFault, node: Node, process: Process) -> None:
        """The engine's next step never ends; the worker does, and is started again."""
        if node.role not in ("prefill", "decode"):
            self._over(fault)
            return
        process.objects.setdefault("on stall", []).append((fault, lambda: self._stalled(fault, node, process)))
        self.world.at(fault.for_s, lambda: self._stall_in_vain(fault, process))

    def _stalled(self, fault: SimFault, node: Node, process: Process) -> None:
        self.world.tell("fault", f"the engine of {node.name} stands still")
        self._restart_when_ended(fault, node, process)

    def _stall_in_vain(self, fault: SimFault, process: Process) -> None:
        """No step came."""
        waiting = process.objects.get("on stall", [])
        if found := [each for each in waiting if each[0] is fault]:
            waiting.remove(found[0])
            self._over(fault)

    def _restart_when_ended(self, fault: SimFault, node: Node, process: Process) -> None:
        if process.is_dead:
            self._restart_after(fault, node)
        else:
            self.world.at(0.5, lambda: self._restart_when_ended(fault, node, process))

    def _restart_after(self, fault: SimFault, node: Node) -> None:
        self._restart(node)
        self._over(fault)

    def _go_on_after(self, fault: SimFault, process: Process) -> None:
        self.world.go_on(process)
        self._over(fault)

    def _restart(self, node: Node) -> None:
        if not node.is_alive and node.host not in self.network.dead_hosts:
            self.cluster.start(node)
