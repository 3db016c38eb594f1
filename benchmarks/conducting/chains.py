"""Block keys for the conductor's benchmarks, as chains and as events of pool nodes; and access to Dynamo."""

import contextlib
import gc
import importlib
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool import BlockRun
from kvpool.events import Tier

__all__ = ["NAMESPACE", "Keys", "chain_bytes", "dynamo", "mixed", "name", "settle", "stored"]

NAMESPACE = bytes(16)
Keys = NDArray[np.uint64]


def mixed(first: int, count: int) -> Keys:
    """Return the keys `first`, `first` + 1, ... of an endless sequence of distinct keys (splitmix64)."""
    x = (np.arange(count, dtype=np.uint64) + np.uint64(first)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def chain_bytes(keys: Keys) -> bytes:
    """Return the keys in wire format, 16 bytes each."""
    full = np.zeros((len(keys), 2), np.uint64)
    full[:, 0] = keys
    return full.tobytes()


def name(node: int) -> str:
    return f"pool-{node:04}"


def stored(keys: Keys, tier: Tier = Tier.DRAM) -> tuple[BlockRun, ...]:
    return (BlockRun(NAMESPACE, chain_bytes(keys), tier),)


def settle() -> None:
    """Exclude all existing objects from garbage collection."""
    gc.collect()
    gc.freeze()


def dynamo(peer_path: str, kind: str) -> Any:
    """Return a class of Dynamo, or None if Dynamo cannot be imported."""
    os.environ.setdefault("DYN_LOG", "warn")  # otherwise it logs a line per selection, which would slow it down
    if peer_path and peer_path not in sys.path:
        sys.path.append(peer_path)
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module("dynamo._core"), kind)
    return None
