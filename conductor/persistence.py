"""Persistence across restarts of a conductor: the connection to Redis, registry synchronisation, directory snapshots.

Requests and events never wait for any of these.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from conductor.config import ConductorConfig
from conductor.directory.feeds import DirectoryUpdater
from conductor.errors import ConductorConfigError, SharedStoreError, SharedStoreUnavailable
from conductor.registry import Registry
from conductor.shared_store import NodeRecord, RedisStore, RegistrySync, SnapshotPointer, Snapshots
from conductor.wire import ROLES
from moonpool_proto.v1 import conductor_pb2
from rpc.waiting import cancel_and_wait

__all__ = ["Persistence", "SharedStoreConnection", "connect_shared_store"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedStoreConnection:
    """Connection to Redis, if configured. `trouble`: why Redis was not usable at startup, or ""."""

    store: RedisStore | None
    incarnation: int  # of this conductor; greater than all earlier ones
    trouble: str = ""

    async def close(self) -> None:
        """Disconnect."""
        if self.store is not None:
            await self.store.close()


async def connect_shared_store(config: ConductorConfig) -> SharedStoreConnection:
    """Connect to Redis, if configured, and allocate this conductor's incarnation. Raises SharedStoreRefused."""
    candidate = time.time_ns() // 1000
    if not config.shared_store.redis_url:
        return SharedStoreConnection(None, candidate)
    store = RedisStore(config.shared_store.redis_url, config.shared_store.cluster_name)
    try:
        await store.claim()
        return SharedStoreConnection(store, await store.new_epoch(candidate))
    except SharedStoreUnavailable as error:
        log.warning("starting without the shared store, retrying in the background: %s", error)
        return SharedStoreConnection(store, candidate, str(error))
    except BaseException:
        await store.close()
        raise


class Persistence:
    """Background tasks that restore the directory, then synchronise the registry and write snapshots."""

    def __init__(
        self, config: ConductorConfig, connection: SharedStoreConnection, updater: DirectoryUpdater, registry: Registry
    ) -> None:
        """Prepare the tasks. Raises ConductorConfigError if the folder for snapshots cannot be created."""
        self._config = config
        self._store = connection.store
        self._incarnation = connection.incarnation
        self._updater = updater
        self._registry = registry
        self._registry_sync: RegistrySync | None = None
        self._task: asyncio.Task[None] | None = None
        if connection.store is not None:
            self._registry_sync = RegistrySync(
                connection.store,
                connection.incarnation,
                self._records,
                lambda targets: updater.expect("registry", targets),
                every_s=config.shared_store.shared_refresh_s,
                ttl_s=config.shared_store.shared_ttl_s,
                trouble=connection.trouble,
            )
        self._snapshots: Snapshots | None = None
        state_dir = config.shared_store.state_dir
        if state_dir is not None:
            try:
                self._snapshots = Snapshots(state_dir, config.shared_store.cluster_name, updater.directory)
            except OSError as error:
                raise ConductorConfigError(f"state_dir {str(state_dir)!r} cannot be used: {error}") from error

    def start(self) -> None:
        """Start the tasks; pool events are followed once the snapshot is loaded."""
        self._task = asyncio.create_task(self._run(), name="persistence")
        self._task.add_done_callback(_log_failure)

    def state(self) -> dict[str, Any]:
        """Return the state of the registry synchronisation; {} without Redis."""
        return self._registry_sync.state() if self._registry_sync is not None else {}

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """Yield the state as metrics."""
        if self._registry_sync is not None:
            yield from self._registry_sync.samples()

    async def close(self) -> None:
        """Cancel the tasks. Records stay in Redis for the next conductor, since the nodes are still running."""
        if self._registry_sync is not None:
            self._registry_sync.close()
        await cancel_and_wait(self._task)

    async def _run(self) -> None:
        restored: dict[str, str] = {}
        try:
            if self._snapshots is not None:
                restored = await self._snapshots.restore(await self._pointers())
        finally:
            self._updater.expect("snapshot", restored)
            self._updater.open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stop_expecting())
            if self._registry_sync is not None:
                tasks.create_task(self._registry_sync.run())
            if self._snapshots is not None:
                tasks.create_task(self._keep_snapshots(self._snapshots))

    async def _pointers(self) -> list[SnapshotPointer]:
        if self._store is None:
            return []
        try:
            await self._store.claim()
            return await self._store.snapshots()
        except SharedStoreError as error:
            log.warning("cannot list snapshots of other conductors: %s", error)
            return []

    async def _stop_expecting(self) -> None:
        """Drop nodes of the snapshot that have neither joined nor been listed by another conductor since."""
        await asyncio.sleep(self._config.shared_store.shared_ttl_s)
        self._updater.expect("snapshot", {})

    async def _keep_snapshots(self, snapshots: Snapshots) -> None:
        while True:
            await asyncio.sleep(self._config.shared_store.snapshot_s)
            try:
                pointer = await snapshots.write(self._updater.targets)
            except OSError as error:
                log.warning("the snapshot of the directory was not written, retrying: %s", error)
                continue
            if pointer is not None and self._registry_sync is not None:
                self._registry_sync.pointer = pointer

    def _records(self) -> Iterator[NodeRecord]:
        for node in self._registry.nodes.values():
            role = ROLES[node.role]
            yield NodeRecord(node.node_id, role, node.target, node.incarnation, node.host_id, self._incarnation)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has stopped", task.get_name(), exc_info=error)
