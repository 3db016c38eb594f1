"""The distributed KV pool: description and addresses of KV blocks, and the client of a pool node.

The pool node itself is in `kvpool.server`. Only its own process imports it, because it brings compilers and disk I/O
along.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "address": (
        "Namespace",
        "Provenance",
        "chain_keys",
        "chain_seed",
        "keys_from_bytes",
        "keys_u64",
        "kv_namespace",
        "parent_keys",
        "short_keys_from_bytes",
        "tail_key",
        "tail_keys",
    ),
    "client": ("PoolClient",),
    "commit_ahead": ("CommitAhead",),
    "config": ("PoolNodeConfig",),
    "digest": ("layer_digests", "layer_digests_at", "seal_digest"),
    "errors": ("KvPoolError",),
    "events": ("BlockRun", "PoolEvents"),
    "handles": ("Lease", "PoolDescription", "PutTicket", "Tail"),
    "policy.records": ("SlotStatus",),
    "spec": ("KvGroup", "KvSpec"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: a frontend needs addresses only, not the messenger."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value


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
