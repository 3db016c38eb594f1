"""Lets the invariants see what happens inside the roles: their classes' methods are wrapped, not changed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from conductor.policy.placement import copying
from conductor.service import ConductorService
from frontend.callers import TenantQuotas
from frontend.grammars import GrammarChecker
from frontend.service import Service
from kvpool import node_metrics
from kvpool.node import PoolNode
from kvpool.policy.core import PoolCore
from kvpool.policy.tier_space import TierSpace
from messenger import RemoteKey
from messenger.frames import Write
from messenger.grants import GrantTable
from messenger.tcp.transport import TcpResponder
from moonpool_proto.v1.common_pb2 import JsonRequest
from tools.prove import adversary, deadlines, landed_blocks, moments, slot_writes, wire_flips
from tools.prove.instances import on_creation, remember, running_process
from tools.prove.world.scheduler import ProcessState, world
from worker.grammar_matching import GrammarCompiler
from worker.node import WorkerNode
from worker.node_slots import NodeSlots


def observe() -> None:
    """Let the invariants see the objects whose state they check. Once per process."""
    on_creation(WorkerNode, lambda node: remember("validate", lambda: node.validate()[0]))
    on_creation(WorkerNode, lambda node: remember("validate", lambda: _grants(node)))
    on_creation(NodeSlots, lambda slots: remember("node slots", slots))
    on_creation(PoolNode, lambda node: remember("validate", lambda: node_metrics.validate(node)["problems"]))
    on_creation(PoolNode, lambda node: remember("arena", lambda: node.memory.array))
    for kind in (GrammarCompiler, GrammarChecker):  # their processes are not simulated
        kind.warm_up = lambda self: None  # type: ignore[method-assign]
    on_creation(ConductorService, lambda service: remember("validate", lambda: _validated(service)))
    on_creation(ConductorService, lambda service: remember("conductor", service))
    _watch_writes()
    _watch_pool_slots()
    slot_writes.watch()
    moments.watch()
    _copy_eagerly()
    wire_flips.watch()
    landed_blocks.watch()
    adversary.watch()
    deadlines.watch()
    on_creation(Service, lambda service: remember("validate", lambda: service.validate()["problems"]))
    on_creation(TenantQuotas, lambda quotas: remember("validate", lambda: _places(quotas)))


def _grants(node: WorkerNode) -> list[str]:
    """Return the problem that grants of a worker are left."""
    count = node.messenger._grants.counts()[1]
    return [f"{count} grants are left"] if count else []


def _places(quotas: TenantQuotas) -> list[str]:
    """Return which tenants' quotas count requests as running."""
    running = {tenant: quota.num_running for tenant, quota in quotas._tenants.items() if quota.num_running}
    return [f"{count} requests of {tenant} count as running" for tenant, count in running.items()]


def _validated(service: ConductorService) -> list[str]:
    """Return the problems that a conductor's `Validate` reports; it waits for nothing."""
    call = service.Validate(JsonRequest(), None)  # type: ignore[arg-type]
    try:
        call.send(None)
    except StopIteration as ended:
        problems: list[str] = json.loads(ended.value.json)["problems"]
        return problems
    raise AssertionError("Validate waits")


def _watch_writes() -> None:
    """Record a problem if bytes of a peer's write land after the revocation of its key has returned."""
    land, revoke = TcpResponder.land, GrantTable.revoke

    def watched_land(self: TcpResponder, message: Write, rows: Any, region: Any) -> None:
        remember("landing", message.token)
        process = running_process()
        landing = process.objects["landing"]
        if message.token in process.objects.get("revoked", ()):
            world().problem(f"late write: {process.name} takes a write under a key that was revoked")
        try:
            land(self, message, rows, region)
        finally:
            landing.remove(message.token)

    def watched_revoke(self: GrantTable, key: RemoteKey, grace_s: float) -> None:
        revoke(self, key, grace_s)
        remember("revoked", key.token)
        process = running_process()
        if key.token in process.objects.get("landing", ()):
            world().problem(f"late write: {process.name} has revoked a key under which bytes still land")

    TcpResponder.land, GrantTable.revoke = watched_land, watched_revoke  # type: ignore[method-assign]


