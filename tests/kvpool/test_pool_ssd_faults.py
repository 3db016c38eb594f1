"""A pool node whose SSD or memory fails: nothing wrong is served, the trouble is counted, and it goes on."""

import asyncio
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.ssd import SsdStore

SSD = {"pool_ssd_bytes": 1 << 20}


async def counter(client: Any, name: str) -> float:
    return float((await client.state())["counters"].get(name, 0))


async def put_on_ssd(worker: Any, client: Any, chain: Any) -> list[np.ndarray]:
    written: list[np.ndarray] = await worker.put(client, chain)
    assert (await client.flush(dram_only=True)).removed == len(chain)
    return written


def find(folder: Path, data: bytes) -> tuple[Path, int]:
    """The file below `folder` that holds these bytes, and where."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and (at := path.read_bytes().find(data)) >= 0:
            return path, at
    raise AssertionError("the bytes are in no file")


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))
        os.fsync(file.fileno())


async def serves(worker: Any, client: Any, chain: Any) -> bool:
    """Return True if new blocks can be put and read back unchanged."""
    written = await worker.put(client, chain, seed=7)
    lease = await client.pin(worker.ns, chain, lease_s=30)
    got = await worker.read(lease)
    await client.unpin(lease)
    return all(np.array_equal(a, b) for a, b in zip(got, written, strict=True))


async def test_a_flipped_bit_on_the_ssd_is_never_served(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    written = await put_on_ssd(worker, client, chain_of(10))
    flip(*find(ssd_dir, written[0][6].tobytes()))
    lease = await client.pin(worker.ns, chain_of(10), lease_s=30, wait_s=60)
    assert lease.num_blocks == 6
    got = await worker.read(lease)
    assert all(np.array_equal(a, b[:6]) for a, b in zip(got, written, strict=True))
    await client.unpin(lease)
    assert await counter(client, "pool_ssd_corrupt_blocks") == 1
    assert await counter(client, "pool_quarantined_blocks") == 1
    assert await serves(worker, client, chain_of(10, "other"))
    ticket = await worker.allocate(client, chain_of(7))
    assert ticket.new_blocks == [6]
    await client.abort_put(ticket)


async def test_a_flipped_bit_in_memory_is_not_written_to_the_ssd(
    pool_nodes, start_pool, worker, chain_of, ssd_dir
) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    await worker.put(client, chain_of(5))
    lease = await client.pin(worker.ns, chain_of(5), lease_s=30)
    pool_nodes[0].memory.array[lease.offsets[1, 2] + 3] ^= 16
    await client.unpin(lease)
    await client.flush(dram_only=True)
    assert await counter(client, "pool_dram_corrupt_blocks") == 1
    assert await counter(client, "pool_written_blocks") == 4
    lease = await client.pin(worker.ns, chain_of(5), lease_s=30, wait_s=60)
    assert lease.num_blocks == 2
    await client.unpin(lease)


async def test_verify_finds_what_is_corrupt_in_either_tier(pool_nodes, start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    written = await put_on_ssd(worker, client, chain_of(20))
    await worker.put(client, chain_of(9, "other"))
    whole = [done async for done in client.verify()]
    assert (whole[-1].checked, whole[-1].total, whole[-1].corrupt) == (29, 29, 0)
    lease = await client.pin(worker.ns, chain_of(9, "other"), lease_s=30)
    pool_nodes[0].memory.array[lease.offsets[0, 8] + 1] ^= 1
    await client.unpin(lease)
    flip(*find(ssd_dir, written[1][19].tobytes()))
    found = [done async for done in client.verify(worker.ns)]
    assert (found[-1].checked, found[-1].corrupt) == (29, 2)
    after = [done async for done in client.verify()]
    assert (after[-1].checked, after[-1].total, after[-1].corrupt) == (27, 27, 0)
    assert [done.total async for done in client.verify(bytes(16))] == [0]


async def test_a_block_that_cannot_be_read_is_given_up_and_the_others_serve(
    start_pool, worker, chain_of, ssd_dir
) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    written = await put_on_ssd(worker, client, chain_of(10))
    path, at = find(ssd_dir, written[0][4].tobytes())
    os.truncate(path, at // 4096 * 4096)
    lease = await client.pin(worker.ns, chain_of(10), lease_s=30, wait_s=60)
    assert lease.num_blocks <= 4
    got = await worker.read(lease)
    assert all(np.array_equal(a, b[: lease.num_blocks]) for a, b in zip(got, written, strict=True))
    await client.unpin(lease)
    assert await counter(client, "pool_ssd_read_errors") + await counter(client, "pool_ssd_corrupt_blocks") > 0
    assert await serves(worker, client, chain_of(10, "other"))


async def test_an_ssd_that_cannot_be_read_is_left_alone_and_its_blocks_are_put_anew(
    pool_nodes, start_pool, worker, chain_of, ssd_dir
) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    chains = [chain_of(2, f"prompt {i}") for i in range(5)]
    for chain in chains:
        await put_on_ssd(worker, client, chain)
    (segment,) = ssd_dir.rglob("segment-*")
    os.truncate(segment, 0)
    for chain in chains[:3]:
        assert await client.pin(worker.ns, chain, lease_s=30, wait_s=60) is None
    state = await client.state()
    assert state["ssd"]["state"] == "failed"
    assert state["counters"]["pool_ssd_read_errors"] > 0
    assert await serves(worker, client, chains[4])
    assert await serves(worker, client, chain_of(5, "other"))


async def test_writes_that_fail_leave_a_node_that_serves_and_writes_again_when_they_succeed(
    start_process, tmp_path, worker, chain_of, ssd_dir, until
) -> None:
    listen = f"unix:{tmp_path}/p.sock"
    process = await start_process(listen, str(ssd_dir), str(1 << 20))
    client = worker.client(listen)
    await put_on_ssd(worker, client, chain_of(4))
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
    await worker.put(client, chain_of(6, "cannot be written"))
    flushed = await client.flush(dram_only=True)
    assert (flushed.removed, flushed.kept) == (0, 6)
    state = await client.state()
    assert state["ssd"]["state"] == "read_only"
    assert sum(n for name, n in state["counters"].items() if name in ("pool_ssd_write_errors", "pool_ssd_full_errors"))
    assert await serves(worker, client, chain_of(5, "served"))
    lease = await client.pin(worker.ns, chain_of(4), lease_s=30, wait_s=60)
    assert lease.num_blocks == 4
    await client.unpin(lease)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))

    async def writes_again() -> bool:
        await client.flush(dram_only=True)
        return (await client.state())["ssd"]["state"] == "ok"

    await until(writes_again, 60)
    assert (await client.validate())["ok"]


def gated(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[threading.Event]:
    """Calls of the SSD store return only once the event is set: no real disk can be made to answer late."""
    gate = threading.Event()
    call = getattr(SsdStore, name)

    def call_late(self: SsdStore, batch: Any) -> Any:
        gate.wait()
        return call(self, batch)

    monkeypatch.setattr(SsdStore, name, call_late)
    yield gate
    gate.set()


@pytest.fixture
def slow_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    yield from gated(monkeypatch, "read")


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    yield from gated(monkeypatch, "write")


async def test_a_slow_disk_delays_no_put_and_no_reader(start_pool, worker, chain_of, ssd_dir, slow_writes) -> None:
    """Far more goes through memory than it holds, while nothing can be written: it is lost, and nobody waits."""
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, pool_bytes=64 << 10, **SSD)).target)
    for i in range(12):
        assert await serves(worker, client, chain_of(10, f"prompt {i}"))
    assert await counter(client, "pool_written_blocks") == 0
    assert (await client.validate())["ok"]
    slow_writes.set()
    assert (await client.flush(dram_only=True)).kept == 0


async def test_of_a_damaged_journal_what_can_be_trusted_is_kept(
    start_pool, worker, chain_of, ssd_dir, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await start_pool(pool_ssd_dir=ssd_dir, **SSD)
    client = worker.client(pool.target)
    written = await put_on_ssd(worker, client, chain_of(10))
    await put_on_ssd(worker, client, chain_of(10, "later"))
    await pool.end()
    journal = ssd_dir / "pool" / "journal"
    flip(journal, find(journal.parent, bytes(chain_of(10, "later")[4]))[1])
    again = await start_pool(pool_ssd_dir=ssd_dir, **SSD)
    client = worker.client(again.target)
    assert "was damaged" in caplog.text
    lease = await client.pin(worker.ns, chain_of(10), lease_s=30, wait_s=60)
    assert lease.num_blocks == 10
    assert all(np.array_equal(a, b) for a, b in zip(await worker.read(lease), written, strict=True))
    await client.unpin(lease)
    assert await client.pin(worker.ns, chain_of(10, "later"), lease_s=30, wait_s=60) is None
    assert await serves(worker, client, chain_of(10, "later"))


async def test_a_pin_takes_what_is_there_when_a_slow_disk_uses_up_its_time(
    start_pool, worker, chain_of, ssd_dir, slow_reads
) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    written = await put_on_ssd(worker, client, chain_of(12))
    assert await client.pin(worker.ns, chain_of(12), lease_s=30, wait_s=0.2) is None
    assert await counter(client, "pool_load_timeouts") == 1
    assert await serves(worker, client, chain_of(10, "meanwhile"))
    waiting = asyncio.create_task(client.pin(worker.ns, chain_of(12), lease_s=30, wait_s=60))
    cancelled = asyncio.create_task(client.pin(worker.ns, chain_of(12), lease_s=30, wait_s=60))
    await asyncio.sleep(0)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert not (await client.validate())["ok"]
    slow_reads.set()
    lease = await waiting
    assert lease.num_blocks == 12
    assert all(np.array_equal(a, b) for a, b in zip(await worker.read(lease), written, strict=True))
    await client.unpin(lease)
    assert await counter(client, "pool_loaded_blocks") == 12
    assert (await client.validate())["ok"]


async def test_what_somebody_waits_for_goes_before_what_is_prefetched(
    pool_nodes, start_pool, worker, chain_of, ssd_dir, slow_reads, until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.ssd_tier._LOAD_BATCH_NBYTES", 2 * 4096)
    order: list[bytes] = []
    read = SsdStore.read

    def noted(self: SsdStore, reads: Any) -> Any:
        order.extend(each.chain_key for each in reads)
        return read(self, reads)

    monkeypatch.setattr(SsdStore, "read", noted)
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **SSD)).target)
    ahead, waited = [chain_of(20, name) for name in ("prefetched", "prefetched first")], chain_of(4, "pinned")
    for chain in (*ahead, waited):
        await put_on_ssd(worker, client, chain)
    for chain in ahead:
        assert await client.prefetch(worker.ns, chain) == 20
    pins = [asyncio.create_task(client.pin(worker.ns, chain, lease_s=30, wait_s=60)) for chain in (waited, ahead[1])]

    async def both_wait() -> bool:
        return len(pool_nodes[0].ssd.loader._urgent) == 24

    await until(both_wait)
    slow_reads.set()
    for lease in await asyncio.gather(*pins):
        await client.unpin(lease)
    keys = {bytes(key) for chain in (waited, ahead[1]) for key in chain}
    assert set(order[4:28]) == keys

    async def at_rest() -> bool:
        return not (await client.state())["counts"]["loads"]

    await until(at_rest)


async def test_a_node_with_a_slow_disk_can_be_stopped(start_pool, worker, chain_of, ssd_dir, slow_reads) -> None:
    pool = await start_pool(pool_ssd_dir=ssd_dir, **SSD)
    client = worker.client(pool.target)
    await put_on_ssd(worker, client, chain_of(3))
    assert await client.prefetch(worker.ns, chain_of(3)) == 3
    pool.stop.set()
    asyncio.get_running_loop().call_later(0.3, slow_reads.set)
    await asyncio.wait_for(pool.task, 30)
