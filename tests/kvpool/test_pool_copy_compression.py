"""Compressed copies between pool nodes: bit-equal, verified, chosen for slow links, and plain from older releases."""

from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec, coded_copies
from kvpool.copy_compression import CopyCompression, try_codec
from kvpool.errors import PoolRefused
from kvpool.policy.compression import Storage
from kvpool.service import PoolService
from moonpool_proto.v1 import pool_pb2_grpc

MIB = 1 << 20
NS = b"n" * 16


@pytest.fixture(scope="session")
def spec() -> KvSpec:
    full = KvGroup("full", 0, (0, 2), kv_heads=4, head_dim=64, dtype="bfloat16")
    return KvSpec((full, KvGroup("window", 6, (1,), kv_heads=4, head_dim=32, dtype="float32")), 8)


@pytest.fixture
def worker(start_worker: Any) -> Any:
    """A worker whose KV can be compressed."""
    started = start_worker()
    started.byte_values = 16
    return started


@pytest.fixture
def always_coded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every copy is compressed, except from sources that refuse, which are in the list."""
    refusing: list[str] = []
    monkeypatch.setattr(
        CopyCompression,
        "choose",
        lambda self, source, *_: Storage.PLAIN if source in refusing else Storage.CODED,
    )
    monkeypatch.setattr(CopyCompression, "refuses", lambda self, source: refusing.append(source))
    return refusing


async def copied(worker: Any, start_pool: Any, chain: Any, written: Any = None) -> tuple[Any, Any, Any]:
    """Put blocks at a source; return (client of the source, client of a target, the blocks written)."""
    source, target = await start_pool("source"), await start_pool("target", pool_copy_compression="auto")
    at_source = worker.client(source.target)
    return at_source, worker.client(target.target), await worker.put(at_source, chain)


async def blocks_at(worker: Any, client: Any, chain: Any, written: Any) -> int:
    """Number of leading blocks, which must be as they were written."""
    lease = await client.pin(worker.ns, chain, lease_s=30)
    got = await worker.read(lease)
    await client.unpin(lease)
    assert all(np.array_equal(a, b[: lease.num_blocks]) for a, b in zip(got, written, strict=True))
    return int(lease.num_blocks)


async def test_a_compressed_copy_is_bit_equal_and_moves_fewer_bytes(always_coded, start_pool, worker, chain_of) -> None:
    at_source, client, written = await copied(worker, start_pool, chain_of(12))
    assert await client.copy(worker.ns, chain_of(12), at_source.target, 10) == (12, 12 * worker.spec.block_nbytes)
    assert await blocks_at(worker, client, chain_of(12), written) == 12
    counters = (await client.state())["counters"]
    assert counters["pool_copy_coded_blocks"] == 12
    assert counters["pool_copy_coded_plain_bytes"] == 12 * worker.spec.block_nbytes
    assert 0.4 < counters["pool_copy_coded_bytes"] / counters["pool_copy_coded_plain_bytes"] < 0.6


async def test_blocks_that_cannot_be_compressed_are_sent_as_they_are(
    always_coded, start_pool, worker, chain_of
) -> None:
    worker.byte_values = 256
    at_source, client, written = await copied(worker, start_pool, chain_of(5))
    assert (await client.copy(worker.ns, chain_of(5), at_source.target, 10))[0] == 5
    assert await blocks_at(worker, client, chain_of(5), written) == 5


@pytest.mark.parametrize("at", [0, 200], ids=["a plane's length", "a plane"])
async def test_a_bit_flipped_on_the_way_is_refused_and_counted(
    always_coded, start_pool, worker, chain_of, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    encode = coded_copies._encode
    at_source, client, written = await copied(worker, start_pool, chain_of(5))

    def flip_third(slots: Any, spec: KvSpec) -> Any:
        message = encode(slots, spec)
        if all(np.array_equal(slot, blocks[2]) for slot, blocks in zip(slots, written, strict=True)):
            damaged = bytearray(message.coded)
            damaged[at] ^= 16
            message.coded = bytes(damaged)
        return message

    monkeypatch.setattr(coded_copies, "_encode", flip_third)
    assert (await client.copy(worker.ns, chain_of(5), at_source.target, 10))[0] == 4
    assert await blocks_at(worker, client, chain_of(5), written) == 2
    assert (await client.state())["counters"]["pool_digest_mismatches"] == 1


async def test_a_source_of_an_earlier_release_is_copied_from_as_before(
    always_coded, start_pool, worker, chain_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PoolService, "ReadCoded", pool_pb2_grpc.PoolServicer.ReadCoded)
    at_source, client, written = await copied(worker, start_pool, chain_of(5))
    assert (await client.copy(worker.ns, chain_of(5), at_source.target, 10))[0] == 5
    assert await blocks_at(worker, client, chain_of(5), written) == 5
    assert always_coded == [at_source.target]


async def test_a_lease_that_ended_and_blocks_beyond_it_are_refused(start_pool, worker, chain_of) -> None:
    at_source, _, _ = await copied(worker, start_pool, chain_of(3))
    lease = await at_source.pin(worker.ns, chain_of(3), lease_s=30)
    assert [block.WhichOneof("content") async for block in at_source.read_coded(lease, [2, 0], silence_s=10)] == [
        "coded",
        "coded",
    ]
    with pytest.raises(PoolRefused, match="indices of the lease's 3 blocks, got 3"):
        [block async for block in at_source.read_coded(lease, [0, 3], silence_s=10)]
    with pytest.raises(PoolRefused, match="at most the lease's 3 blocks, got 4"):
        [block async for block in at_source.read_coded(lease, [0] * 4, silence_s=10)]
    await at_source.unpin(lease)
    with pytest.raises(PoolRefused, match="has ended"):
        [block async for block in at_source.read_coded(lease, [0], silence_s=10)]


def after_a_copy(bytes_per_s: float) -> CopyCompression:
    compression = CopyCompression()
    assert compression.choose("source", NS, 4 * MIB, 64) is Storage.TRIAL
    compression.copied_plain("source", 4 * MIB, 100.0)  # connects, which is not the link's bandwidth
    compression.copied_plain("source", 4 * MIB, 4 * MIB / bytes_per_s)
    compression.tried("source", NS, MIB, MIB // 2, (MIB / 400e6, MIB / 900e6))
    return compression


def test_copies_over_slow_links_are_compressed_and_sometimes_plain_to_measure_the_link() -> None:
    slow, fast = after_a_copy(30e6), after_a_copy(3e9)
    chosen = [slow.choose("source", NS, 4 * MIB, 64) for _ in range(32)]
    assert (chosen.count(Storage.CODED), chosen.count(Storage.PLAIN)) == (30, 2)
    assert Storage.CODED not in [fast.choose("source", NS, 4 * MIB, 64) for _ in range(32)]
    assert slow.choose("source", NS, MIB - 1, 64) is Storage.PLAIN
    assert slow.choose("other", NS, 4 * MIB, 64) is Storage.TRIAL
    slow.refuses("source")
    assert slow.choose("source", NS, 4 * MIB, 64) is Storage.PLAIN


def test_compressed_copies_that_take_longer_than_predicted_are_given_up_but_tried_again() -> None:
    compression = after_a_copy(30e6)
    assert compression.choose("source", NS, 4 * MIB, 64) is Storage.CODED
    compression.copied_coded("source", NS, 4 * MIB, 4 * MIB / 25e6)
    chosen = [compression.choose("source", NS, 4 * MIB, 64) for _ in range(32)]
    assert (chosen.count(Storage.CODED), chosen.count(Storage.PLAIN)) == (2, 30)
    for _ in range(20):
        compression.copied_coded("source", NS, 4 * MIB, 4 * MIB / 60e6)
    assert compression.choose("source", NS, 4 * MIB, 64) is Storage.CODED


def test_a_trial_measures_length_and_times(spec: KvSpec) -> None:
    slots = [np.zeros(spec.slot_nbytes(g), np.uint8) for g in range(2)]
    nbytes, times = try_codec(slots, spec)
    assert nbytes < spec.block_nbytes / 10
    assert min(times) > 0
    noise = [np.random.default_rng(g).integers(0, 256, len(slot), dtype=np.uint8) for g, slot in enumerate(slots)]
    assert try_codec(noise, spec)[0] == spec.block_nbytes
