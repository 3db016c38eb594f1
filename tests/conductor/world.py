"""Conductors and pool nodes in one event loop, for tests of what conductors share."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from conductor.config import ConductorConfig
from conductor.server import serve_conductor
from kvpool import KvGroup, KvSpec, PoolClient, PoolNodeConfig, layer_digests, parent_keys
from kvpool.server import serve_pool_node
from messenger import Messenger, MessengerConfig, SharedMemory
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc
from rpc.control import open_channel
from settings.keys import assemble

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)
NAMESPACE = bytes(range(16))
CHAIN = np.random.default_rng(1).integers(0, 256, (64, 16), dtype=np.uint8)


class Served:
    """A `serve(stop, on_ready)` in this loop, until ended."""

    def __init__(self, serve: Callable[..., Any]) -> None:
        self._stop = asyncio.Event()
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve(self._stop, self._ready.set_result))

    async def up(self) -> str:
        await asyncio.wait([self._ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            await self._task
        return self._ready.result()

    async def end(self) -> None:
        self._stop.set()
        async with asyncio.timeout(60):
            await self._task


class Conductor(Served):
    """One conductor and an operator's view of it."""

    def __init__(self, config: ConductorConfig) -> None:
        super().__init__(lambda stop, ready: serve_conductor(config, stop, ready))
        self.target = config.listen.listen
        self._channel = open_channel(config.listen.listen)
        self.stub = conductor_pb2_grpc.ConductorStub(self._channel)

    async def state(self) -> dict[str, Any]:
        return dict(json.loads((await self.stub.State(common_pb2.JsonRequest())).json))

    async def numbers(self) -> dict[str, float]:
        """The exported numbers by name and label values."""
        reply = await self.stub.Cluster(conductor_pb2.ClusterRequest())
        return {":".join([s.name, *sorted(s.labels.values())]): s.value for s in reply.samples}

    def knows(self, pool: str, blocks: int, state: str = "exact") -> Callable[[], Awaitable[bool]]:
        async def so() -> bool:
            known = (await self.state())["pools"].get(pool)
            return known is not None and (known["blocks"], known["state"]) == (blocks, state)

        return so

    async def end(self) -> None:
        await self._channel.close()
        await super().end()


class World:
    """Starts conductors and pool nodes in a folder; all are ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: list[Served] = []

    def conductor_config(self, name: str = "c", **fields: Any) -> ConductorConfig:
        times = {"shared_refresh_s": 0.05, "snapshot_s": 0.05, **fields}
        return assemble(ConductorConfig, listen=f"unix:{self.folder}/{name}.sock", **times)

    async def conductor(self, name: str = "c", **fields: Any) -> Conductor:
        conductor = Conductor(self.conductor_config(name, **fields))
        self._running.append(conductor)
        await conductor.up()
        return conductor

    async def pool(self, name: str = "pool-0", conductor: str = "c") -> Served:
        config = assemble(
            PoolNodeConfig,
            node_id=name,
            listen=f"unix:{self.folder}/{name}.sock",
            conductor_targets=(f"unix:{self.folder}/{conductor}.sock",),
            pool_bytes=4 << 20,
            messenger=assemble(MessengerConfig, transport="tcp"),
        )
        pool = Served(lambda stop, ready: serve_pool_node(config, stop, ready))
        self._running.append(pool)
        await pool.up()
        return pool

    async def end(self, served: Served) -> None:
        self._running.remove(served)
        await served.end()

    async def close(self) -> None:
        for served in reversed(list(self._running)):
            await self.end(served)

    async def retain(self, count: int, pool: str = "pool-0", **request: Any) -> bool:
        """Let a pool node retain the first `count` blocks."""
        client = self._client(pool)
        try:
            return await client.retain(NAMESPACE, CHAIN[:count], **request)
        finally:
            await client.close()

    def _client(self, pool: str) -> PoolClient:
        return PoolClient(f"unix:{self.folder}/{pool}.sock", owner="test", owner_incarnation=1)

    async def store(self, begin: int, count: int, pool: str = "pool-0") -> None:
        """Put blocks number `begin` and on into a pool node."""
        chain, client = CHAIN[begin : begin + count], self._client(pool)
        messenger = Messenger(assemble(MessengerConfig, transport="tcp"), node_id="test", incarnation=1)
        messenger.start()
        nbytes = SPEC.slot_nbytes(0)
        memory = SharedMemory.create(count * nbytes, "blocks")
        region = messenger.register(memory)
        try:
            memory.array[:] = 7
            ticket = await client.allocate(NAMESPACE, SPEC, chain, parent_keys(chain), ttl_s=60)
            own = np.arange(count) * nbytes
            slices = np.stack([own, ticket.offsets[0], np.full(count, nbytes)], axis=1).astype(np.int64)
            peer = messenger.connect(ticket.endpoint)
            assert ticket.key is not None
            await asyncio.wrap_future(peer.write(ticket.key, region, slices, deadline_s=60))
            slots = memory.array.reshape(count, nbytes)
            digests = layer_digests(slots, SPEC, 0, np.full(count, 16, np.int32))
            assert await client.seal(ticket, [digests]) == count
        finally:
            messenger.close()
            memory.close()
            await client.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)