def _watch_pool_slots() -> None:
    """Record a problem if a pool's slots are freed while they are writable, filled by a read, or leased."""
    write_key, own_read, pin = PoolNode.write_key, PoolNode.own_read, PoolCore.pin
    free_slots, free = TierSpace.free_slots, TierSpace.free

    def watched_write_key(self: PoolNode, allocation: Any) -> RemoteKey:
        key = write_key(self, allocation)
        offsets = {offset for block in allocation.new_blocks for offset in block.offsets}
        remember("writable", (key.token, self.core.store.dram, offsets))
        return key

    def watched_own_read(self: PoolNode, put_id: Any, start: Any) -> Any:
        blocks = self.core.puts[put_id].blocks if put_id in self.core.puts else []
        offsets = {offset for block in blocks for offset in block.offsets}
        reading = own_read(self, put_id, start)
        remember("reads", (reading, self.core.store.dram, offsets))
        return reading

    def watched_pin(self: PoolCore, *arguments: Any, **options: Any) -> Any:
        grant = pin(self, *arguments, **options)
        if grant is not None:
            offsets = {offset for block in (*grant.blocks, *grant.tails) for offset in block.offsets}
            remember("leases", (grant.lease_id, self, offsets))
        return grant

    def watched_free_slots(self: TierSpace, offsets: Any) -> Any:
        objects, freed = running_process().objects, set(offsets)
        for token, space, writable in objects.get("writable", []):
            if space is self and writable & freed and token not in objects.get("revoked", ()):
                world().problem(f"late write: {running_process().name} frees slots of a put whose key is valid")
        for reading, space, read in objects.get("reads", []):
            if space is self and read & freed and not reading.done():
                world().problem(f"late write: {running_process().name} frees slots that a read fills")
        return free_slots(self, offsets)

    def watched_free(self: TierSpace, copy: Any) -> Any:
        for lease_id, core, leased in running_process().objects.get("leases", []):
            if core.store.dram is self and lease_id in core.leases and leased & set(copy.offsets):
                world().problem(f"late write: {running_process().name} frees slots that a lease holds")
        return free(self, copy)

    PoolNode.write_key, PoolNode.own_read, PoolCore.pin = watched_write_key, watched_own_read, watched_pin  # type: ignore[method-assign]
    TierSpace.free_slots, TierSpace.free = watched_free_slots, watched_free  # type: ignore[method-assign]


def _copy_eagerly() -> None:
    """Let conductors copy every prefix to a pool that lacks it, in schedules that say so: whether it pays is policy."""
    ahead = copying._ahead_of_need

    def eager(context: Any, nodes: Any, prefixes: Any, scores: Any, uses: float) -> Any:
        if not world().pace.copies_all:
            return ahead(context, nodes, prefixes, scores, uses)
        without = np.flatnonzero(~copying._has_prefix(context.state, prefixes) & (nodes.pool_slots >= 0))
        return copying._begin(context, nodes, prefixes, int(without[0])) if len(without) else None

    copying._ahead_of_need = eager


def membership(process: ProcessState, expected: Sequence[str]) -> list[str]:
    """Return how a conductor's view differs from the living nodes `expected`."""
    problems: list[str] = []
    for service in process.objects.get("conductor", []):
        known = {each.node.node_id for each in service._registry}
        placed = {each.node_id for each in service._core.policy._state.nodes}
        problems += [f"{name} is not registered" for name in expected if name not in known]
        problems += [f"{name} is unknown to the policy" for name in expected if name not in placed]
        problems += [f"{name} is suspect" for name in sorted(service._core.policy.suspects)]
    return problems
