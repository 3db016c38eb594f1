"""The distributed KV pool: what KV is and how it is addressed, the pool node, its client, and the directory."""

from kvpool.address import (
    Namespace,
    Provenance,
    chain_keys,
    chain_seed,
    keys_from_bytes,
    keys_u64,
    kv_namespace,
    parent_keys,
)
from kvpool.digest import layer_digests, layer_digests_at, seal_digest
from kvpool.directory import Directory, DirectoryState
from kvpool.errors import KvPoolError
from kvpool.events import BlockRun, PoolEvents
from kvpool.spec import KvGroup, KvSpec

__all__ = [
    "BlockRun",
    "Directory",
    "DirectoryState",
    "KvGroup",
    "KvPoolError",
    "KvSpec",
    "Namespace",
    "PoolEvents",
    "Provenance",
    "chain_keys",
    "chain_seed",
    "keys_from_bytes",
    "keys_u64",
    "kv_namespace",
    "layer_digests",
    "layer_digests_at",
    "parent_keys",
    "seal_digest",
]
