"""The distributed KV pool: description and addresses of KV blocks, and the client of a pool node.

The pool node itself is in `kvpool.server`. Only its own process imports it, because it brings compilers and disk I/O
along.
"""

from kvpool.address import (
    Namespace,
    Provenance,
    chain_keys,
    chain_seed,
    keys_from_bytes,
    keys_u64,
    kv_namespace,
    parent_keys,
    short_keys_from_bytes,
    tail_key,
    tail_keys,
)
from kvpool.client import PoolClient
from kvpool.commit_ahead import CommitAhead
from kvpool.config import PoolNodeConfig
from kvpool.digest import layer_digests, layer_digests_at, seal_digest
from kvpool.errors import KvPoolError
from kvpool.events import BlockRun, PoolEvents
from kvpool.handles import Lease, PoolDescription, PutTicket, Tail
from kvpool.policy.records import SlotStatus
from kvpool.spec import KvGroup, KvSpec

__all__ = [
    "BlockRun",
    "CommitAhead",
    "KvGroup",
    "KvPoolError",
    "KvSpec",
    "Lease",
    "Namespace",
    "PoolClient",
    "PoolDescription",
    "PoolEvents",
    "PoolNodeConfig",
    "Provenance",
    "PutTicket",
    "SlotStatus",
    "Tail",
    "chain_keys",
    "chain_seed",
    "keys_from_bytes",
    "keys_u64",
    "kv_namespace",
    "layer_digests",
    "layer_digests_at",
    "parent_keys",
    "seal_digest",
    "short_keys_from_bytes",
    "tail_key",
    "tail_keys",
]
