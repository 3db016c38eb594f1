"""Runtime of a Ray cluster: each node is an actor, placed by its role's resource, with the role as its child process.

Conductor and frontend are child processes of `serve`: the operator chooses the frontend's address, and the cluster ends
with `serve` anyway. Ray places and restarts actors, and carries settings and log lines, but no KV.
"""

import asyncio
import hashlib
import itertools
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from moonpool.plan import POOL_TIER, WORKER_TIER, RolePlan
from moonpool.runtime.interface import Running
from moonpool.runtime.processes import Processes
from moonpool.runtime.ray_actor import ActorPlacement, Orphanhood, RoleActor, StartedLife
from moonpool.runtime.ray_hosts import (
    GPU,
    POOL_RESOURCE,
    RayHost,
    bundle_of,
    environment,
    hosts,
    located,
    preferred_host,
)
from moonpool.runtime.ray_life import ActorAway, ActorLost, BackgroundCalls, RayLife, on_thread
from moonpool.supervision.child import LogFile
from moonpool.supervision.run_dir import default_run_dir

_POLL_S = 0.1
_START_S = 120.0


class ActorHandle:
    """Handle of an actor that translates Ray's errors. It outlives the actor's processes, which Ray restarts."""

    def __init__(self, actor: Any, *, named: bool = False) -> None:
        self._actor = actor
        self._named = named
        self.dead = False

    async def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments, **named)
        except RayActorError as error:
            self.dead = isinstance(error, ActorUnschedulableError)  # Ray restarts all others
            kind = ActorLost if self.dead else ActorAway
            raise kind(f"its Ray actor died: {' '.join(str(error).split())}") from error
        except RayTaskError as error:
            raise ActorLost(f"its Ray actor failed: {error.cause!r}") from error
        except RayError as error:
            raise ActorLost(f"Ray failed: {error}") from error

    async def call_back(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call an actor that may be restarting, and wait for it."""
        try:
            async with asyncio.timeout(_START_S):
                while True:
                    try:
                        return await self.call(method, *arguments, **named)
                    except ActorAway:
                        await asyncio.sleep(_POLL_S)
        except TimeoutError:
            self.dead = self.dead or self._named  # a named actor can be found again
            raise ActorLost(f"its Ray actor did not come up within {_START_S:g} s") from None

    async def follow(self, number: int, after: int, wait_s: float) -> tuple[int, list[tuple[str, Any]]]:
        next_one, events = await self.call("follow", number, after, wait_s)
        return next_one, events

    async def signal(self, *, kill: bool) -> None:
        await self.call("signal", kill=kill)

    def kill(self, *, for_good: bool = False) -> None:
        """Blocks while Ray's head is away."""
        ray.kill(self._actor, no_restart=for_good)


T = TypeVar("T")
_TELL_AFTER_S = 10.0
_ASK_S = 10.0
_POOL = "pool-"
_DRAIN_MARGIN_S = 10.0
_POOL_STAYS_S = 60.0
_CALLS_AT_A_TIME = 8  # of one actor: following, starting, signals


class RayRuntime:
    """Runs pool nodes and workers as Ray actors.

    `gpus`: number of GPUs that each worker takes, possibly a fraction. `only_address`: address of this machine if Ray
    has no other host; the planned shares of it then apply. `orphan_s`: seconds that nodes outlive `serve`, for the next
    one to take them over; 0: none.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        conductor: str,
        gpus: float,
        only_address: str,
        listener: socket.socket | None = None,
        orphan_s: float = 0.0,
    ) -> None:
        self.conductor = conductor
        self.outlives = orphan_s > 0
        self.found: tuple[str, ...] = ()
        self._orphan_s = orphan_s
        self._found_pools: list[int] = []
        self._gpus = gpus
        self._only_address = only_address
        self._processes = Processes(run_dir, listener)
        # A short name, since the path of a unix socket is limited.
        self._name = f"ray-{hashlib.blake2b(conductor.encode(), digest_size=6).hexdigest()}"
        self._folder = str(run_dir) if only_address else str(default_run_dir(self._name))
        self._add_pool: Callable[[int], None]
        self._groups: dict[str, PlacementGroup] = {}
        self._actors: dict[str, ActorHandle] = {}
        self._pools: dict[str, _HostPool] = {}  # by Ray's id of the host
        self._pool_numbers = itertools.count()
        self._known: dict[str, RayHost] = {}  # every host that a node was placed on
        self._placed: dict[str, tuple[RolePlan, str]] = {}  # workers, and Ray's ids of their hosts
        self._choosing = asyncio.Lock()  # hosts are chosen in the order in which nodes begin: prefill workers first
        self._wanted: set[str] = set()  # nodes that were launched and not released
        self._unheard: set[str] = set()  # nodes that may still run although their last life was given up
        self._background = BackgroundCalls()
        self._making: set[asyncio.Task[Any]] = set()

    def find(self) -> None:
        """Take over what an earlier `serve` of the same cluster left running. Blocks."""
        if not self.outlives:
            return
        prefix = f"{self._name}/"
        there = hosts(ray.nodes(), self._only_address)  # type: ignore[no-untyped-call]
        names = [name.removeprefix(prefix) for name in ray.util.list_named_actors() if name.startswith(prefix)]
        for node_id in sorted(names):
            try:
                self._find(node_id, ray.get_actor(prefix + node_id), there)
            except ValueError:  # it has just left
                continue
        numbers = [int(node_id.removeprefix(_POOL)) for node_id in names if node_id.startswith(_POOL)]
        self._pool_numbers = itertools.count(max(numbers, default=-1) + 1)
        self.found = tuple(node_id for node_id in self._actors if not node_id.startswith(_POOL))

    def _find(self, node_id: str, actor: Any, there: dict[str, RayHost]) -> None:
        group = _group_named(f"{self._name}-{node_id}")
        try:
            host_id, listens = ray.get([actor.host.remote(), actor.listens.remote()], timeout=_ASK_S)
        except (RayError, TimeoutError):  # it is restarting on some host
            host_id, listens = "", ""
        host, is_pool = there.get(host_id), node_id.startswith(_POOL)
        if (host is None or not listens) if is_pool else group is None:  # it cannot be taken over
            ray.kill(actor, no_restart=True)
            return
        self._actors[node_id] = ActorHandle(actor, named=True)
        self._unheard.add(node_id)
        if host is not None:
            self._known[node_id] = host
        if group is not None:
            self._groups[node_id] = group
        if is_pool and host is not None:
            self._found_pools.append(int(node_id.removeprefix(_POOL)))
            self._pools[host_id] = _HostPool(node_id, host, listens)

    def bind(self, add_pool: Callable[[int], None]) -> None:
        """As ClusterRuntime.bind."""
        self._add_pool = add_pool

    async def launch(
        self,
        plan: RolePlan,
        log: LogFile,
        *,
        on_ready: Callable[[dict[str, Any]], None],
        on_line: Callable[[str], None],
    ) -> Running:
        """As Runtime.launch; placing the actor is part of the life."""
        while self._found_pools:
            self._add_pool(self._found_pools.pop(0))
        if plan.tier not in (POOL_TIER, WORKER_TIER):
            return await self._processes.launch(plan, log, on_ready=on_ready, on_line=on_line)
        self._wanted.add(plan.node_id)
        begin = self._begin_pool if plan.tier == POOL_TIER else self._begin_worker
        return RayLife(
            lambda say: begin(plan, say),
            log,
            on_ready=on_ready,
            on_line=on_line,
            on_unheard=lambda: self._unheard.add(plan.node_id),
            name=plan.node_id,
        )

    def release(self, node_id: str) -> None:
        """As Runtime.release: its actor ends, its resources are free."""
        self._wanted.discard(node_id)
        self._unheard.discard(node_id)
        self._pools = {host_id: pool for host_id, pool in self._pools.items() if pool.node_id != node_id}
        self._known.pop(node_id, None)
        self._placed.pop(node_id, None)
        handle, group = self._actors.pop(node_id, None), self._groups.pop(node_id, None)
        if handle is not None:
            self._background.run(handle.kill, for_good=True)
        if group is not None:
            self._background.run(remove_placement_group, group)

    def close(self) -> None:
        """Release everything to Ray, except nodes that outlive `serve`."""
        if self.outlives:
            self._background.wait()
            return
        for node_id in [*self._actors, *self._groups]:
            self.release(node_id)
        self._background.wait()

    async def _begin_worker(self, plan: RolePlan, say: Callable[[str], None]) -> tuple[ActorHandle, StartedLife]:
        bundle = bundle_of(plan, gpus=self._gpus)
        host = await self._present_host(plan.node_id)
        if host is None:
            group = self._groups.get(plan.node_id)
            if group is None:
                group = await self._uninterrupted(self._make_group(plan, bundle))
            host = self._known[plan.node_id] = await self._host_of(group, bundle, say)
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            await self._uninterrupted(self._make_actor(plan, bundle, where))
        self._placed[plan.node_id] = plan, host.ray_node_id
        pool = await self._pool_on(host)
        handle = self._actors[plan.node_id]
        target = f"{_bracketed(host.address)}:0"
        is_only_host = bool(self._only_address)
        settings = located(plan, host, target=target, pool=pool, gpus=self._gpus, is_only_host=is_only_host)
        return handle, await self._start(handle, plan, settings, host, say)

    async def _begin_pool(self, plan: RolePlan, say: Callable[[str], None]) -> tuple[ActorHandle, StartedLife] | None:
        place = next(pool for pool in self._pools.values() if pool.node_id == plan.node_id)
        host = await self._present_host(plan.node_id)
        if host is None:
            host = (await self._hosts()).get(place.host.ray_node_id)
            if host is None:  # it died with its workers: this pool node is not needed any more
                say(f"the host {place.host.address} has left the Ray cluster")
                del self._pools[place.host.ray_node_id]
                return None
            self._known[plan.node_id] = host
            where = NodeAffinitySchedulingStrategy(host.ray_node_id, soft=False)
            await self._uninterrupted(self._make_actor(plan, {POOL_RESOURCE: 1.0}, where))
        handle = self._actors[plan.node_id]
        if not place.listens:  # workers use this address over all its lives
            place.listen(f"{_bracketed(host.address)}:{await handle.call_back('free_port', host.address)}")
        target = place.listens
        settings = located(plan, host, target=target, pool="", gpus=0.0, is_only_host=bool(self._only_address))
        return handle, await self._start(handle, plan, settings, host, say)

    async def _uninterrupted(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish `work` even if its caller is cancelled: what Ray creates must be known to be released."""
        making = asyncio.create_task(work)
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        return await asyncio.shield(making)

    async def _make_group(self, plan: RolePlan, bundle: dict[str, float]) -> PlacementGroup:
        """Create the node's placement group, preferably on the best host, which others may take."""
        node_id, name = plan.node_id, f"{self._name}-{plan.node_id}"
        lifetime = "detached" if self.outlives else None
        found: Any = await on_thread(_group_named, name) if self.outlives else None  # left by an interrupted `serve`
        if found is None:
            async with self._choosing:
                near = preferred_host(plan, await self._hosts(), self._placed, gpus=self._gpus)
                if near is not None:
                    self._placed[node_id] = plan, near  # for the placement of nodes that start meanwhile
            preference = {"strategy": "STRICT_PACK", "_soft_target_node_id": near}
            found = await on_thread(lambda: placement_group([bundle], name=name, lifetime=lifetime, **preference))
        group: PlacementGroup = found
        if node_id in self._wanted:
            self._groups[node_id] = group
        else:
            self._background.run(remove_placement_group, group)
        return group

    async def _start(
        self, handle: ActorHandle, plan: RolePlan, settings: dict[str, Any], host: RayHost, say: Callable[[str], None]
    ) -> StartedLife:
        adopt = plan.node_id in self._unheard
        self._unheard.discard(plan.node_id)
        what = (plan.node_id, plan.role, settings, environment(plan, settings))
        place = ActorPlacement(host.ray_node_id, self._folder, prints=not self._only_address)
        life: StartedLife = await handle.call_back("start", what, place, adopt=adopt)
        say(f"Ray runs {plan.node_id} on {host.address} as process {life.pid}")
        return life

    async def _present_host(self, node_id: str) -> RayHost | None:
        """Return the host on which the node's actor runs, without asking Ray's head, which may be away."""
        handle, host = self._actors.get(node_id), self._known.get(node_id)
        if handle is None or handle.dead or host is None:
            return None
        try:
            async with asyncio.timeout(_ASK_S):
                return host if await handle.call("host") == host.ray_node_id else None
        except (ActorLost, TimeoutError):
            return None

    async def _host_of(self, group: PlacementGroup, bundle: dict[str, float], say: Callable[[str], None]) -> RayHost:
        """Wait until the group has a host, and return it."""
        for waited in itertools.count():
            table = await on_thread(placement_group_table, group)
            if table["state"] == "CREATED":
                host = (await self._hosts()).get(table["bundles_to_node_id"][0])
                if host is not None:
                    return host
            if waited == round(_TELL_AFTER_S / _POLL_S):
                wanted = ", ".join(f"{name}={units:g}" for name, units in bundle.items())
                say(f"waiting for a host of the Ray cluster that has {wanted} free")
            await asyncio.sleep(_POLL_S)
        raise AssertionError

    async def _hosts(self) -> dict[str, RayHost]:
        return hosts(await on_thread(ray.nodes), self._only_address)

    async def _pool_on(self, host: RayHost) -> str:
        """Return the gRPC address of the host's pool node; the first call starts it."""
        if host.ray_node_id not in self._pools:
            index = next(self._pool_numbers)
            self._pools[host.ray_node_id] = _HostPool(f"{_POOL}{index}", host)
            self._add_pool(index)
        return await self._pools[host.ray_node_id].target()

    async def _make_actor(self, plan: RolePlan, bundle: dict[str, float], where: Any) -> None:
        """Create the node's actor unless it exists. Ray restarts dead actors; supervision restarts roles."""
        node_id = plan.node_id
        handle = self._actors.get(node_id)
        if handle is not None and not handle.dead:
            return
        options = {
            "num_cpus": 0,
            "num_gpus": bundle.get(GPU, 0),
            "resources": {name: units for name, units in bundle.items() if name != GPU},
            "max_restarts": -1,
            "max_concurrency": _CALLS_AT_A_TIME,
            "scheduling_strategy": where,
        }
        orphanhood = None
        if self.outlives:
            options |= {"name": f"{self._name}/{node_id}", "lifetime": "detached", "get_if_exists": True}
            orphanhood = self._orphanhood(plan, str(options["name"]))
        made = await on_thread(lambda: ray.remote(RoleActor).options(**options).remote(orphanhood))
        handle = ActorHandle(made, named=self.outlives)
        if node_id in self._wanted:
            self._actors[node_id] = handle
        else:
            self._background.run(handle.kill, for_good=True)

    def _orphanhood(self, plan: RolePlan, actor: str) -> Orphanhood:
        """Return the rule for a node without `serve`; pool nodes outlive the workers that use them."""
        drain_s = float(plan.settings.get("worker_drain_grace", 0.0)) + _DRAIN_MARGIN_S
        if plan.tier == POOL_TIER:
            return Orphanhood(self._orphan_s + _POOL_STAYS_S, _DRAIN_MARGIN_S, actor, "")
        return Orphanhood(self._orphan_s, drain_s, actor, f"{self._name}-{plan.node_id}")


class _HostPool:
    """Pool node of one host; `listens` is its gRPC address, "" until it is known."""

    def __init__(self, node_id: str, host: RayHost, listens: str = "") -> None:
        self.node_id = node_id
        self.host = host
        self.listens = listens
        self._known = asyncio.Event()

    def listen(self, target: str) -> None:
        self.listens = target
        self._known.set()

    async def target(self) -> str:
        """Wait for its gRPC address."""
        if not self.listens:
            await self._known.wait()
        return self.listens


def _group_named(name: str) -> PlacementGroup | None:
    try:
        found: PlacementGroup = get_placement_group(name)
        return found
    except ValueError:
        return None


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
