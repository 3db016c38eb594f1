"""A pool node that compresses its SSD tier: blocks are read back unchanged with either setting, or found damaged."""

import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec
from kvpool.policy.compression import CompressionPolicy, Storage
from kvpool.ssd import SsdStore
from kvpool.ssd_compression import SsdCompression
from kvpool.verified_io import ReadTimes

SSD = {"pool_ssd_bytes": 1 << 20}
AUTO = {**SSD, "pool_ssd_compression": "auto"}
MIB = 1 << 20


@pytest.fixture(scope="session")
def spec() -> KvSpec:
    """Blocks of 20 KiB in two groups."""
    full = KvGroup("full", 0, (0, 2), kv_heads=4, head_dim=64, dtype="bfloat16")
    return KvSpec((full, KvGroup("window", 6, (1,), kv_heads=4, head_dim=32, dtype="float32")), 8)


@pytest.fixture
def worker(start_worker: Any) -> Any:
    """A worker whose KV can be compressed."""
    started = start_worker()
    started.byte_values = 16
    return started


@pytest.fixture
def always_coded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block is coded, whatever was measured."""
    monkeypatch.setattr(CompressionPolicy, "choose", lambda self, kv_namespace: Storage.CODED)


async def counters(client: Any) -> dict[str, float]:
    return defaultdict(float, (await client.state())["counters"])


async def put_on_ssd(worker: Any, client: Any, chain: Any) -> Any:
    written = await worker.put(client, chain)
    assert (await client.flush(dram_only=True)).removed == len(chain)
    return written


async def loads(worker: Any, client: Any, chain: Any, written: Any) -> int:
    """Number of blocks that are loaded from SSD; they must be as they were written."""
    lease = await client.pin(worker.ns, chain, lease_s=30, wait_s=60)
    got = await worker.read(lease)
    await client.unpin(lease)
    assert all(np.array_equal(a, b[: lease.num_blocks]) for a, b in zip(got, written, strict=True))
    return int(lease.ssd_blocks)


@pytest.mark.usefixtures("always_coded")
async def test_coded_blocks_are_loaded_unchanged_by_this_run_and_by_later_ones_of_either_setting(
    start_pool, worker, chain_of, ssd_dir
) -> None:
    pool = await start_pool(pool_ssd_dir=ssd_dir, **AUTO)
    client = worker.client(pool.target)
    written = await put_on_ssd(worker, client, chain_of(12))
    seen = await counters(client)
    assert seen["pool_ssd_coded_blocks"] == 12
    assert seen["pool_ssd_coded_plain_bytes"] == 12 * worker.spec.block_nbytes
    assert 0.4 < seen["pool_ssd_coded_bytes"] / seen["pool_ssd_coded_plain_bytes"] < 0.6
    assert await loads(worker, client, chain_of(12), written) == 12
    assert (await counters(client))["pool_ssd_decoded_bytes"] == 12 * worker.spec.block_nbytes
    for setting in (SSD, AUTO):
        await pool.end()
        pool = await start_pool(pool_ssd_dir=ssd_dir, **setting)
        client = worker.client(pool.target)
        assert await loads(worker, client, chain_of(12), written) == 12
        assert [each async for each in client.verify()][-1].corrupt == 0


async def test_a_folder_of_plain_blocks_is_read_with_compression(start_pool, worker, chain_of, ssd_dir) -> None:
    pool = await start_pool(pool_ssd_dir=ssd_dir, **SSD)
    written = await put_on_ssd(worker, worker.client(pool.target), chain_of(12))
    await pool.end()
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **AUTO)).target)
    assert await loads(worker, client, chain_of(12), written) == 12


@pytest.mark.usefixtures("always_coded")
async def test_blocks_that_coding_does_not_shorten_are_stored_plain(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **AUTO)).target)
    worker.byte_values = 256
    written = await put_on_ssd(worker, client, chain_of(6))
    assert await loads(worker, client, chain_of(6), written) == 6
    seen = await counters(client)
    assert (seen["pool_ssd_coded_blocks"], seen["pool_ssd_trial_blocks"]) == (0, 6)


def find(store: SsdStore, folder: Path, number: int) -> tuple[Path, int]:
    """The file and position of the store's block with this number, in the order of writing."""
    extent = list(store._commits.extents)[number]
    size = store.config.segment_nbytes
    return folder / f"segment-{extent.start // size:05}", extent.start % size + extent.entry.coded_nbytes // 2


@pytest.mark.usefixtures("always_coded")
@pytest.mark.parametrize("damage", ["flipped bit", "torn write"])
async def test_a_damaged_coded_block_is_never_served_and_is_counted(
    pool_nodes, start_pool, worker, chain_of, ssd_dir, damage: str
) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **AUTO)).target)
    written = await put_on_ssd(worker, client, chain_of(10))
    path, at = find(pool_nodes[0].ssd.store, ssd_dir / "pool", 6)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]) if damage == "flipped bit" else bytes(4096 - at % 4096))
        os.fsync(file.fileno())
    assert await loads(worker, client, chain_of(10), written) == 6
    seen = await counters(client)
    assert (seen["pool_ssd_corrupt_blocks"], seen["pool_quarantined_blocks"]) == (1, 1)
    ticket = await worker.allocate(client, chain_of(7))
    assert ticket.new_blocks == [6]
    await client.abort_put(ticket)


@pytest.mark.usefixtures("always_coded")
async def test_what_was_coded_wrongly_does_not_pass_verification(
    start_pool, worker, chain_of, ssd_dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SSD's checksum is right, but the decoded bytes are not those of the digests."""

    def encode_another(slots: Any, spec: KvSpec) -> Any:
        changed = [slot.copy() for slot in slots]
        changed[1][3] ^= 1
        return encode(changed, spec)

    from kvpool import verified_io

    encode = verified_io.encode_block
    monkeypatch.setattr(verified_io, "encode_block", encode_another)
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, **AUTO)).target)
    await put_on_ssd(worker, client, chain_of(3))
    assert await client.pin(worker.ns, chain_of(3), lease_s=30, wait_s=60) is None
    assert (await counters(client))["pool_ssd_corrupt_blocks"] == 3


def test_only_reads_that_measure_bandwidth_count_and_overlapping_ones_count_once() -> None:
    compression = SsdCompression(defaultdict(float), auto=True)
    compression.was_read(ReadTimes(MIB - 1, 0.0, 100.0))
    assert compression.describe()["read_bytes_per_s"] is None
    compression.was_read(ReadTimes(MIB, 100.0, 101.0))
    compression.was_read(ReadTimes(MIB, 100.0, 102.0))
    assert compression.describe()["read_bytes_per_s"] == pytest.approx(MIB)


async def test_the_state_shows_what_was_measured(start_pool, worker, chain_of, ssd_dir, until) -> None:
    pool = await start_pool(
        pool_bytes=32 * MIB, pool_ssd_dir=ssd_dir, pool_ssd_bytes=8 * MIB, pool_ssd_compression="auto"
    )
    client, chain = worker.client(pool.target), chain_of(40)
    await worker.put(client, chain)
    await worker.put(client, chain_of(40, "other"))
    await client.flush(dram_only=True)

    async def measured() -> bool:
        state = (await client.state())["ssd"]["compression"]
        return state["setting"] == "auto" and bool(state["read_bytes_per_s"]) and bool(state["namespaces"])

    await until(measured)
    ((_, found),) = (await client.state())["ssd"]["compression"]["namespaces"].items()
    assert 0.4 < found["ratio"] < 0.6
