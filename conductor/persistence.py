"""What lets a conductor go on where the last one was: first contact with Redis, and the tasks behind the service.

Requests and events never wait for any of it.
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
    """What came of the first contact. `trouble`: why Redis could not be used yet; "" when it could."""

    store: RedisStore | None
    incarnation: int  # of this conductor: greater than any before
    trouble: str = ""

    async def close(self) -> None:
        """Disconnect."""
        if self.store is not None:
            await self.store.close()


async def connect_shared_store(config: ConductorConfig) -> SharedStoreConnection:
    """Draw this conductor's incarnation, in Redis if there is one. Raises SharedStoreRefused."""
    candidate = time.time_ns() // 1000
    if not config.shared_store.redis_url:
        return SharedStoreConnection(None, candidate)
    store = RedisStore(config.shared_store.redis_url, config.shared_store.cluster_name)
    try:
        await store.claim()
        return SharedStoreConnection(store, await store.new_epoch(candidate))
    except SharedStoreUnavailable as error:
        log.warning("starting without the shared store, trying again meanwhile: %s", error)
        return SharedStoreConnection(store, candidate, str(error))
    except BaseException:
        await store.close()
        raise


class Persistence:
    """Restores the directory, then keeps registry and snapshots up to date until closed."""

    def __init__(
        self, config: ConductorConfig, contact: SharedStoreConnection, following: DirectoryUpdater, registry: Registry
    ) -> None:
        """Raises ConfigError when the folder for snapshots cannot be made."""
        self._config = config
        self._store = contact.store
        self._incarnation = contact.incarnation
        self._following = following
        self._registry = registry
        self._keeper: RegistrySync | None = None
        self._task: asyncio.Task[None] | None = None
        if contact.store is not None:
            self._keeper = RegistrySync(
                contact.store,
                contact.incarnation,
                self._records,
                lambda targets: following.expect("registry", targets),
                every_s=config.shared_store.shared_refresh_s,
                ttl_s=config.shared_store.shared_ttl_s,
                trouble=contact.trouble,
            )
        self._snapshots: Snapshots | None = None
        state_dir = config.shared_store.state_dir
        if state_dir is not None:
            try:
                self._snapshots = Snapshots(state_dir, config.shared_store.cluster_name, following.directory)
            except OSError as error:
                raise ConductorConfigError(f"state_dir is {str(state_dir)!r}, which cannot be used: {error}") from error

    def start(self) -> None:
        """Begin; the directory is followed as soon as what there is of it is loaded."""
        self._task = asyncio.create_task(self._run(), name="continuity")
        self._task.add_done_callback(_log_failure)

    def state(self) -> dict[str, Any]:
        """For export; {} without Redis."""
        return self._keeper.state() if self._keeper is not None else {}

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """The same as numbers."""
        if self._keeper is not None:
            yield from self._keeper.samples()

    async def close(self) -> None:
        """End the tasks. What is in Redis stays: the nodes live on, and the next conductor wants to know of them."""
        if self._keeper is not None:
            self._keeper.close()
        await cancel_and_wait(self._task)

    async def _run(self) -> None:
        restored: dict[str, str] = {}
        try:
            if self._snapshots is not None:
                restored = await self._snapshots.restore(await self._pointers())
        finally:
            self._following.expect("snapshot", restored)
            self._following.open()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stop_expecting())
            if self._keeper is not None:
                tasks.create_task(self._keeper.run())
            if self._snapshots is not None:
                tasks.create_task(self._keep_snapshots(self._snapshots))

    async def _pointers(self) -> list[SnapshotPointer]:
        if self._store is None:
            return []
        try:
            await self._store.claim()
            return await self._store.snapshots()
        except SharedStoreError as error:
            log.warning("snapshots of other conductors are not looked for: %s", error)
            return []

    async def _stop_expecting(self) -> None:
        """A node of the snapshot that nobody has spoken of since is not there any more."""
        await asyncio.sleep(self._config.shared_store.shared_ttl_s)
        self._following.expect("snapshot", {})

    async def _keep_snapshots(self, snapshots: Snapshots) -> None:
        while True:
            await asyncio.sleep(self._config.shared_store.snapshot_s)
            try:
                pointer = await snapshots.write(self._following.targets)
            except OSError as error:
                log.warning("no snapshot of the directory could be written, trying again: %s", error)
                continue
            if pointer is not None and self._keeper is not None:
                self._keeper.pointer = pointer

    def _records(self) -> Iterator[NodeRecord]:
        for node in self._registry.nodes.values():
            role = ROLES[node.role]
            yield NodeRecord(node.node_id, role, node.target, node.incarnation, node.host_id, self._incarnation)


def _log_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s has stopped", task.get_name(), exc_info=error)
