"""State that conductors share, against real Redis servers: records, epochs, and every failure of Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis

from conductor.config import ConductorConfig
from conductor.directory import Directory
from conductor.directory.feeds import POOL_NODES, DirectoryUpdater
from conductor.directory.table import Replicas
from conductor.errors import ConductorConfigError, SharedStoreRefused, SharedStoreUnavailable
from conductor.persistence import Persistence, SharedStoreConnection, connect_shared_store
from conductor.redis_url import redacted
from conductor.registry import Registry
from conductor.shared_store import NodeRecord, RedisStore, SnapshotPointer
from conductor.shared_store.snapshots import FILE_NAME, SnapshotFacts, Snapshots, SnapshotWriter
from settings.keys import assemble

SECRET = "s3cret-word"
POOL = NodeRecord("pool-0", "pool", "unix:/p.sock", 7, "host", 1)


@pytest.fixture
async def open_store() -> AsyncIterator[Callable[..., RedisStore]]:
    opened: list[RedisStore] = []

    def make(url: str, cluster: str = "blue") -> RedisStore:
        opened.append(RedisStore(url, cluster, deadline_s=20))
        return opened[-1]

    yield make
    for store in opened:
        await store.close()


@pytest.fixture
async def admin() -> AsyncIterator[Callable[[Any], Redis]]:
    opened: list[Redis] = []

    def connect(server: Any) -> Redis:
        opened.append(Redis.from_url(server.url(), protocol=2))
        return opened[-1]

    yield connect
    for connection in opened:
        await connection.aclose()


async def test_records_are_read_back_and_expire_unless_refreshed(start_redis, open_store) -> None:
    store = open_store(start_redis().url())
    await store.claim()
    await store.put_nodes([POOL], ttl_s=60)
    await store.put_nodes([NodeRecord("gone", "pool", "t", 1, "h", 1)], ttl_s=0.05)
    async with asyncio.timeout(30):
        while "gone" in await store.nodes():
            await asyncio.sleep(0.02)
    assert await store.nodes() == {"pool-0": POOL}
    await store.forget_nodes(["pool-0"])
    assert await store.nodes() == {}


async def test_epochs_only_rise_also_after_redis_has_lost_them(start_redis, open_store) -> None:
    store = open_store(start_redis().url())
    assert [await store.new_epoch(at_least) for at_least in (10, 10, 5, 50)] == [10, 11, 12, 50]
    await store.raise_epoch(20)
    assert await store.new_epoch(0) == 51
    micros = 1_800_000_000_123_457
    await store.raise_epoch(micros)
    assert await store.new_epoch(0) == micros + 1


async def test_a_pointer_is_read_back(start_redis, open_store) -> None:
    store = open_store(start_redis().url())
    pointer = SnapshotPointer("/state/directory.snapshot", "host", 12.5, {"pool-0": (7, 9)})
    await store.put_snapshot(SnapshotPointer(pointer.path, "host", 1.0, {}))
    await store.put_snapshot(pointer)
    assert await store.snapshots() == [pointer]


@pytest.mark.parametrize("password", ["wrong" + SECRET, ""])
async def test_a_wrong_or_missing_password_is_refused_and_not_repeated(start_redis, open_store, password) -> None:
    store = open_store(start_redis("--requirepass", SECRET).url(password))
    with pytest.raises(SharedStoreRefused, match="check user and password") as caught:
        await store.claim()
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_another_clusters_database_is_refused_and_another_database_of_it_is_not(start_redis, open_store) -> None:
    server = start_redis()
    await open_store(server.url()).claim()
    with pytest.raises(SharedStoreRefused, match="belongs to the cluster 'blue', but this one is 'green'"):
        await open_store(server.url(), "green").claim()
    await open_store(server.url(db=1), "green").claim()


async def test_another_format_is_refused(start_redis, open_store, admin) -> None:
    server = start_redis()
    await admin(server).hset("moonpool:cluster", mapping={"name": "blue", "format": "999"})
    with pytest.raises(SharedStoreRefused, match="format 999, but this version supports 1"):
        await open_store(server.url()).claim()


@pytest.mark.parametrize("key", ["moonpool:cluster", "moonpool:snapshots"])
async def test_foreign_data_under_our_names_is_refused(start_redis, open_store, admin, key) -> None:
    server = start_redis()
    await admin(server).set(key, b"\xff\xfe")
    store = open_store(server.url())

    async def look() -> None:
        await store.claim()
        await store.snapshots()

    with pytest.raises(SharedStoreRefused, match="has foreign data"):
        await look()


@pytest.mark.parametrize(
    "text",
    [
        '{"node_id": "x"}',
        '{"node_id": null, "role": "pool", "target": "t", "incarnation": 1, "host_id": "h", "conductor": 2}',
        '{"node_id": ["x"], "role": "pool", "target": "t", "incarnation": 1, "host_id": "h", "conductor": 2}',
    ],
)
async def test_a_record_that_cannot_be_read_is_refused(start_redis, open_store, admin, text) -> None:
    server = start_redis()
    await admin(server).set("moonpool:node:x", text)
    with pytest.raises(SharedStoreRefused, match="record is invalid"):
        await open_store(server.url()).nodes()


async def test_a_read_only_replica_is_of_no_use_now(start_redis, open_store, admin) -> None:
    server = start_redis()
    await admin(server).execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(SharedStoreUnavailable, match="read-only replica; set redis_url to the primary"):
        await open_store(server.url()).claim()


async def test_a_full_redis_is_of_no_use_now(start_redis, open_store, admin) -> None:
    server = start_redis()
    store = open_store(server.url())
    await store.claim()
    await admin(server).config_set("maxmemory", "1")
    with pytest.raises(SharedStoreUnavailable, match="out of memory"):
        await store.put_nodes([POOL], ttl_s=60)


async def test_a_redis_that_is_not_there_is_of_no_use_now_and_may_come_back(start_redis, open_store) -> None:
    server = start_redis()
    store = open_store(server.url())
    await store.claim()
    server.kill()
    with pytest.raises(SharedStoreUnavailable, match="cannot be reached"):
        await store.claim()
    server.start()
    await store.claim()


async def test_a_redis_that_hangs_is_given_up_after_a_deadline(start_redis) -> None:
    server = start_redis()
    store = RedisStore(server.url(), "blue", deadline_s=0.3)
    await store.claim()
    server.pause()
    try:
        with pytest.raises(SharedStoreUnavailable, match="does not answer in time"):
            await store.claim()
    finally:
        server.resume()
        await store.close()


@pytest.mark.parametrize(
    "url", ["http://h", "redis://", "unix://", "redis://:" + SECRET + "@h:port", "redis://:" + SECRET + "@[h", "h:6379"]
)
def test_a_url_that_cannot_be_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConductorConfigError, match="redis_url") as caught:
        assemble(ConductorConfig, listen="x", redis_url=url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:" + SECRET + "@h:6379/1", "redis://user:***@h:6379/1"),
        ("rediss://h/2?password=" + SECRET, "rediss://h/2"),
        ("unix://:" + SECRET + "@/run/redis.sock?db=3", "unix://:***@/run/redis.sock"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redacted(url) == shown
    assert SECRET not in repr(assemble(ConductorConfig, listen="x", redis_url=url))


async def test_a_conductor_that_shares_nothing_reports_no_trouble(caplog: pytest.LogCaptureFixture) -> None:
    following = DirectoryUpdater(POOL_NODES)
    config = assemble(ConductorConfig, listen="unix:/nowhere", shared_ttl_s=0.01)
    persistence = Persistence(config, SharedStoreConnection(None, incarnation=1), following, Registry())
    persistence.start()
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "persistence")
    await asyncio.wait([task], timeout=30)
    assert task.done()
    await asyncio.sleep(0)  # its callbacks
    assert [record.getMessage() for record in caplog.records] == []
    await persistence.close()
    await following.close()


def test_what_a_killed_writer_of_a_snapshot_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    with SnapshotWriter(tmp_path / FILE_NAME) as writer:
        writer.add(Replicas(np.zeros(100, np.uint64), np.zeros(100, np.uint32)))
        assert len(list(tmp_path.iterdir())) == 1
        Snapshots(tmp_path, "blue", Directory())
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(OSError, match="No such file"):
            writer.finish(SnapshotFacts("blue", 0.0, (), {}))


async def test_a_call_to_redis_that_swallows_a_cancellation_holds_up_no_stop(
    start_redis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    asked = asyncio.Event()

    async def swallows(self: RedisStore) -> dict[str, NodeRecord]:
        nonlocal calls
        calls += 1
        asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return {}

    monkeypatch.setattr(RedisStore, "nodes", swallows)
    following = DirectoryUpdater(POOL_NODES)
    config = assemble(ConductorConfig, listen="unix:/nowhere", redis_url=start_redis().url(), shared_refresh_s=0.01)
    contact = await connect_shared_store(config)
    persistence = Persistence(config, contact, following, Registry())
    persistence.start()
    await asyncio.wait_for(asked.wait(), 30)
    await asyncio.wait_for(persistence.close(), 30)
    assert calls == 1
    await following.close()
    await contact.close()
