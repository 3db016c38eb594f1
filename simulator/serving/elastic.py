"""Workers that start, leave and change their role during a simulation, and the node time that they take.

A worker joins `start_s` after its start. It drains before it leaves or changes its role: nothing new is placed on it,
and the requests that were placed on it end there. The live worker hands unfinished requests over after its grace
period instead, so that it takes less node time, and other nodes more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from conductor.policy.decisions import SwitchRole
from simulator.errors import BadSetting
from simulator.serving.clock import NS
from simulator.serving.cluster import SimulatedCluster

WorkerRole = Literal["prefill", "decode"]
ROLES: tuple[WorkerRole, ...] = ("prefill", "decode")
Phase = Literal["starting", "serving", "draining"]
_SETTLE_NETWORKS = 2  # network latencies after a report of draining until no decision names the node


@dataclass(slots=True)
class _WorkerState:
    role: WorkerRole
    phase: Phase
    since_ns: int  # when it was started, for its node time
    number: int  # of starts so far: later ones are newer
    drained: Callable[[], None] | None = None  # called once, when it is idle


@dataclass(frozen=True, slots=True)
class RoleCount:
    """Number of serving nodes of a role from a time on."""

    time_s: float
    role: WorkerRole
    nodes: int


class ElasticWorkers:
    """Workers on the hosts of a cluster whose settings have `hosts`. Create it before the cluster runs."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        settings = cluster.settings
        if not settings.hosts:
            raise BadSetting("hosts must be set in a cluster whose workers start, leave or change roles, got 0")
        self._cluster = cluster
        self._workers: dict[str, _WorkerState] = {}
        self._num_started = 0
        self._spent_ns = 0  # node time of workers that have left
        self.changes: list[RoleCount] = []
        self.num_switches = 0
        names = list(cluster.prefill)
        for role, count in (("prefill", settings.prefill_nodes), ("decode", settings.decode_nodes)):
            for name in names[len(self._workers) : len(self._workers) + count]:
                self._add(name, role, "serving")  # type: ignore[arg-type]
        for role in ROLES:
            self._note(role)
        cluster.on_idle = self._idle
        cluster.on_switch = self._decided

    def counts(self) -> dict[WorkerRole, int]:
        """Return the number of workers by role that serve or start; draining ones are not counted."""
        present = [worker.role for worker in self._workers.values() if worker.phase != "draining"]
        return {role: present.count(role) for role in ROLES}

    def node_s(self) -> float:
        """Return the node time so far in seconds: from each worker's start until it has left, draining included."""
        now_ns = self._cluster.clock.now_ns
        running_ns = sum(now_ns - worker.since_ns for worker in self._workers.values())
        return (self._spent_ns + running_ns) / NS

    def is_at_rest(self) -> bool:
        """Return True if no worker starts or drains."""
        return all(worker.phase == "serving" for worker in self._workers.values())

    def resize(self, wanted: Mapping[str, int], done: Callable[[], None] = lambda: None) -> None:
        """Bring the roles in `wanted` to their counts, as `moonpool.scaling` does.

        New workers start first; when all of them serve, the newest workers of shrinking roles drain, and `done()` is
        called when they have left. Raises BadSetting if hosts are missing.
        """
        counts = self.counts()
        fewer = {role: counts[role] - wanted[role] for role in ROLES if wanted.get(role, counts[role]) < counts[role]}
        starting = [role for role in ROLES for _ in range(wanted.get(role, counts[role]) - counts[role])]
        free = [name for name in self._cluster.prefill if name not in self._workers]
        if len(starting) > len(free):
            raise BadSetting(f"{len(starting)} workers start, but only {len(free)} hosts are free")
        left = len(starting)

        def drain() -> None:
            leaving = [name for role, count in fewer.items() for name in self._newest(role)[:count]]
            remaining = len(leaving)

            def leave(name: str) -> None:
                nonlocal remaining
                self._leave(name)
                remaining -= 1
                if not remaining:
                    done()

            for name in leaving:
                self._drain(name, partial(leave, name))
            if not leaving:
                done()

        def ready() -> None:
            nonlocal left
            left -= 1
            if not left:
                drain()

        for name, role in zip(free, starting, strict=False):
            self._start(name, role, ready)
        if not starting:
            drain()

    def switch(self, name: str, role: WorkerRole) -> None:
        """Change a serving worker's role once it has drained. Raises BadSetting for any other worker."""
        worker = self._workers.get(name)
        if worker is None or worker.phase != "serving" or worker.role == role:
            raise BadSetting(f"only a serving worker of another role can become a {role} node, got {name}")
        self._drain(name, lambda: self._take(name, role))

    def _decided(self, decision: SwitchRole) -> None:
        if not decision.is_advice:
            self.switch(decision.node_id, decision.role)

    def idlest(self, role: WorkerRole) -> str:
        """Return the serving worker of a role with the fewest requests."""
        serving = [name for name, worker in self._workers.items() if (worker.role, worker.phase) == (role, "serving")]
        return min(serving, key=lambda name: (self._cluster.num_claims[name], name))

    def _add(self, name: str, role: WorkerRole, phase: Phase) -> None:
        self._num_started += 1
        self._workers[name] = _WorkerState(role, phase, self._cluster.clock.now_ns, self._num_started)

    def _newest(self, role: WorkerRole) -> list[str]:
        serving = [(-worker.number, name) for name, worker in self._workers.items() if worker.role == role]
        return [name for _, name in sorted(serving) if self._workers[name].phase == "serving"]

    def _start(self, name: str, role: WorkerRole, ready: Callable[[], None]) -> None:
        self._add(name, role, "starting")
        self._cluster.clock.after(round(self._cluster.settings.start_s * NS), lambda: self._join(name, role, ready))

    def _join(self, name: str, role: WorkerRole, ready: Callable[[], None]) -> None:
        self._workers[name].phase = "serving"
        self._cluster.join(name, role)
        self._note(role)
        ready()

    def _drain(self, name: str, drained: Callable[[], None]) -> None:
        worker, cluster = self._workers[name], self._cluster
        worker.phase = "draining"
        self._note(worker.role)
        cluster.drain(name, worker.role)

        def settle() -> None:
            worker.drained = drained
            if not cluster.num_claims[name]:
                self._idle(name)

        cluster.clock.after(round(_SETTLE_NETWORKS * cluster.settings.network_s * NS), settle)

    def _idle(self, name: str) -> None:
        worker = self._workers.get(name)
        if worker is not None and worker.drained is not None:
            drained, worker.drained = worker.drained, None
            # Not at once: the request that has just ended still has to leave the node.
            self._cluster.clock.after(0, drained)

    def _leave(self, name: str) -> None:
        worker = self._workers.pop(name)
        self._spent_ns += self._cluster.clock.now_ns - worker.since_ns
        self._cluster.leave(name, worker.role)

    def _take(self, name: str, role: WorkerRole) -> None:
        worker = self._workers[name]
        self._cluster.stop(name, worker.role)
        worker.role, worker.phase = role, "serving"
        self.num_switches += 1
        self._cluster.join(name, role)
        self._note(role)

    def _note(self, role: WorkerRole) -> None:
        serving = sum((worker.role, worker.phase) == (role, "serving") for worker in self._workers.values())
        self.changes.append(RoleCount(self._cluster.clock.now_ns / NS, role, serving))


def num_reversals(changes: list[RoleCount], window_s: float) -> int:
    """Return how often a role's number of nodes changed in the other direction within `window_s` of its last change."""
    found = 0
    for role in ROLES:
        steps = [change for change in changes if change.role == role]
        moves = [
            (after.time_s, after.nodes > before.nodes)
            for before, after in pairwise(steps)
            if after.nodes != before.nodes
        ]
        found += sum(after[1] != before[1] and after[0] - before[0] <= window_s for before, after in pairwise(moves))
    return found
