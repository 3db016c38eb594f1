"""Resources of Ray's hosts, the cluster's demands on them, and the choice of a host for a worker. Pure.

Prefill workers are placed together, since the members of a prefill group exchange KV chunk by chunk: on one host
through shared memory, otherwise in one rack. Decode workers are spread, so that the death of a host ends few answers
and each has a network of its own, but near the prefill workers whose KV they receive.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.errors import RayUnusable
from moonpool.plan import POOL_TIER, RolePlan
from moonpool.supervision.threads import thread_environment

GPU = "GPU"
POOL_RESOURCE = "moonpool_pool"
WORKER_RESOURCES = ("moonpool_prefill", "moonpool_decode", "moonpool_aggregated")
LOCAL_UNITS = 1024  # of each resource in our own Ray: room to scale
_RAY_UNITS = 10_000  # Ray counts in ten-thousandths


@dataclass(frozen=True)
class RayHost:
    """One of Ray's nodes."""

    ray_node_id: str
    address: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)

    def num_workers(self, gpus: float) -> int:
        """Return how many workers it runs at most at once, if each takes `gpus` GPUs."""
        offered = int(sum(self.resources.get(name, 0) for name in WORKER_RESOURCES))
        return min(offered, self._gpu_places(gpus)) if gpus else offered

    def threads(self, gpus: float) -> int:
        """Return the CPU threads of each worker: its share of the host's cores."""
        return max(1, int(self.resources.get("CPU", 1) // max(1, self.num_workers(gpus))))

    def _gpu_places(self, gpus: float) -> int:
        """Return for how many workers it has GPUs. Ray takes a fraction from one GPU, not from several."""
        offered = int(self.resources.get(GPU, 0))
        return offered * workers_per_gpu(gpus) if gpus < 1 else int(offered // gpus)


def workers_per_gpu(gpus: float) -> int:
    """Return how many workers share a GPU, if each takes `gpus` GPUs."""
    return max(1, _RAY_UNITS // round(gpus * _RAY_UNITS))


def hosts(nodes: Sequence[Mapping[str, Any]], only_address: str = "") -> dict[str, RayHost]:
    """Return Ray's living nodes by id; `only_address` overrides the address that Ray reports."""
    return {
        node["NodeID"]: RayHost(
            node["NodeID"], only_address or node["NodeManagerAddress"], node["Resources"], node.get("Labels") or {}
        )
        for node in nodes
        if node["Alive"]
    }


def resource_of(plan: RolePlan) -> str:
    """Return the custom resource of which the plan's node takes one unit."""
    return f"moonpool_{plan.role.removesuffix('-node')}"


def bundle_of(plan: RolePlan, *, gpus: float) -> dict[str, float]:
    """Return the resources that the plan's node takes, `gpus` of them GPUs."""
    return {resource_of(plan): 1.0, **({GPU: gpus} if gpus else {})}


def local_resources() -> dict[str, float]:
    """Return the custom resources of our own Ray."""
    return dict.fromkeys((POOL_RESOURCE, *WORKER_RESOURCES), float(LOCAL_UNITS))


def check_offer(bundles: Sequence[Mapping[str, float]], found: Mapping[str, RayHost]) -> None:
    """Raise RayUnusable, with the missing resources and a remedy, if the hosts can never hold the bundles.

    The bundles that take GPUs all take the same number of them.
    """
    wanted: defaultdict[str, float] = defaultdict(float)
    for bundle in bundles:
        for name, units in bundle.items():
            wanted[name] += units
    offered = {name: sum(host.resources.get(name, 0) for host in found.values()) for name in wanted}
    short = [
        f"{name}: {units:g} required, {offered[name]:g} offered"
        for name, units in wanted.items()
        if name != GPU and units > offered[name]
    ]
    each = max((bundle.get(GPU, 0.0) for bundle in bundles), default=0.0)
    room = sum(host.num_workers(each) for host in found.values())
    if each and room < (num_workers := sum(GPU in bundle for bundle in bundles)):
        short.append(f"{GPU}: {num_workers} workers with {each:g} each required, room for {room}")
    if short:
        example = ", ".join(f'"{name}": {units:g}' for name, units in wanted.items() if name != GPU)
        raise RayUnusable(
            f"the Ray cluster lacks resources for these workers ({'; '.join(short)}; hosts: {_offers(found)}). "
            f"Declare on each host how many workers of each role it runs: "
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


def _offers(found: Mapping[str, RayHost]) -> str:
    return "; ".join(
        f"{host.address} offers " + (", ".join(f"{name}={units:g}" for name, units in sorted(mine.items())) or "none")
        for host in found.values()
        for mine in [{name: units for name, units in host.resources.items() if name.startswith(("moonpool_", GPU))}]
    )


def located(
    plan: RolePlan, host: RayHost, *, target: str, pool: str, gpus: float, is_only_host: bool
) -> dict[str, Any]:
    """Return the plan's settings completed for its host: every role listens on TCP at the host's address.

    `target`: the gRPC address to listen at; `pool`: that of the host's pool node, "" for a pool node's own plan.
    `is_only_host`: all workers run there, as planned; else each has a share of the host by what it offers.
    """
    settings = {**plan.settings, "listen": target, "data_host": host.address, "data_paths": (), "host_id": ""}
    if plan.tier != POOL_TIER:
        settings["pool"] = pool
        if not is_only_host:
            settings |= {"threads": host.threads(gpus), "host_workers": max(1, host.num_workers(gpus))}
        if gpus:  # Ray shows the process its own GPUs only
            settings |= {"device": "cuda", "worker_index": 0, "device_workers": workers_per_gpu(gpus)}
    return settings


def environment(plan: RolePlan, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the plan's environment variables for its number of threads there."""
    return {**plan.env, **thread_environment(int(settings.get("threads", 1)))}


RACK_LABELS = ("moonpool.io/rack", "ray.io/availability-zone")  # the first that a host has


def preferred_host(
    plan: RolePlan, found: Mapping[str, RayHost], placed: Mapping[str, tuple[RolePlan, str]], *, gpus: float
) -> str | None:
    """Return Ray's id of the best host; None if none has room. `placed`: the other workers and their hosts' ids."""
    others = [(other, host_id) for node_id, (other, host_id) in placed.items() if node_id != plan.node_id]
    room = [host for host in found.values() if _has_room(plan, host, others, gpus=gpus)]
    if not room:
        return None

    def by_nearness(host: RayHost) -> tuple[float, ...]:
        near = [other for other, host_id in others if host_id in found and _rack(found[host_id]) == _rack(host)]
        here = [other for other, host_id in others if host_id == host.ray_node_id]
        alike = sum(other.role == plan.role and other.model == plan.model for other in here)
        kin = sum(other.model == plan.model for other in near)
        if plan.role == "prefill-node":
            together = sum(other.role == plan.role and other.model == plan.model for other in near)
            return (-together, -alike, -kin)
        return (-kin, alike, len(here))

    return min(room, key=lambda host: (by_nearness(host), host.ray_node_id)).ray_node_id


def _has_room(plan: RolePlan, host: RayHost, others: list[tuple[RolePlan, str]], *, gpus: float) -> bool:
    here = [resource_of(other) for other, host_id in others if host_id == host.ray_node_id]
    wanted = resource_of(plan)
    return here.count(wanted) < host.resources.get(wanted, 0) and len(here) < host.num_workers(gpus)


def _rack(host: RayHost) -> str:
    """Return a host's rack; hosts without a label share one."""
    return next((host.labels[name] for name in RACK_LABELS if name in host.labels), "")
