"""Plan of a cluster's processes from the configuration of `serve`: roles, settings, addresses, start order. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.config import ModelEntry, ServeConfig, TopologySettings, composite_settings, flatten
from moonpool.config.models import node_prefixes
from moonpool.config.roles import ConductorRole, FrontendRole, PoolNodeRole, WorkerRole
from moonpool.supervision.run_dir import OBJECTIVES
from moonpool.supervision.threads import engine_threads, thread_environment

CONDUCTOR_TIER, POOL_TIER, WORKER_TIER, FRONTEND_TIER = range(4)
_STOP_MARGIN_S = 2.0


@dataclass(frozen=True)
class RolePlan:
    """Plan of one process; `settings` has a value for every key of its role."""

    node_id: str
    role: str  # name of its command
    settings: dict[str, Any]
    env: dict[str, str]
    tier: int
    target: str
    stop_grace_s: float
    model: str = ""  # model that a worker serves


@dataclass(frozen=True)
class WorkerGroup:
    """Workers of one role and one model, the unit of scaling; their node ids are `name` and a number."""

    name: str  # the role, with a prefix for all models but the first
    role: str  # prefill, decode, aggregated
    model: ModelEntry


class Planner:
    """Plans the processes of one cluster, at its start and when it grows. `port` is the HTTP port, already chosen.

    Without a `conductor` address, all processes run on this machine and use unix sockets in the run directory, also for
    KV unless the configuration names its transport or has several pool nodes, which stand for hosts. With one, the
    runtime places pool nodes and workers, completes their settings, and requests pool nodes by `pool`. If the
    configuration joins another cluster, no conductor or frontend is planned: the other cluster's are used.
    """

    def __init__(self, config: ServeConfig, *, run_dir: Path, port: int, cores: int, conductor: str = "") -> None:
        self._config = config
        self._run_dir = run_dir
        self._port = port
        self._cores = cores
        self._spread = bool(conductor)
        names = ["conductor", *(f"conductor-{i}" for i in range(1, config.topology.conductors))]
        self._joins = bool(config.runtime.join)
        self._conductors = {} if self._joins else {name: conductor or self._target(name) for name in names}
        self.conductor_targets = config.runtime.join or tuple(self._conductors.values())
        self._base = flatten(config)
        is_one_host = not (self._spread or config.runtime.is_ray or self._joins) and config.topology.pool_nodes == 1
        if is_one_host and self._base["transport"] == "auto":
            self._base["transport"] = "shm"  # opens no TCP port
        if self._base["metrics_scope"] == "auto":
            self._base["metrics_scope"] = "cluster"  # its roles have no endpoints of their own
        self._num_workers = 0
        self._next_index: dict[str, int] = {}
        # Conductors and frontends receive all models as entries, the first one included.
        entries = [entry.plain() for entry in config.served]
        self._models: dict[str, Any] = {"models": entries, "model": None, "served_model_name": []}
        self.groups = {
            f"{prefix}{role}": WorkerGroup(f"{prefix}{role}", role, entry)
            for entry, prefix in node_prefixes(config.served)
            for role, _ in _counts(TopologySettings())
        }

    def cluster(self, running: Sequence[str] = ()) -> list[RolePlan]:
        """Return the initial processes in order of start. They include all workers of `running`, node ids of an earlier
        `serve`, even if these exceed the configured number.
        """
        conductors = [self._one_conductor(name) for name in self._conductors]
        pools = [] if self._spread else [self.pool(index) for index in range(self._config.topology.pool_nodes)]
        workers = [plan for group, count in self._initial_counts() for plan in self._workers(group, count, running)]
        if self._joins:
            return [*pools, *workers]
        return [*conductors, *pools, *workers, self._frontend("frontend")]

    def standbys(self) -> list[RolePlan]:
        """Return the frontends beside the first one; they are started once the cluster is ready."""
        count = 0 if self._joins else self._config.topology.frontends - 1
        return [self._frontend(f"frontend-{index}") for index in range(1, count + 1)]

    def _frontend(self, node_id: str) -> RolePlan:
        own = {**self._models, "port": self._port}
        drain_s = self._config.http.drain_grace_s
        return self._plan(node_id, "frontend", FrontendRole, FRONTEND_TIER, own, drain_s=drain_s)

    def _one_conductor(self, name: str) -> RolePlan:
        own = {"listen": self._conductors[name], "slo_dir": self._slo_dir(), **self._models}
        if name != "conductor":  # conductors do not share files
            folder, log = self._base["state_dir"], self._base["decision_log"]
            own["state_dir"] = str(Path(folder) / name) if folder else None
            own["decision_log"] = str(_beside(log, name)) if log else None
        return self._plan(name, "conductor", ConductorRole, CONDUCTOR_TIER, own)

    def _slo_dir(self) -> str:
        """Return the folder for objectives, which all conductors share."""
        given, state_dir = self._base["slo_dir"], self._base["state_dir"]
        return str(given or Path(state_dir or self._run_dir) / OBJECTIVES)

    def pool(self, index: int) -> RolePlan:
        """Return the plan of the pool node of host number `index`."""
        own = {"host_id": self._host_id(index)}
        return self._plan(f"pool-{index}", "pool-node", PoolNodeRole, POOL_TIER, own)

    def initial_counts(self) -> dict[str, int]:
        """Return the configured number of workers by group."""
        return dict(self._initial_counts())

    def _workers(self, group: str, count: int, running: Sequence[str]) -> list[RolePlan]:
        """Return plans of the group's running workers, then of new ones up to `count`, with higher numbers."""
        indices = sorted(int(index) for name, _, index in (each.rpartition("-") for each in running) if name == group)
        plans = []
        for index in indices:
            self._next_index[group] = index - 1
            plans.append(self.next_worker(group))
        return [*plans, *(self.next_worker(group) for _ in range(count - len(indices)))]

    def next_worker(self, group: str) -> RolePlan:
        """Return the plan of another worker, with a node id that was never used before."""
        index = self._next_index[group] = self._next_index.get(group, -1) + 1
        worker_index, self._num_workers = self._num_workers, self._num_workers + 1
        entry = self.groups[group].model
        host, engine = worker_index % self._config.topology.pool_nodes, entry.engine(self._config.engine)
        num_workers = sum(count for _, count in self._initial_counts())
        threads = engine_threads(engine.threads, num_workers, self._cores)
        own = {
            **entry.plain_settings,
            "model": str(entry.path),
            "served_model_name": list(entry.names),
            "host_id": self._host_id(host),
            "pool": self._target(f"pool-{host}"),
            "worker_index": worker_index,
            "host_workers": num_workers,
            "threads": threads,
        }
        return self._plan(
            f"{group}-{index}",
            f"{self.groups[group].role}-node",
            WorkerRole,
            WORKER_TIER,
            own,
            threads=threads,
            drain_s=engine.worker_drain_grace_s,
            model=entry.name,
        )

    def _initial_counts(self) -> list[tuple[str, int]]:
        """Return (group, number of workers), ordered by model."""
        return [
            (f"{prefix}{role}", count)
            for entry, prefix in node_prefixes(self._config.served)
            for role, count in _counts(entry.topology(self._config.topology))
        ]

    def _plan(
        self,
        node_id: str,
        command: str,
        composite: type,
        tier: int,
        own: dict[str, Any],
        *,
        threads: int = 1,
        drain_s: float = 0.0,
        model: str = "",
    ) -> RolePlan:
        defaults = {"node_id": node_id, "socket_dir": str(self._run_dir), "conductor": list(self.conductor_targets)}
        own = {**defaults, "listen": self._target(node_id), **own}
        declared = composite_settings(composite)
        settings = {key: own.get(key, self._base.get(key, declared[key].default)) for key in declared}
        grace_s = self._config.supervisor.stop_grace_s
        stop_grace_s = max(grace_s, drain_s + _STOP_MARGIN_S) if drain_s else grace_s
        target = str(own["listen"])
        return RolePlan(node_id, command, settings, thread_environment(threads), tier, target, stop_grace_s, model)

    def _host_id(self, pool_index: int) -> str:
        """Return "", this host's id, for a single pool node; several stand for hosts, with cluster-unique ids."""
        return "" if self._config.topology.pool_nodes == 1 else f"{self._run_dir}#pool-{pool_index}"

    def _target(self, node_id: str) -> str:
        return f"unix:{self._run_dir / (node_id + '.sock')}"


