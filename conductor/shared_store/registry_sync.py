"""Synchronisation of the registry with the shared store: writes this conductor's nodes, reads those of others.

A background task does all calls and retries after failures. While the store is unreachable, the last state read stays
in use.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from conductor.errors import SharedStoreError, SharedStoreRefused
from conductor.shared_store.redis_store import NodeRecord, RedisStore, SnapshotPointer
from moonpool_proto.v1 import conductor_pb2

__all__ = ["RegistrySync"]

log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 15.0


class RegistrySync:
    """Synchronisation task.

    `members()` returns records of the nodes joined here; `on_pools` receives the targets of pool nodes joined
    elsewhere.
    """

    def __init__(
        self,
        store: RedisStore,
        incarnation: int,
        members: Callable[[], Iterable[NodeRecord]],
        on_pools: Callable[[Mapping[str, str]], None],
        *,
        every_s: float,
        ttl_s: float,
        trouble: str = "",
    ) -> None:
        self._store = store
        self._incarnation = incarnation
        self._members = members
        self._on_pools = on_pools
        self._every_s = every_s
        self._ttl_s = ttl_s
        self._trouble = trouble  # "" if the store is usable
        self._written: set[str] = set()  # nodes whose records this conductor wrote
        self._errors: Counter[str] = Counter()
        self._closing = False
        self.pointer: SnapshotPointer | None = None  # of the last snapshot written here

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "where": self._store.where,
            "state": "degraded" if self._trouble else "ok",
            "reason": self._trouble,
            "nodes": len(self._written),
        }

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """Yield the state as metrics."""
        yield conductor_pb2.Sample(name="shared_store_up", value=float(not self._trouble))
        for reason, count in sorted(self._errors.items()):
            yield conductor_pb2.Sample(name="shared_store_errors_total", labels={"reason": reason}, value=count)

    def close(self) -> None:
        """Make `run` end after its current round.

        Cancellation alone is not sufficient: a call that completes at the same time would swallow it.
        """
        self._closing = True

    async def run(self) -> None:
        """Synchronise until cancelled or closed."""
        pause_s = _FIRST_PAUSE_S
        while not self._closing:
            try:
                await self._round()
            except SharedStoreError as error:
                self._failed(error)
                if not self._closing:
                    await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_PAUSE_S)
                continue
            if self._trouble:
                log.warning("the shared store is usable again: %s", self._store.where)
                self._trouble = ""
            pause_s = _FIRST_PAUSE_S
            if not self._closing:
                await asyncio.sleep(self._every_s)

    async def _round(self) -> None:
        """Write all records again, so that a store that lost data recovers, and read those of other conductors."""
        await self._store.claim()
        await self._store.raise_epoch(self._incarnation)
        records = list(self._members())
        if records:
            await self._store.put_nodes(records, self._ttl_s)
        left = self._written - {record.node_id for record in records}
        known = await self._store.nodes()
        mine = {node_id for node_id in left if node_id in known and known[node_id].conductor == self._incarnation}
        await self._store.forget_nodes(sorted(mine))
        self._written = {record.node_id for record in records}
        if self.pointer is not None:
            await self._store.put_snapshot(self.pointer)
        others = (record for record in known.values() if record.conductor != self._incarnation)
        self._on_pools({record.node_id: record.target for record in others if record.role == "pool"})

    def _failed(self, error: SharedStoreError) -> None:
        self._errors["refused" if isinstance(error, SharedStoreRefused) else "unavailable"] += 1
        if str(error) != self._trouble:
            log.warning("continuing without the shared store, retrying: %s", error)
            self._trouble = str(error)
