"""State, counters, gauges and self-check of a pool node."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from kvpool.policy.records import DRAM, SSD
from kvpool.ssd_tier import SsdState

if TYPE_CHECKING:
    from kvpool.node import PoolNode


_TIERS: Final = {"dram": DRAM, "ssd": SSD}
_MAX_TENANTS: Final = 100  # with retained prefixes, in the answer to State


def state(node: PoolNode) -> dict[str, Any]:
    """Return the node's contents and counters as JSON-compatible data, for the State call."""
    store = node.core.store
    namespaces = {
        held.kv_namespace.hex(): {
            "blocks": held.num_blocks,
            "spec": held.spec.to_json(),
            "tiers": {
                name: {"blocks": held.copies_in(tier), "used_bytes": held.used_nbytes[tier]}
                for name, tier in _TIERS.items()
            },
        }
        for held in store.namespaces.in_use()
    }
    leases = Counter(lease.owner for lease in node.core.leases.values())
    puts = Counter(put.owner for put in node.core.puts.values())
    return {
        "node_id": node.config.node_id,
        "incarnation": node.incarnation,
        "endpoint": str(node.messenger.endpoint),
        "arena_bytes": node.config.pool.pool_bytes,
        "arena_pages": node.memory.pages,
        "door": node.local_socket,
        "used_bytes": store.dram.slabs.nbytes_used,
        "tiers": {
            "dram": {
                "blocks": store.dram.num_copies,
                "used_bytes": store.dram.slabs.nbytes_used,
                "capacity_bytes": node.core.resizing.usable_nbytes,
            },
            "ssd": {
                "blocks": store.ssd.num_copies,
                "used_bytes": store.ssd.slabs.nbytes_used - store.ssd.freed_nbytes,
                "capacity_bytes": node.config.limits.ssd_nbytes,
            },
        },
        "ssd": None if node.ssd is None else node.ssd.describe(),
        "event_seq": node.core.log.seq,
        "namespaces": namespaces,
        "retained": {
            name: [
                {"account": account, "prefixes": number, "bytes": nbytes}
                for account, number, nbytes in node.core.retained(time.monotonic_ns(), tier)[:_MAX_TENANTS]
            ]
            for name, tier in _TIERS.items()
        },
        "owners": {name: {"leases": leases[name], "puts": puts[name]} for name in sorted(leases | puts)},
        "counts": counts(node),
        "counters": counters(node),
    }


def counts(node: PoolNode) -> dict[str, int]:
    """Return the numbers of objects held now."""
    return {
        "blocks": node.core.store.index.num_sealed,
        "leases": len(node.core.leases),
        "puts": len(node.core.puts),
        "fenced_puts": len(node.core.fenced),
        "write_keys": node.num_write_keys,
        "copies": node.num_copies,
        "loads": node.ssd.loader.num_in_flight if node.ssd is not None else 0,
    }


def counters(node: PoolNode) -> dict[str, float]:
    """Return the counters since the start, with the prefixes `pool_` and `messenger_`."""
    own = node.core.totals() | node.counters
    moved = {name: number for name, number in _messenger(node).items() if not name.endswith("_open")}
    return {f"pool_{name}": count for name, count in sorted(own.items())} | moved


def gauges(node: PoolNode) -> dict[str, float]:
    """Return the current values, under the names of the reported metrics."""
    store, ssd = node.core.store, node.ssd
    return {
        "pool_leases_open": len(node.core.leases),
        "pool_puts_open": len(node.core.puts),
        "pool_held_blocks": store.dram.num_copies,
        "pool_used_bytes": store.dram.slabs.nbytes_used,
        "pool_capacity_bytes": node.core.resizing.usable_nbytes,
        "pool_bound_bytes": node.config.pool.pool_bytes,
        "pool_resident_bytes": node.resident_nbytes,
        "pool_memory_pressure": 0 if node.elastic is None else int(node.elastic.pressure),
        "pool_ssd_held_blocks": store.ssd.num_copies,
        "pool_ssd_used_bytes": store.ssd.slabs.nbytes_used - store.ssd.freed_nbytes,
        "pool_ssd_capacity_bytes": node.config.limits.ssd_nbytes,
        "pool_ssd_readable": int(ssd is not None and ssd.state is not SsdState.FAILED),
        "pool_ssd_writable": int(ssd is not None and ssd.state is SsdState.OK),
        "pool_loads_open": 0 if ssd is None else ssd.loader.num_in_flight,
        "pool_writes_open": 0 if ssd is None else ssd.write_back.num_in_flight,
        "pool_dram_only_held_blocks": store.index.num_sealed - store.ssd.num_copies,
        **{name: number for name, number in _messenger(node).items() if name.endswith("_open")},
    }


def _messenger(node: PoolNode) -> dict[str, float]:
    return {f"messenger_{name}": number for name, number in node.messenger.reported().items()}


def validate(node: PoolNode) -> dict[str, Any]:
    """Check that the state is consistent and that only sealed blocks are held.

    Returns {"ok": bool, "problems": descriptions, "counts": as `counts`}.
    """
    held = counts(node)
    problems = [*node.core.validate(), *node.messenger.validate()]
    if node.index is not None:
        node.publish_changes()
        problems += node.index.validate(node.core.store.in_dram())
    problems += [f"{n} {name} are held" for name, n in held.items() if n and name != "blocks"]
    return {"ok": not problems, "problems": problems, "counts": held}