def _beside(folder: str, name: str) -> Path:
    """Return the folder of another conductor, beside the first one's."""
    whole = Path(folder).absolute()
    return whole.parent / f"{name}-{whole.name}"


def describe(config: ServeConfig) -> str:
    """Return the cluster's size, such as "1 prefill, 1 decode, 1 pool node".

    With several models it is "a: 1 prefill, 1 decode; b: 1 aggregated; 1 pool node".
    """
    served, pools = config.served, config.topology.pool_nodes
    is_paced = any(entry.engine(config.engine).engine == "paced" for entry in served)
    workers = [_describe_workers(entry.topology(config.topology)) for entry in served]
    pool_nodes = f"{pools} pool node{'s' if pools > 1 else ''}{' per host, in Ray' if config.runtime.is_ray else ''}"
    pool_nodes += "; paced engines, which compute nothing" if is_paced else ""
    if len(served) == 1:
        return f"{workers[0]}, {pool_nodes}"
    return "; ".join([*(f"{entry.name}: {own}" for entry, own in zip(served, workers, strict=True)), pool_nodes])


def _describe_workers(topology: TopologySettings) -> str:
    return ", ".join(f"{count} {name}" for name, count in _counts(topology) if count)


def _counts(topology: TopologySettings) -> tuple[tuple[str, int], ...]:
    return (
        ("prefill", topology.num_prefill),
        ("decode", topology.num_decode),
        ("aggregated", topology.aggregated),
    )
