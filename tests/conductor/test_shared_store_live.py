"""Conductors that restart, that are several, and that lose Redis: real pool nodes, real Redis, real files."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conductor.errors import ConfigError, SharedStoreRefused
from conductor.server import ConductorConfig, serve_conductor
from conductor.shared_store import NodeRecord, RedisStore
from conductor.shared_store.snapshots import FILE_NAME
from kvpool import KvGroup, KvSpec, PoolClient, PoolNodeConfig, layer_digests, parent_keys
from kvpool.server import serve_pool_node
from messenger import Messenger, MessengerConfig, SharedMemory
from messenger.control import open_channel
from moonpool_proto.v1 import common_pb2, conductor_pb2, conductor_pb2_grpc

SPEC = KvSpec((KvGroup("full", 0, (0, 1), 1, 8, "float32"),), block_tokens=16)
NAMESPACE = bytes(range(16))
SECRET = "s3cret-word"


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
        self._channel = open_channel(config.listen)
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
        return ConductorConfig(listen=f"unix:{self.folder}/{name}.sock", **times)

    async def conductor(self, name: str = "c", **fields: Any) -> Conductor:
        conductor = Conductor(self.conductor_config(name, **fields))
        self._running.append(conductor)
        await conductor.up()
        return conductor

    async def pool(self, name: str = "pool-0", conductor: str = "c") -> Served:
        config = PoolNodeConfig(
            name,
            f"unix:{self.folder}/{name}.sock",
            conductor_targets=(f"unix:{self.folder}/{conductor}.sock",),
            arena_bytes=4 << 20,
            messenger=MessengerConfig(transport="tcp"),
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

    async def store(self, begin: int, count: int, pool: str = "pool-0") -> None:
        """Put blocks number `begin` and on into a pool node."""
        chain = np.random.default_rng(1).integers(0, 256, (64, 16), dtype=np.uint8)[begin : begin + count]
        client = PoolClient(f"unix:{self.folder}/{pool}.sock", owner="test", owner_incarnation=1)
        messenger = Messenger(MessengerConfig(transport="tcp"), node_id="test", incarnation=1)
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


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    yield made
    await made.close()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.02)


async def snapshot_of(world: World, blocks: int) -> None:
    """Until the file holds so many blocks."""

    async def written() -> bool:
        path = world.folder / "state" / FILE_NAME
        with contextlib.suppress(FileNotFoundError):
            return path.stat().st_size >= 12 * blocks
        return False

    await until(written)


@pytest.mark.parametrize("with_redis", [True, False])
async def test_a_restarted_conductor_goes_on_from_its_snapshot_with_nodes_that_have_not_joined_again(
    world: World, start_redis: Any, with_redis: bool
) -> None:
    shared = {"redis_url": start_redis().url() if with_redis else "", "state_dir": world.folder / "state"}
    first = await world.conductor(**shared)
    await world.pool()
    await world.store(0, 10)
    await until(first.knows("pool-0", 10))
    await snapshot_of(world, 10)
    before = await first.state()
    await world.end(first)
    await world.store(10, 5)
    second = await world.conductor("c2", **shared)
    await until(second.knows("pool-0", 15))
    numbers = await second.numbers()
    assert [name for name in numbers if name.startswith("directory_snapshots")] == []
    assert (numbers["directory_exact:pool-0"], numbers["directory_blocks:dram:pool-0"]) == (1, 15)
    after = await second.state()
    assert not after["pools"]["pool-0"]["joined"]
    assert after["incarnation"] > before["incarnation"]
    # What has not joined can be followed, but nothing can be placed there.
    assert (await second.stub.Cluster(conductor_pb2.ClusterRequest())).nodes == []


async def test_a_pool_node_that_restarted_meanwhile_is_taken_in_anew(world: World) -> None:
    state_dir = world.folder / "state"
    first = await world.conductor(state_dir=state_dir)
    pool = await world.pool()
    await world.store(0, 10)
    await until(first.knows("pool-0", 10))
    await snapshot_of(world, 10)
    await world.end(first)
    await world.end(pool)
    await world.pool()
    await world.store(0, 3)
    second = await world.conductor("c2", state_dir=state_dir)
    await until(second.knows("pool-0", 3))
    assert (await second.numbers())["directory_snapshots_total:restart"] == 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda data: data[:-30] + bytes(30), "damaged or cut short"),
        (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "damaged or cut short"),
        (lambda data: data[: len(data) // 2], "damaged or cut short"),
        (lambda data: b"", "damaged or cut short"),
    ],
    ids=["end", "bit", "half", "empty"],
)
async def test_a_damaged_snapshot_is_left_alone(
    world: World, spoil: Callable[[bytes], bytes], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    state_dir = world.folder / "state"
    first = await world.conductor(state_dir=state_dir)
    await world.pool()
    await world.store(0, 10)
    await until(first.knows("pool-0", 10))
    await snapshot_of(world, 10)
    await world.end(first)
    path = state_dir / FILE_NAME
    path.write_bytes(spoil(path.read_bytes()))
    second = await world.conductor(state_dir=state_dir, snapshot_s=3600)
    await until(second.knows("pool-0", 10))
    assert said in caplog.text
    assert (await second.numbers())["directory_snapshots_total:new"] == 1


async def test_another_clusters_snapshot_is_left_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    state_dir = world.folder / "state"
    first = await world.conductor(state_dir=state_dir)
    await world.pool()
    await world.store(0, 10)
    await until(first.knows("pool-0", 10))
    await snapshot_of(world, 10)
    await world.end(first)
    second = await world.conductor("c2", state_dir=state_dir, cluster_name="green", snapshot_s=3600)
    assert (await second.state())["pools"] == {}
    assert "is of the cluster 'moonpool', not 'green'" in caplog.text


async def test_a_second_conductor_follows_nodes_that_joined_the_first_until_they_leave(
    world: World, start_redis: Any
) -> None:
    url = start_redis().url()
    first, second = await world.conductor("c", redis_url=url), await world.conductor("c2", redis_url=url)
    pool = await world.pool()
    await world.store(0, 4)
    await until(first.knows("pool-0", 4))
    await until(second.knows("pool-0", 4))
    assert [(await each.state())["pools"]["pool-0"]["joined"] for each in (first, second)] == [True, False]
    await world.store(4, 2)
    await until(second.knows("pool-0", 6))
    await world.end(pool)

    async def forgotten() -> bool:
        return not (await first.state())["pools"] and not (await second.state())["pools"]

    await until(forgotten)


async def test_without_redis_serving_goes_on_and_an_empty_one_gets_all_back(world: World, start_redis: Any) -> None:
    server = start_redis("--requirepass", SECRET)
    url = server.url(SECRET)
    conductor = await world.conductor(redis_url=url)
    await world.pool()
    await world.store(0, 4)

    async def is_ok() -> bool:
        shared = (await conductor.state())["shared_store"]
        return (shared["state"], shared["nodes"]) == ("ok", 1)

    async def is_degraded() -> bool:
        return (await conductor.state())["shared_store"]["state"] == "degraded"

    await until(is_ok)
    server.kill()
    await until(is_degraded)
    state = await conductor.state()
    assert "cannot be reached" in state["shared_store"]["reason"]
    assert SECRET not in json.dumps(state)
    numbers = await conductor.numbers()
    assert numbers["shared_store_up"] == 0
    assert numbers["shared_store_errors_total:unavailable"] >= 1
    await world.store(4, 4)
    await until(conductor.knows("pool-0", 8))
    server.start()
    await until(is_ok)
    store = RedisStore(url, "moonpool")
    try:
        assert {node: record.role for node, record in (await store.nodes()).items()} == {"pool-0": "pool"}
        assert await store.new_epoch(0) == state["incarnation"] + 1
    finally:
        await store.close()
    assert (await conductor.numbers())["shared_store_up"] == 1


async def test_a_redis_that_comes_up_later_is_used_then(world: World, start_redis: Any) -> None:
    server = start_redis()
    server.kill()
    conductor = await world.conductor(redis_url=server.url())
    assert (await conductor.state())["shared_store"]["state"] == "degraded"
    await world.pool()
    await world.store(0, 2)
    await until(conductor.knows("pool-0", 2))
    server.start()

    async def is_ok() -> bool:
        return (await conductor.state())["shared_store"]["state"] == "ok"

    await until(is_ok)


async def test_a_redis_that_becomes_another_clusters_is_left_alone(world: World, start_redis: Any) -> None:
    server = start_redis()
    conductor = await world.conductor(redis_url=server.url())
    server.kill()
    server.start()
    other = RedisStore(server.url(), "green")
    try:
        with contextlib.suppress(SharedStoreRefused):  # the conductor was quicker
            await other.claim()
            await other.put_nodes([NodeRecord("theirs", "pool", "unix:/nowhere", 1, "h", 2)], ttl_s=60)

            async def refused() -> bool:
                return "holds the cluster 'green'" in (await conductor.state())["shared_store"]["reason"]

            await until(refused)
            assert (await conductor.state())["pools"] == {}
    finally:
        await other.close()


@pytest.mark.parametrize(("fields", "said"), [({"password": "x"}, "refuses the login"), ({"name": "green"}, "holds")])
async def test_a_redis_that_can_never_be_ours_ends_the_start(
    world: World, start_redis: Any, fields: dict[str, str], said: str
) -> None:
    server = start_redis("--requirepass", SECRET)
    first = await world.conductor(redis_url=server.url(SECRET))
    url, name = server.url(fields.get("password", SECRET)), fields.get("name", "moonpool")
    with pytest.raises(SharedStoreRefused, match=said):
        await serve_conductor(
            world.conductor_config("c2", redis_url=url, cluster_name=name), asyncio.Event(), lambda target: None
        )
    await world.end(first)


async def test_a_state_folder_that_cannot_be_is_a_clear_error(world: World) -> None:
    (world.folder / "file").write_text("")
    config = world.conductor_config(state_dir=world.folder / "file" / "state")
    with pytest.raises(ConfigError, match=r"state_dir is .*which cannot be used"):
        await serve_conductor(config, asyncio.Event(), lambda target: None)


def test_the_command_ends_with_2_and_names_no_password(start_redis: Any, tmp_path: Path) -> None:
    server = start_redis("--requirepass", "right")
    environment = {**os.environ, "MOONPOOL_REDIS_URL": server.url(SECRET)}
    command = [sys.executable, "-m", "moonpool", "conductor", "--listen", f"unix:{tmp_path}/c.sock"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "refuses the login" in ended.stderr
    assert SECRET not in ended.stderr + ended.stdout
