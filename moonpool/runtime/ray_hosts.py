"""What Ray's hosts offer and what a cluster asks of them. Reads plain data; calls nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.errors import RayUnusable
from moonpool.plan import POOL_TIER, RolePlan
from moonpool.threads import thread_environment

GPU = "GPU"
POOL_RESOURCE = "moonpool_pool"
WORKER_RESOURCES = ("moonpool_prefill", "moonpool_decode", "moonpool_aggregated")
LOCAL_UNITS = 1024  # of each resource in a Ray of our own: room to scale


@dataclass(frozen=True)
class Host:
    """One of Ray's nodes."""

    ray_node_id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        """CPU threads of each worker here: its cores in equal shares for as many workers as it offers to take."""
        workers = sum(self.resources.get(name, 0) for name in WORKER_RESOURCES)
        return max(1, int(self.resources.get("CPU", 1) // max(1, workers)))


def hosts(nodes: Sequence[Mapping[str, Any]], only_address: str = "") -> dict[str, Host]:
    """Ray's list of its nodes, those that live, by Ray's id; `only_address` goes before the one that Ray knows."""
    return {
        node["NodeID"]: Host(
            node["NodeID"], only_address or node["NodeManagerAddress"], node["Resources"], node.get("Labels") or {}
        )
        for node in nodes
        if node["Alive"]
    }


def resource_of(plan: RolePlan) -> str:
    """The custom resource of which the plan's node takes one unit."""
    return f"moonpool_{plan.role.removesuffix('-node')}"


def bundle_of(plan: RolePlan, *, gpu: bool) -> dict[str, float]:
    """What the plan's node takes of its host."""
    return {resource_of(plan): 1.0, **({GPU: 1.0} if gpu else {})}


def local_resources() -> dict[str, float]:
    """The custom resources of a Ray of our own."""
    return dict.fromkeys((POOL_RESOURCE, *WORKER_RESOURCES), float(LOCAL_UNITS))


def check_offer(bundles: Sequence[Mapping[str, float]], found: Mapping[str, Host]) -> None:
    """Raises RayUnusable, saying what is missing and how to offer it, when the hosts could never hold the bundles."""
    wanted: Counter[str] = Counter()
    for bundle in bundles:
        wanted.update({name: int(units) for name, units in bundle.items()})
    offered = {name: sum(host.resources.get(name, 0) for host in found.values()) for name in wanted}
    short = [
        f"{name}: {units} wanted, {offered[name]:g} offered" for name, units in wanted.items() if units > offered[name]
    ]
    if short:
        example = ", ".join(f'"{name}": {units}' for name, units in wanted.items() if name != GPU)
        raise RayUnusable(
            f"the Ray cluster lacks resources for these workers ({'; '.join(short)}; hosts: {_offers(found)}). "
            f"Each host says how many workers of each role it takes: "
            f"ray start --address=HEAD:6379 --resources='{{{example}, \"{POOL_RESOURCE}\": 1}}'"
        )
    poolless = [
        host.address
        for host in found.values()
        if any(host.resources.get(name) for name in WORKER_RESOURCES) and not host.resources.get(POOL_RESOURCE)
    ]
    if poolless:
        raise RayUnusable(
            f"the Ray hosts {', '.join(poolless)} offer to take workers, but no {POOL_RESOURCE}: a host with workers "
            f"needs a pool node. Start Ray there with --resources='{{\"{POOL_RESOURCE}\": 1, ...}}'"
        )


def _offers(found: Mapping[str, Host]) -> str:
    return "; ".join(
        f"{host.address} offers " + (", ".join(f"{name}={units:g}" for name, units in sorted(mine.items())) or "none")
        for host in found.values()
        for mine in [{name: units for name, units in host.resources.items() if name.startswith(("moonpool_", GPU))}]
    )


def located(plan: RolePlan, host: Host, *, target: str, pool: str, gpu: bool, threads: int) -> dict[str, Any]:
    """The plan's settings, completed for its host: every role listens on TCP at the host's address.

    `target`: the gRPC address to listen at; `pool`: that of the host's pool node, "" for a pool node's own plan.
    `threads`: 0 = a share of the host's cores.
    """
    settings = {**plan.settings, "listen": target, "data_host": host.address, "host_id": ""}
    if plan.tier != POOL_TIER:
        settings |= {"pool": pool, "threads": threads or host.threads}
        if gpu:  # Ray shows the process its own GPU only
            settings |= {"device": "cuda", "worker_index": 0}
    return settings


def environment(plan: RolePlan, settings: Mapping[str, Any]) -> dict[str, str]:
    """The plan's variables, for the threads that it has there."""
    return {**plan.env, **thread_environment(int(settings.get("threads", 1)))}
