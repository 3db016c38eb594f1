"""Storage that outlives a conductor: registry in Redis, directory snapshots in files. Requests never wait for it."""

from conductor.shared_store.redis_store import NodeRecord, RedisStore, SnapshotPointer
from conductor.shared_store.registry_sync import RegistrySync
from conductor.shared_store.snapshots import Snapshots

__all__ = ["NodeRecord", "RedisStore", "RegistrySync", "SnapshotPointer", "Snapshots"]
