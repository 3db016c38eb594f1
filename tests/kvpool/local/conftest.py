"""A process of the pool node's host: its memory, its way through the door, and what it puts and expects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool import KvSpec, PoolClient, kv_namespace, parent_keys
from kvpool.local import LocalPoolClient, PutStatus, RegisteredBlocks
from messenger import SharedMemory


class HostProcess:
    """Calls block: in a test whose loop runs the pool node, make them from a thread."""

    def __init__(self, door: str, spec: KvSpec) -> None:
        self.pool = LocalPoolClient(door, owner="host", owner_incarnation=1)
        self.spec, self.ns = spec, kv_namespace("weights", spec)
        self.memory = SharedMemory.create(1 << 20, "host process")
        self.region = self.pool.register_memory(self.memory)
        self.landing = np.zeros(1 << 20, np.uint8)

    def close(self) -> None:
        self.pool.close()
        self.memory.close()

    def offsets(self, n: int) -> NDArray[np.int64]:
        """Slots of n blocks, the groups one after the other."""
        rows, at = [], 0
        for g in range(self.spec.num_groups):
            rows.append(at + np.arange(n) * self.spec.slot_nbytes(g))
            at += n * self.spec.slot_nbytes(g)
        return np.array(rows, np.int64)

    def slots(self, memory: NDArray[np.uint8], n: int) -> list[NDArray[np.uint8]]:
        """Per group: the slots [n, slot_nbytes] at `offsets(n)`."""
        starts = self.offsets(n)[:, 0]
        sizes = [self.spec.slot_nbytes(g) for g in range(self.spec.num_groups)]
        return [memory[s : s + n * size].reshape(n, size) for s, size in zip(starts, sizes, strict=True)]

    def put(
        self, chain: NDArray[np.uint8], seed: int = 0, digests: NDArray[np.uint64] | None = None, **more: Any
    ) -> list[PutStatus]:
        """Put random blocks."""
        rng = np.random.default_rng(seed)
        for slots in self.slots(self.memory.array, len(chain)):
            slots[:] = rng.integers(0, 256, slots.shape, np.uint8)
        parents = parent_keys(chain)
        source = RegisteredBlocks(self.region, self.offsets(len(chain)), digests)
        status = self.pool.put(self.ns, self.spec, chain, parents, source, **more)
        return [PutStatus(each) for each in status]

    def get(self, chain: NDArray[np.uint8], verify: bool = True) -> int:
        self.landing[:] = 0
        return self.pool.get(self.ns, self.spec, chain, self.landing, self.offsets(len(chain)), verify=verify)

    def got_what_was_put(self, n: int, of: int) -> bool:
        """Return True if the leading n of the `of` blocks that arrived are those that were put."""
        landed, put = self.slots(self.landing, of), self.slots(self.memory.array, of)
        return all(np.array_equal(a[:n], b[:n]) for a, b in zip(landed, put, strict=True))


async def local_socket_of(target: str) -> str:
    client = PoolClient(target, owner="asks", owner_incarnation=1)
    try:
        return (await client.describe()).local_socket
    finally:
        await client.close()


@pytest.fixture(scope="session")
def local_socket_at() -> Callable[[str], Awaitable[str]]:
    """Function that returns the local socket of the pool node at a target."""
    return local_socket_of


@pytest.fixture
async def enter(spec: KvSpec) -> AsyncIterator[Callable[..., Awaitable[HostProcess]]]:
    """Function that connects to the local socket of the pool node at a target."""
    entered: list[HostProcess] = []

    async def through(target: str, of: KvSpec | None = None) -> HostProcess:
        door = await local_socket_of(target)
        entered.append(await asyncio.to_thread(HostProcess, door, of or spec))
        return entered[-1]

    yield through
    for each in entered:
        await asyncio.to_thread(each.close)
