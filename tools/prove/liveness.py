"""Invariants that hold at any time, looked at again and again while a schedule runs.

- A conductor's request table is consistent, and claims nothing on nodes that have left.
- A node that stands still is suspect soon, and no request waits for it any longer, as long as others can serve it.
- No request waits for slots that are free.
- While one part of the cluster is disturbed and the rest could serve, every request ends in time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tools.prove.cluster import AskedRequest, Node, SimCluster
from tools.prove.faults import Faults
from tools.prove.world.scheduler import SECOND_NS, World

LOOK_S = 0.25
NOTICE_S = 10.0  # report_timeout_s is 5, conductors look every second, and frontends ask every second
SERVE_S = 1.0  # until free slots are given to who waits for them
FINISH_S = 45.0  # for a request, while the same faults last


class LivenessCheck:
    """Watches one schedule; problems go to the world."""

    def __init__(
        self,
        world: World,
        cluster: SimCluster,
        faults: Faults,
        asked: Mapping[str, AskedRequest],
        excused: Mapping[str, str],
    ) -> None:
        self._world, self._cluster, self._faults = world, cluster, faults
        self._asked, self._excused = asked, excused
        self._since_ns: dict[str, int] = {}  # of what must not last
        self._told: set[str] = set()

    def begin(self) -> None:
        """Look until the schedule is over."""
        self._look()
        self._world.at(LOOK_S, self.begin)

    def _look(self) -> None:
        lasting: dict[str, float] = {}
        for node in self._cluster.nodes.values():
            if node.process is None or node.process.is_dead:
                continue
            if node.process.is_paused:
                if self._only_hangs(node.name) and self._is_member(node.name):
                    if not self._is_suspect(node.name):
                        lasting[f"{node.name} stands still, and is not suspect"] = NOTICE_S
                    lasting |= dict.fromkeys(self._waits_for(node), NOTICE_S)
            elif node.role == "conductor":
                for problem in self._table(node):
                    self._tell(f"{node.name}: {problem}")
            elif node.role in ("prefill", "decode"):
                lasting |= dict.fromkeys(self._idle_slots(node), SERVE_S)
        if self._can_serve():
            settled_ns = self._faults.changed_ns
            for name, asked in self._asked.items():
                if asked.sent_ns and not asked.ended and name not in self._excused:
                    since_ns = max(settled_ns, asked.sent_ns)
                    if self._world.now_ns - since_ns > FINISH_S * SECOND_NS:
                        self._tell(f"not ended: {name} within {FINISH_S:.0f} s, although nodes could serve it")
        self._must_not_last(lasting)

    def _must_not_last(self, found: Mapping[str, float]) -> None:
        now_ns = self._world.now_ns
        self._since_ns = {text: self._since_ns.get(text, now_ns) for text in found}
        for text, most_s in found.items():
            if now_ns - self._since_ns[text] > most_s * SECOND_NS:
                self._tell(f"{text} after {most_s:.0f} s")

    def _tell(self, problem: str) -> None:
        if problem not in self._told:
            self._told.add(problem)
            self._world.problem(problem)

    def _only_hangs(self, name: str) -> bool:
        """True if the only fault that lasts is that this node stands still."""
        return [(fault.kind, fault.target) for fault in self._faults.lasting] == [("hang", name)]

    def _running(self, role: str) -> Iterator[Node]:
        for node in self._cluster.nodes.values():
            if node.role == role and node.process is not None and node.is_alive and not node.process.is_paused:
                yield node

    def _table(self, node: Node) -> list[str]:
        assert node.process is not None
        return [
            problem for each in node.process.objects.get("conductor", []) for problem in _policy(each).validate()[0]
        ]

    def _conductors(self) -> list[Any]:
        services = [each.process.objects.get("conductor", []) for each in self._running("conductor") if each.process]
        return [service for each in services for service in each]

    def _is_member(self, name: str) -> bool:
        """True if every conductor knows a node. One that lost its connection to a conductor is no member of it."""
        return all(name in {each.node.node_id for each in service._registry} for service in self._conductors())

    def _is_suspect(self, name: str) -> bool:
        return all(name in _policy(service).suspects for service in self._conductors())

    def _waits_for(self, hanging: Node) -> list[str]:
        """Return which attempts of requests wait for a node that stands still, while another of its kind does not."""
        if not any(each is not hanging for each in self._running(hanging.role)):
            return []
        found = []
        for node in self._running("frontend"):
            for session in node.service._sessions if node.service is not None else ():
                for generation in session.generations:
                    attempt = generation._attempt
                    if attempt is None:
                        continue
                    has_token = attempt.next_index > attempt.first_index
                    waits_for = {attempt.decoding_node, *(() if has_token else (attempt.placement.prefill.node_id,))}
                    if hanging.name in waits_for:
                        found.append(f"attempt {attempt.number} of a request waits for {hanging.name}")
        return found

    def _idle_slots(self, node: Node) -> list[str]:
        """Return a problem if the first request in the queue waits for slots that are free."""
        assert node.process is not None
        for slots in node.process.objects.get("node slots", []):
            queue = slots._queue._waiters
            if not queue or slots.growing.is_short or slots.pool.windows is not None:
                continue
            first = min(queue, key=lambda waiter: slots._wait_queue.rank(waiter.key, _now_s(node)))
            if first.count <= slots.pool.num_available and not (first.wants and len(slots.growing)):
                return [f"a request waits at {node.name} for slots that are free"]
        return []

    def _can_serve(self) -> bool:
        """True if conductors, frontends, and a worker of each role are not touched by any fault that lasts."""
        touched = set[str]()
        for fault in self._faults.lasting:
            touched |= {fault.target, fault.other}
        nodes = [node for node in self._cluster.nodes.values() if not touched & {node.name, node.host}]
        well = Counter(node.role for node in nodes if node.is_ready and node.is_alive)
        shape = self._cluster.shape
        whole = well["conductor"] == shape.conductors and well["frontend"] == shape.frontends
        return whole and well["prefill"] > 0 and well["decode"] > 0


def _policy(service: Any) -> Any:
    return service._core.policy


def _now_s(node: Node) -> float:
    """Return the monotonic time of a node's process."""
    assert node.process is not None
    return (node.process.world.now_ns + node.process.monotonic_offset_ns) / SECOND_NS
