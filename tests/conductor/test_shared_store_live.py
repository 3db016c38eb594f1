"""Conductors that restart, that are several, and that lose Redis: real pool nodes, real Redis, real files."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conductor.errors import ConductorConfigError, SharedStoreRefused
from conductor.server import serve_conductor
from conductor.shared_store import NodeRecord, RedisStore
from conductor.shared_store.snapshots import FILE_NAME
from moonpool_proto.v1 import conductor_pb2
from tests.conductor.world import World, until

SECRET = "s3cret-word"


async def snapshot_of(world: World, blocks: int) -> None:
    """Wait until the file holds this many blocks."""

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
        (lambda data: data[:-30] + bytes(30), "damaged or truncated"),
        (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "damaged or truncated"),
        (lambda data: data[: len(data) // 2], "damaged or truncated"),
        (lambda data: b"", "damaged or truncated"),
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
    async with asyncio.timeout(60):  # the files are read after the first answers
        while "belongs to the cluster 'moonpool', not 'green'" not in caplog.text:
            await asyncio.sleep(0.02)


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
                return "belongs to the cluster 'green'" in (await conductor.state())["shared_store"]["reason"]

            await until(refused)
            assert (await conductor.state())["pools"] == {}
    finally:
        await other.close()


@pytest.mark.parametrize(
    ("fields", "said"), [({"password": "x"}, "rejects the login"), ({"name": "green"}, "belongs to")]
)
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
    with pytest.raises(ConductorConfigError, match=r"state_dir .*cannot be used"):
        await serve_conductor(config, asyncio.Event(), lambda target: None)


def test_the_command_ends_with_2_and_names_no_password(start_redis: Any, tmp_path: Path) -> None:
    server = start_redis("--requirepass", "right")
    environment = {**os.environ, "MOONPOOL_REDIS_URL": server.url(SECRET)}
    command = [sys.executable, "-m", "moonpool", "conductor", "--listen", f"unix:{tmp_path}/c.sock"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "rejects the login" in ended.stderr
    assert SECRET not in ended.stderr + ended.stdout
