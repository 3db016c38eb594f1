"""From `serve`'s configuration to the processes of the cluster: who runs, with which settings, called where. Pure."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.config import ServeConfig, composite_settings, flatten
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


def plan_cluster(config: ServeConfig, *, run_dir: Path, port: int, cores: int) -> list[RolePlan]:
    """The cluster's processes, in order of start. `port` is the HTTP port, already chosen."""
    base = flatten(config)
    conductor = _target(run_dir, "conductor")
    pools = [f"pool-{index}" for index in range(config.topology.pool_nodes)]
    # Alone, the pool node is of this host. Several stand for hosts of their own: names that no other cluster shares.
    hosts = [""] if len(pools) == 1 else [f"{run_dir}#{pool}" for pool in pools]
    light = thread_environment(1)
    threads = engine_threads(config.engine.threads, config.topology.num_engines, cores)
    grace_s = config.supervisor.stop_grace

    def role(
        node_id: str, command: str, composite: type, tier: int, env: dict[str, str], grace: float, **own: Any
    ) -> RolePlan:
        target = _target(run_dir, node_id)
        own = {"node_id": node_id, "socket_dir": str(run_dir), "conductor": conductor, "listen": target, **own}
        declared = composite_settings(composite)
        settings = {key: own.get(key, base.get(key, declared[key].default)) for key in declared}
        return RolePlan(node_id, command, settings, env, tier, target, grace)

    plans = [role("conductor", "conductor", ConductorRole, CONDUCTOR_TIER, light, grace_s)]
    for pool, host in zip(pools, hosts, strict=True):
        plans.append(role(pool, "pool-node", PoolNodeRole, POOL_TIER, light, grace_s, host_id=host))
    for index, (node_id, command) in enumerate(_workers(config)):
        turn = index % len(pools)
        plans.append(
            role(
                node_id,
                command,
                WorkerRole,
                WORKER_TIER,
                thread_environment(threads),
                max(grace_s, config.engine.worker_drain_grace + _STOP_MARGIN_S),
                host_id=hosts[turn],
                pool=_target(run_dir, pools[turn]),
                worker_index=index,
                threads=threads,
            )
        )
    drain_s = config.http.drain_grace + _STOP_MARGIN_S
    plans.append(role("frontend", "frontend", FrontendRole, FRONTEND_TIER, light, max(grace_s, drain_s), port=port))
    return plans


def describe(config: ServeConfig) -> str:
    """ "1 prefill, 1 decode, 1 pool node"."""
    topology = config.topology
    parts = [
        (topology.num_prefill, "prefill"),
        (topology.num_decode, "decode"),
        (topology.aggregated, "aggregated"),
        (topology.pool_nodes, "pool node" if topology.pool_nodes == 1 else "pool nodes"),
    ]
    return ", ".join(f"{count} {name}" for count, name in parts if count)


def _workers(config: ServeConfig) -> list[tuple[str, str]]:
    """(node id, sub-command) of every engine process."""
    topology = config.topology
    prefills = [(f"prefill-{index}", "prefill-node") for index in range(topology.num_prefill)]
    decodes = [(f"decode-{index}", "decode-node") for index in range(topology.num_decode)]
    aggregated = [(f"aggregated-{index}", "aggregated-node") for index in range(topology.aggregated)]
    return [*prefills, *decodes, *aggregated]


def _target(run_dir: Path, node_id: str) -> str:
    return f"unix:{run_dir / (node_id + '.sock')}"
