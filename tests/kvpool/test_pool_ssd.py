"""A pool node with an SSD tier over real sockets and files: loads, prefetches, restarts, events, copies."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import layer_digests
from kvpool.errors import PoolConfigError, PoolRefused, SsdInUse
from kvpool.policy.core import LOAD_AHEAD_NS
from kvpool.ssd.recovery import read_journal
from messenger import MessengerConfig
from settings.keys import assemble

SSD = {"pool_ssd_bytes": 1 << 20}


async def put_on_ssd(worker: Any, client: Any, chain: Any) -> list[np.ndarray]:
    """Store blocks, and let the node empty its memory of them."""
    written: list[np.ndarray] = await worker.put(client, chain)
    flushed = await client.flush(dram_only=True)
    assert (flushed.removed, flushed.kept) == (len(chain), 0)
    return written


async def counter(client: Any, name: str) -> float:
    return float((await client.state())["counters"].get(name, 0))


def same(worker: Any, lease: Any, got: list[np.ndarray], written: list[np.ndarray]) -> bool:
    """Return True if the blocks read under the lease equal those written, by bytes and by digests."""
    full = np.full(lease.num_blocks, worker.spec.block_tokens, np.int32)
    digests = [layer_digests(view, worker.spec, g, full) for g, view in enumerate(got)]
    right = all(np.array_equal(a, b) for a, b in zip(digests, lease.digests, strict=True))
    return right and all(np.array_equal(a, b[: lease.num_blocks]) for a, b in zip(got, written, strict=True))


async def test_a_pin_brings_what_is_on_ssd(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    written = await put_on_ssd(worker, client, chain_of(40))
    assert await client.pin(worker.ns, chain_of(40), lease_s=30) is None
    lease = await client.pin(worker.ns, chain_of(40), lease_s=30, wait_s=60)
    assert (lease.num_blocks, lease.ssd_blocks, lease.spec) == (40, 40, worker.spec)
    assert same(worker, lease, await worker.read(lease), written)
    await client.unpin(lease)
    again = await client.pin(worker.ns, chain_of(40), lease_s=30, wait_s=60)
    assert (again.num_blocks, again.ssd_blocks) == (40, 0)
    await client.unpin(again)


async def test_two_pins_share_one_load(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    await put_on_ssd(worker, client, chain_of(30))
    pins = (client.pin(worker.ns, chain_of(n), lease_s=30, wait_s=60) for n in (20, 30, 30))
    leases = await asyncio.gather(*pins)
    assert [lease.num_blocks for lease in leases] == [20, 30, 30]
    assert await counter(client, "pool_loaded_blocks") == 30
    for lease in leases:
        await client.unpin(lease)


async def test_a_pin_does_not_wait_where_there_is_nothing_to_load(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    await worker.put(client, chain_of(3))
    lease = await client.pin(worker.ns, chain_of(9), lease_s=30, wait_s=3600, deadline_s=30)
    assert lease.num_blocks == 3
    await client.unpin(lease)
    assert await client.pin(worker.ns, chain_of(9, "other"), lease_s=30, wait_s=3600, deadline_s=30) is None
    with pytest.raises(PoolRefused, match="wait_s"):
        await client.pin(worker.ns, chain_of(9), lease_s=30, wait_s=-1)


async def test_a_prefetch_brings_blocks_before_the_pin(start_pool, worker, chain_of, ssd_dir, until) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    written = await put_on_ssd(worker, client, chain_of(12))
    assert await client.prefetch(worker.ns, chain_of(12)) == 12

    async def there() -> bool:
        return await counter(client, "pool_loaded_blocks") == 12

    await until(there)
    assert await client.prefetch(worker.ns, chain_of(12)) == 0
    lease = await client.pin(worker.ns, chain_of(12), lease_s=30)
    assert (lease.num_blocks, lease.ssd_blocks) == (12, 12)
    assert same(worker, lease, await worker.read(lease), written)
    await client.unpin(lease)


async def test_an_announced_return_brings_blocks_without_a_request(
    start_pool, worker, chain_of, ssd_dir, until
) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    await put_on_ssd(worker, client, chain_of(12))
    pause_s = LOAD_AHEAD_NS / 1e9 + 0.05
    assert await client.retain(worker.ns, chain_of(12), tenant="t", lifetime_s=60, pause_s=pause_s)

    async def there() -> bool:
        return await counter(client, "pool_loaded_blocks") == 12

    await until(there)
    with pytest.raises(PoolRefused, match="lifetime_s"):
        await client.retain(worker.ns, chain_of(12), tenant="t", lifetime_s=-1)


async def test_a_run_longer_than_memory_comes_as_far_as_it_fits(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, pool_bytes=64 << 10, **SSD)).target)
    chain = chain_of(120)
    written: list[list[np.ndarray]] = []
    for first in range(0, 120, 40):
        ticket = await client.allocate(
            worker.ns, worker.spec, chain[first : first + 40], parents(chain, first), ttl_s=30
        )
        assert len(ticket.new_blocks) == 40
        written.append(await worker.write(ticket, seed=first))
        await client.seal(ticket, worker.digests(40))
        await client.flush(dram_only=True)
    lease = await client.pin(worker.ns, chain, lease_s=30, wait_s=60)
    assert 40 < lease.num_blocks < 120
    assert same(worker, lease, await worker.read(lease), [np.concatenate(each) for each in zip(*written, strict=True)])
    await client.unpin(lease)


def parents(chain: Any, first: int) -> Any:
    zeros = np.zeros((1, 16), np.uint8)
    return np.concatenate([zeros, chain])[first : first + 40]


async def test_what_would_leave_memory_next_is_written_without_being_asked_for(
    start_pool, worker, chain_of, ssd_dir, until
) -> None:
    """A working set twice as large as memory ends up on SSD, and is all there."""
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, pool_bytes=64 << 10, **SSD)).target)
    written = []
    for i in range(6):
        written.append(await worker.put(client, chain_of(20, f"prompt {i}")))

        async def kept(expected: int = 20 * (i + 1) if i else 0) -> bool:
            return await counter(client, "pool_written_blocks") >= expected

        await until(kept)
    assert (await client.state())["ssd"]["state"] == "ok"
    for i in range(6):
        lease = await client.pin(worker.ns, chain_of(20, f"prompt {i}"), lease_s=30, wait_s=60)
        assert (lease.num_blocks, lease.ssd_blocks) == (20, 20)
        assert same(worker, lease, await worker.read(lease), written[i])
        await client.unpin(lease)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restarted_node_finds_its_blocks_again(
    start_process, tmp_path, worker, chain_of, ssd_dir, follow, until, number: int
) -> None:
    listen, args = f"unix:{tmp_path}/p.sock", (str(ssd_dir), str(1 << 20))
    client = worker.client(listen)
    process = await start_process(listen, *args)
    follower = follow(listen)
    written = await put_on_ssd(worker, client, chain_of(20))
    await until(follower.holds(worker.ns, chain_of(20), 20, ssd=20))
    await worker.put(client, chain_of(5, "in memory alone"))
    is_killed = number == signal.SIGKILL
    assert await process.end(number) == (-signal.SIGKILL if is_killed else 0)
    process = await start_process(listen, *args)
    await until(follower.holds(worker.ns, chain_of(20), 20, ssd=20))
    lease = await client.pin(worker.ns, chain_of(20), lease_s=30, wait_s=60)
    assert (lease.num_blocks, lease.ssd_blocks) == (20, 20)
    assert same(worker, lease, await worker.read(lease), written)
    await client.unpin(lease)
    await until(follower.holds(worker.ns, chain_of(20), 20))
    kept = 0 if is_killed else 5
    await until(follower.holds(worker.ns, chain_of(5, "in memory alone"), kept, ssd=kept))

    async def is_at_rest() -> bool:
        return (await client.validate())["problems"] == []

    await until(is_at_rest)
    assert await process.end(signal.SIGTERM) == 0


async def test_a_node_killed_while_it_writes_gives_nothing_wrong_afterwards(
    start_process, tmp_path, worker, chain_of, ssd_dir
) -> None:
    listen, args = f"unix:{tmp_path}/p.sock", (str(ssd_dir), str(4 << 20))
    client = worker.client(listen)
    written = {}
    for life in range(2):
        process = await start_process(listen, *args)
        for i in range(12):
            name = f"{life} {i}"
            written[name] = await worker.put(client, chain_of(100, name), seed=100 * life + i)
        await process.end(signal.SIGKILL)
    await start_process(listen, *args)
    progress = [done async for done in client.verify()]
    assert (progress[-1].checked, progress[-1].corrupt) == (progress[-1].total, 0)
    found = 0
    for name in written:
        lease = await client.pin(worker.ns, chain_of(100, name), lease_s=30, wait_s=60)
        if lease is not None:
            found += lease.num_blocks
            assert same(worker, lease, await worker.read(lease), written[name])
            await client.unpin(lease)
    assert found == progress[-1].total > 0
    assert (await client.validate())["ok"]


async def test_what_was_quarantined_at_rest_is_not_brought_back_by_a_crash(
    start_pool, worker, chain_of, ssd_dir, until
) -> None:
    client, chain = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target), chain_of(3)
    await put_on_ssd(worker, client, chain)
    (journal,) = ssd_dir.rglob("journal")
    assert len(read_journal(journal).extents) == 3
    await client.quarantine(worker.ns, chain[2:])

    async def is_durable() -> bool:
        return [extent.entry.chain_key for extent in read_journal(journal).extents] == [bytes(key) for key in chain[:2]]

    await until(is_durable)


async def test_a_directory_is_told_of_tiers(start_pool, worker, chain_of, ssd_dir, follow, until) -> None:
    pool = await start_pool(pool_ssd_dir=ssd_dir, **SSD)
    client, chain = worker.client(pool.target), chain_of(10)
    follower = follow(pool.target)
    await worker.put(client, chain)
    await until(follower.holds(worker.ns, chain, 10))
    await client.flush(dram_only=True)
    await until(follower.holds(worker.ns, chain, 10, ssd=10))
    await client.prefetch(worker.ns, chain[:4])
    await until(follower.holds(worker.ns, chain, 10, ssd=6))
    assert (await client.flush()).removed == 10
    await until(follower.holds(worker.ns, chain, 0))
    assert follower.snapshots == 1


async def test_a_copy_takes_what_the_source_has_on_ssd(start_pool, worker, chain_of, ssd_dir) -> None:
    source, target = await start_pool("source", pool_ssd_dir=ssd_dir, **SSD), await start_pool("target")
    written = await put_on_ssd(worker, worker.client(source.target), chain_of(8))
    client = worker.client(target.target)
    assert await client.copy(worker.ns, chain_of(8), source.target, 60) == (8, 8 * worker.spec.block_nbytes)
    lease = await client.pin(worker.ns, chain_of(8), lease_s=30)
    assert same(worker, lease, await worker.read(lease), written)
    await client.unpin(lease)
    counters = (await client.state())["counters"]
    assert (counters["pool_copied_blocks"], counters["pool_copied_bytes"]) == (8, 8 * worker.spec.block_nbytes)


async def test_tiers_are_numbers_for_people(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    assert (await client.describe()).ssd_bytes == 1 << 20
    await put_on_ssd(worker, client, chain_of(10))
    await worker.put(client, chain_of(4, "other"))
    state = await client.state()
    assert state["tiers"]["dram"]["blocks"] == 4
    assert state["tiers"]["ssd"]["blocks"] == 10
    assert state["tiers"]["ssd"]["capacity_bytes"] == 1 << 20
    assert state["counters"]["pool_written_bytes"] == 10 * worker.spec.block_nbytes
    assert state["counters"]["pool_write_seconds"] > 0
    assert (await client.validate())["ok"]


@pytest.mark.parametrize("where", ["missing", "a file", "in memory"])
async def test_a_folder_that_cannot_hold_the_tier_is_named(start_pool, tmp_path: Path, where: str) -> None:
    (tmp_path / "a file").write_text("")
    folder = Path("/dev/shm") if where == "in memory" else tmp_path / where
    with pytest.raises(PoolConfigError, match=str(folder)):
        await start_pool(pool_ssd_dir=folder, **SSD)
    assert not (folder / "pool").exists()


async def test_a_folder_in_use_is_named(start_pool, ssd_dir) -> None:
    await start_pool(pool_ssd_dir=ssd_dir, **SSD)
    tcp = assemble(MessengerConfig, transport="tcp")
    with pytest.raises(SsdInUse, match=str(ssd_dir / "pool")):
        await start_pool(listen="127.0.0.1:0", messenger=tcp, pool_ssd_dir=ssd_dir, **SSD)
