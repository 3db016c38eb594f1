"""Which of Ray's hosts a worker would best run on, given where the others do. Pure.

Prefill workers lie together, as those of a group hand each other KV chunk by chunk: on one host through shared memory,
else in one rack. Decode workers lie apart, so that a host that dies ends few answers and each has its network to
itself, but near the prefill workers whose KV they receive.
"""

from collections.abc import Mapping

from moonpool.plan import RolePlan
from moonpool.runtime.ray_hosts import Host, bundle_of, resource_of

__all__ = ["RACK_LABELS", "preferred_host"]

RACK_LABELS = ("moonpool.io/rack", "ray.io/availability-zone")  # the first that a host has


def preferred_host(
    plan: RolePlan, found: Mapping[str, Host], placed: Mapping[str, tuple[RolePlan, str]], *, gpu: bool
) -> str | None:
    """Ray's id of the host; None where none has room. `placed`: by node id, the other workers and their hosts' ids."""
    others = [(other, host_id) for node_id, (other, host_id) in placed.items() if node_id != plan.node_id]
    room = [host for host in found.values() if _has_room(plan, host, others, gpu=gpu)]
    if not room:
        return None

    def by_nearness(host: Host) -> tuple[float, ...]:
        near = [other for other, host_id in others if host_id in found and _rack(found[host_id]) == _rack(host)]
        here = [other for other, host_id in others if host_id == host.ray_node_id]
        alike = sum(other.role == plan.role and other.model == plan.model for other in here)
        kin = sum(other.model == plan.model for other in near)
        if plan.role == "prefill-node":
            together = sum(other.role == plan.role and other.model == plan.model for other in near)
            return (-together, -alike, -kin)
        return (-kin, alike, len(here))

    return min(room, key=lambda host: (by_nearness(host), host.ray_node_id)).ray_node_id


def _has_room(plan: RolePlan, host: Host, others: list[tuple[RolePlan, str]], *, gpu: bool) -> bool:
    taken: dict[str, float] = {}
    for other, host_id in others:
        if host_id == host.ray_node_id:
            for name, units in bundle_of(other, gpu=gpu).items():
                taken[name] = taken.get(name, 0.0) + units
    wanted = bundle_of(plan, gpu=gpu)
    return bool(host.resources.get(resource_of(plan))) and all(
        host.resources.get(name, 0.0) - taken.get(name, 0.0) >= units for name, units in wanted.items()
    )


def _rack(host: Host) -> str:
    """Hosts that say nothing of their rack share one."""
    return next((host.labels[name] for name in RACK_LABELS if name in host.labels), "")
