"""From `serve`'s configuration to the processes of the cluster: who runs, with which settings, called where. Pure."""

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
    """One process: `settings` are the keys of its role, complete."""

    node_id: str
    role: str  # moonpool's sub-command
    settings: dict[str, Any]
    env: dict[str, str]
    tier: int
    target: str
    stop_grace_s: float
    model: str = ""  # that a worker serves


@dataclass(frozen=True)
class Group:
    """Workers of one role and one model: what is scaled. Their node ids are `name` and a number."""

    name: str  # the role; with the model's prefix where it is not the first model
    role: str  # prefill, decode, aggregated
    model: ModelEntry


class Planner:
    """Plans one cluster's processes; asked again when the cluster grows. `port` is the HTTP port, already chosen.

    Without a `conductor` address all lies on this machine and talks over unix sockets in the run directory. With one,
    somebody else decides where pool nodes and workers lie, completes their settings, and asks for pool nodes. Where
    another cluster is joined, its conductors take the place of our own, and its front doors that of ours.
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
        self._num_workers = 0
        self._next_index: dict[str, int] = {}
        # Who knows all models is told of each, the first one too, by its entry.
        entries = [entry.plain() for entry in config.served]
        self._models: dict[str, Any] = {"models": entries, "model": None, "served_model_name": []}
        self.groups = {
            f"{prefix}{role}": Group(f"{prefix}{role}", role, entry)
            for entry, prefix in node_prefixes(config.served)
            for role, _ in _counts(TopologySettings())
        }

    def cluster(self, running: Sequence[str] = ()) -> list[RolePlan]:
        """The processes to begin with, in order of start; the workers of `running`, by node id, are among them, even
        where they are more than asked for.
        """
        conductors = [self._one_conductor(name) for name in self._conductors]
        pools = [] if self._spread else [self.pool(index) for index in range(self._config.topology.pool_nodes)]
        workers = [plan for group, count in self._initial_counts() for plan in self._workers(group, count, running)]
        if self._joins:
            return [*pools, *workers]
        drain_s = self._config.http.drain_grace_s
        own = {**self._models, "port": self._port}
        frontend = self._plan("frontend", "frontend", FrontendRole, FRONTEND_TIER, own, drain_s=drain_s)
        return [*conductors, *pools, *workers, frontend]

    def _one_conductor(self, name: str) -> RolePlan:
        own = {"listen": self._conductors[name], "slo_dir": self._slo_dir(), **self._models}
        if name != "conductor":  # each keeps files of its own
            folder, log = self._base["state_dir"], self._base["decision_log"]
            own["state_dir"] = str(Path(folder) / name) if folder else None
            own["decision_log"] = str(_beside(log, name)) if log else None
        return self._plan(name, "conductor", ConductorRole, CONDUCTOR_TIER, own)

    def _slo_dir(self) -> str:
        """One for all conductors; without a state folder, of this run of the cluster."""
        given, state_dir = self._base["slo_dir"], self._base["state_dir"]
        return str(given or Path(state_dir or self._run_dir) / OBJECTIVES)

    def pool(self, index: int) -> RolePlan:
        """The pool node of the `index`-th host."""
        own = {"host_id": self._host_id(index)}
        return self._plan(f"pool-{index}", "pool-node", PoolNodeRole, POOL_TIER, own)

    def initial_counts(self) -> dict[str, int]:
        """Workers asked for, by group."""
        return dict(self._initial_counts())

    def _workers(self, group: str, count: int, running: Sequence[str]) -> list[RolePlan]:
        """Those that run, then new ones up to the count, under ids beyond theirs."""
        indices = sorted(int(index) for name, _, index in (each.rpartition("-") for each in running) if name == group)
        plans = []
        for index in indices:
            self._next_index[group] = index - 1
            plans.append(self.next_worker(group))
        return [*plans, *(self.next_worker(group) for _ in range(count - len(indices)))]

    def next_worker(self, group: str) -> RolePlan:
        """A further worker, under an id that none had before."""
        index = self._next_index[group] = self._next_index.get(group, -1) + 1
        worker_index, self._num_workers = self._num_workers, self._num_workers + 1
        entry = self.groups[group].model
        turn, engine = worker_index % self._config.topology.pool_nodes, entry.engine(self._config.engine)
        threads = engine_threads(engine.threads, sum(count for _, count in self._initial_counts()), self._cores)
        own = {
            **entry.settings,
            "model": str(entry.path),
            "served_model_name": list(entry.names),
            "host_id": self._host_id(turn),
            "pool": self._target(f"pool-{turn}"),
            "worker_index": worker_index,
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
        """Workers to begin with by group, model by model."""
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
        """Alone, the pool node is of this host. Several stand for hosts of their own: names no other cluster shares."""
        return "" if self._config.topology.pool_nodes == 1 else f"{self._run_dir}#pool-{pool_index}"

    def _target(self, node_id: str) -> str:
        return f"unix:{self._run_dir / (node_id + '.sock')}"


def _beside(folder: str, name: str) -> Path:
    """A further conductor's folder, next to the first one's."""
    whole = Path(folder).absolute()
    return whole.parent / f"{name}-{whole.name}"


def describe(config: ServeConfig) -> str:
    """ "1 prefill, 1 decode, 1 pool node"; of several models "a: 1 prefill, 1 decode; b: 1 aggregated; 1 pool node"."""
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
