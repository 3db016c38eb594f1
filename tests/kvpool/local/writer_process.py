"""Puts one-block prompts for ever, each with bytes of its own: `writer_process.py DOOR PROGRESS`.

The file PROGRESS, of 8 bytes, holds how many are put.
"""

import sys
from itertools import count

import numpy as np

from kvpool import KvGroup, KvSpec, chain_keys, chain_seed, kv_namespace
from kvpool.local import LocalPoolClient, RegisteredBlocks
from messenger import SharedMemory

SPEC = KvSpec((KvGroup("full", 0, (0, 1), kv_heads=1, head_dim=64, dtype="float32"),), 64)
NAMESPACE = kv_namespace("weights", SPEC)


def chain_of(i: int) -> np.ndarray:
    return chain_keys(chain_seed(str(i), "tokenizer", 64), np.zeros(64, np.int32), 64)


def bytes_of(i: int) -> np.ndarray:
    return np.full(SPEC.block_nbytes // 8, i + 1, np.uint64).view(np.uint8)


def main(door: str, progress: str) -> None:
    done = np.memmap(progress, np.uint64)
    pool = LocalPoolClient(door, owner="writer", owner_incarnation=1)
    memory = SharedMemory.create(SPEC.block_nbytes, "writer")
    region = pool.register_memory(memory)
    nothing, offsets = np.zeros((1, 16), np.uint8), np.zeros((1, 1), np.int64)
    for i in count():
        memory.array[:] = bytes_of(i)
        pool.put(NAMESPACE, SPEC, chain_of(i), nothing, RegisteredBlocks(region, offsets))
        done[0] = i + 1


if __name__ == "__main__":
    main(*sys.argv[1:])
