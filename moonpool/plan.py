"""From `serve`'s configuration to the processes of the cluster: who runs, with which settings, called where. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.config import ModelEntry, ServeConfig, TopologySettings, composite_settings, flatten
from moonpool.config.models import node_prefixes
from moonpool.config.roles import ConductorRole, FrontendRole, PoolNodeRole, WorkerRole
from moonpool.threads import engine_threads, thread_environment

CONDUCTOR_TIER, POOL_TIER, WORKER_TIER, FRONTEND_TIER = range(4)
_STOP_MARGIN_S = 2.0


@dataclass(frozen=True)
class RolePlan:
    """One process: `settings` are the keys of its role, complete."""

    node_id: str
    command: str  # moonpool's sub-command
    settings: dict[str, Any]
    env: dict[str, str]
    tier: int
    target: str
    stop_grace_s: float
    model: str = ""  # that a worker serves


def plan_cluster(config: ServeConfig, *, run_dir: Path, port: int, cores: int) -> list[RolePlan]:
    """The cluster's processes, in order of start. `port` is the HTTP port, already chosen."""
    base = flatten(config)
    conductor = _target(run_dir, "conductor")
    pools = [f"pool-{index}" for index in range(config.topology.pool_nodes)]
    # Alone, the pool node is of this host. Several stand for hosts of their own: names that no other cluster shares.
    hosts = [""] if len(pools) == 1 else [f"{run_dir}#{pool}" for pool in pools]
    grace_s = config.supervisor.stop_grace

    def role(
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
        target = _target(run_dir, node_id)
        own = {"node_id": node_id, "socket_dir": str(run_dir), "conductor": conductor, "listen": target, **own}
        declared = composite_settings(composite)
        settings = {key: own.get(key, base.get(key, declared[key].default)) for key in declared}
        stop_grace_s = max(grace_s, drain_s + _STOP_MARGIN_S) if drain_s else grace_s
        return RolePlan(node_id, command, settings, thread_environment(threads), tier, target, stop_grace_s, model)

    # Who knows all models is told of each, the first one too, by its entry.
    models = {"models": [entry.plain() for entry in config.served], "model": None, "served_model_name": []}
    plans = [role("conductor", "conductor", ConductorRole, CONDUCTOR_TIER, models)]
    for pool, host in zip(pools, hosts, strict=True):
        plans.append(role(pool, "pool-node", PoolNodeRole, POOL_TIER, {"host_id": host}))
    workers = _workers(config)
    for index, (node_id, command, entry) in enumerate(workers):
        turn, engine = index % len(pools), entry.engine(config.engine)
        threads = engine_threads(engine.threads, len(workers), cores)
        own = {
            **entry.settings,
            "model": str(entry.path),
            "served_model_name": list(entry.names),
            "host_id": hosts[turn],
            "pool": _target(run_dir, pools[turn]),
            "worker_index": index,
            "threads": threads,
        }
        drain_s = engine.worker_drain_grace
        plans.append(
            role(node_id, command, WorkerRole, WORKER_TIER, own, threads=threads, drain_s=drain_s, model=entry.name)
        )
    front_door = {"port": port, **models}
    drain_s = config.http.drain_grace
    plans.append(role("frontend", "frontend", FrontendRole, FRONTEND_TIER, front_door, drain_s=drain_s))
    return plans


def describe(config: ServeConfig) -> str:
    """ "1 prefill, 1 decode, 1 pool node"; of several models "a: 1 prefill, 1 decode; b: 1 aggregated; 1 pool node"."""
    served, pools = config.served, config.topology.pool_nodes
    workers = [_describe_workers(entry.topology(config.topology)) for entry in served]
    pool_nodes = f"{pools} pool node{'s' if pools > 1 else ''}"
    if len(served) == 1:
        return f"{workers[0]}, {pool_nodes}"
    return "; ".join([*(f"{entry.name}: {own}" for entry, own in zip(served, workers, strict=True)), pool_nodes])


def _describe_workers(topology: TopologySettings) -> str:
    return ", ".join(f"{count} {name}" for name, count in _counts(topology) if count)


def _workers(config: ServeConfig) -> list[tuple[str, str, ModelEntry]]:
    """(node id, sub-command, model) of every engine process, model by model; the first one's have the plain names."""
    return [
        (f"{prefix}{name}-{index}", f"{name}-node", entry)
        for entry, prefix in node_prefixes(config.served)
        for name, count in _counts(entry.topology(config.topology))
        for index in range(count)
    ]


def _counts(topology: TopologySettings) -> tuple[tuple[str, int], ...]:
    return (
        ("prefill", topology.num_prefill),
        ("decode", topology.num_decode),
        ("aggregated", topology.aggregated),
    )


def _target(run_dir: Path, node_id: str) -> str:
    return f"unix:{run_dir / (node_id + '.sock')}"
