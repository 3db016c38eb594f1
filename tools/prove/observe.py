"""Lets the invariants see what happens inside the roles: their classes' methods are wrapped, not changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from conductor.service import ConductorService
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
from tools.prove import slot_writes
from tools.prove.world.scheduler import ProcessState, world
from worker.grammar_matching import GrammarCompiler
from worker.node import WorkerNode


def _watch(kind: type[Any], look: Callable[[Any], None]) -> None:
    """Call `look` with each object of a class when it has been created in a simulated process."""
    create = kind.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        create(self, *args, **options)
        look(self)

    kind.__init__ = init


def observe() -> None:
    """Let the invariants see the objects whose state they check. Once per process."""

    def of_process(name: str, value: Any) -> None:
        thread = world().current
        assert thread is not None
        thread.process.objects.setdefault(name, []).append(value)

    _watch(WorkerNode, lambda node: of_process("validate", lambda: node.validate()[0]))
    _watch(WorkerNode, lambda node: of_process("validate", lambda: _grants(node)))
    _watch(PoolNode, lambda node: of_process("validate", lambda: node_metrics.validate(node)["problems"]))
    _watch(PoolNode, lambda node: of_process("arena", lambda: node.memory.array))
    for kind in (GrammarCompiler, GrammarChecker):  # their processes are not simulated
        kind.warm_up = lambda self: None  # type: ignore[method-assign]
    _watch(ConductorService, lambda service: of_process("validate", lambda: _validated(service)))
    _watch(ConductorService, lambda service: of_process("conductor", service))
    _watch_writes(of_process)
    _watch_pool_slots()
    slot_writes.watch()
    _watch(Service, lambda service: of_process("validate", lambda: service.validate()["problems"]))


def _grants(node: WorkerNode) -> list[str]:
    """Return the problem that grants of a worker are left."""
    count = node.messenger._grants.counts()[1]
    return [f"{count} grants are left"] if count else []


def _validated(service: ConductorService) -> list[str]:
    """Return the problems that a conductor's `Validate` reports; it waits for nothing."""
    call = service.Validate(JsonRequest(), None)  # type: ignore[arg-type]
    try:
        call.send(None)
    except StopIteration as ended:
        problems: list[str] = json.loads(ended.value.json)["problems"]
        return problems
    raise AssertionError("Validate waits")


def _watch_writes(of_process: Callable[[str, Any], None]) -> None:
    """Record a problem if bytes of a peer's write land after the revocation of its key has returned."""
    land, revoke = TcpResponder.land, GrantTable.revoke

    def watched_land(self: TcpResponder, message: Write, rows: Any, region: Any) -> None:
        of_process("landing", message.token)
        thread = world().current
        assert thread is not None
        landing = thread.process.objects["landing"]
        if message.token in thread.process.objects.get("revoked", ()):
            world().problem(f"late write: {thread.process.name} takes a write under a key that was revoked")
        try:
            land(self, message, rows, region)
        finally:
            landing.remove(message.token)

    def watched_revoke(self: GrantTable, key: RemoteKey, grace_s: float) -> None:
        revoke(self, key, grace_s)
        of_process("revoked", key.token)
        thread = world().current
        assert thread is not None
        if key.token in thread.process.objects.get("landing", ()):
            world().problem(f"late write: {thread.process.name} has revoked a key under which bytes still land")

    TcpResponder.land, GrantTable.revoke = watched_land, watched_revoke  # type: ignore[method-assign]


def _process() -> ProcessState:
    thread = world().current
    assert thread is not None
    return thread.process


def _watch_pool_slots() -> None:
    """Record a problem if a pool's slots are freed while they are writable, filled by a read, or leased."""
    write_key, own_read, pin = PoolNode.write_key, PoolNode.own_read, PoolCore.pin
    free_slots, free, revoke = TierSpace.free_slots, TierSpace.free, GrantTable.revoke

    def watched_write_key(self: PoolNode, allocation: Any) -> RemoteKey:
        key = write_key(self, allocation)
        offsets = {offset for block in allocation.new_blocks for offset in block.offsets}
        _process().objects.setdefault("writable", []).append((key.token, self.core.store.dram, offsets))
        return key

    def watched_revoke(self: GrantTable, key: RemoteKey, grace_s: float) -> None:
        revoke(self, key, grace_s)
        objects = _process().objects
        objects["writable"] = [each for each in objects.get("writable", []) if each[0] != key.token]

    def watched_own_read(self: PoolNode, put_id: Any, start: Any) -> Any:
        blocks = self.core.puts[put_id].blocks if put_id in self.core.puts else []
        offsets = {offset for block in blocks for offset in block.offsets}
        reading = own_read(self, put_id, start)
        _process().objects.setdefault("reads", []).append((reading, self.core.store.dram, offsets))
        return reading

    def watched_pin(self: PoolCore, *arguments: Any, **options: Any) -> Any:
        grant = pin(self, *arguments, **options)
        if grant is not None:
            offsets = {offset for block in (*grant.blocks, *grant.tails) for offset in block.offsets}
            _process().objects.setdefault("leases", []).append((grant.lease_id, self, offsets))
        return grant

    def watched_free_slots(self: TierSpace, offsets: Any) -> Any:
        objects, freed = _process().objects, set(offsets)
        for _, space, writable in objects.get("writable", []):
            if space is self and writable & freed:
                world().problem(f"late write: {_process().name} frees slots of a put whose key is valid")
        for reading, space, read in objects.get("reads", []):
            if space is self and read & freed and not reading.done():
                world().problem(f"late write: {_process().name} frees slots that a read fills")
        return free_slots(self, offsets)

    def watched_free(self: TierSpace, copy: Any) -> Any:
        for lease_id, core, leased in _process().objects.get("leases", []):
            if core.store.dram is self and lease_id in core.leases and leased & set(copy.offsets):
                world().problem(f"late write: {_process().name} frees slots that a lease holds")
        return free(self, copy)

    PoolNode.write_key, PoolNode.own_read, PoolCore.pin = watched_write_key, watched_own_read, watched_pin  # type: ignore[method-assign]
    TierSpace.free_slots, TierSpace.free = watched_free_slots, watched_free  # type: ignore[method-assign]
    GrantTable.revoke = watched_revoke  # type: ignore[method-assign]


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
