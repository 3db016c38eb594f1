"""Operators' calls to a pool node: inspecting single blocks, flushing and verifying."""

import asyncio

import numpy as np
import pytest

from kvpool import layer_digests, parent_keys, tail_key
from kvpool.errors import PoolRefused

SEED = bytes(16)


async def put_tail(worker, client, parent: bytes, tokens: list[int], seed: int) -> bytes:
    """Store a partial block of these tokens after `parent`; returns its key."""
    key = tail_key(SEED, parent, np.array(tokens, np.int32))
    chain = np.frombuffer(key, np.uint8).reshape(1, 16)
    ticket = await client.allocate(
        worker.ns, worker.spec, chain, parent_keys(chain, parent), ttl_s=30, num_tokens=[len(tokens)]
    )
    await worker.write(ticket, seed)
    valid = np.array([len(tokens)], np.int32)
    digests = [layer_digests(view, worker.spec, g, valid) for g, view in enumerate(worker.slots(1))]
    assert await client.seal(ticket, digests) == 1
    return key


async def test_a_block_is_shown_in_full(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, pool_ssd_bytes=1 << 20)).target)
    chain = chain_of(3)
    await worker.put(client, chain)
    await client.flush(dram_only=True)
    lease = await client.pin(worker.ns, chain[:2], lease_s=30, wait_s=60)
    tail = await put_tail(worker, client, bytes(chain[1]), [1, 2, 3], seed=5)
    await client.hint(worker.ns, chain, [0, 2, 1])
    (block,) = await client.inspect(bytes(chain[1])[:6])
    assert (block["key"], block["kv_namespace"]) == (bytes(chain[1]).hex(), worker.ns.hex())
    assert (block["parent"], block["depth"], block["children"]) == (bytes(chain[0]).hex(), 1, [bytes(chain[2]).hex()])
    assert block["tails"] == [{"key": tail.hex(), "tokens": 3}]
    assert (block["leases"], block["uses"], block["replicas"], block["state"]) == (1, 1, 2, "sealed")
    assert block["tiers"]["dram"]["offsets"] == lease.offsets[:, 1].tolist()
    assert block["tiers"]["dram"]["right"]
    assert block["tiers"]["ssd"]["right"]
    (last,) = await client.inspect(bytes(chain[2]), worker.ns)
    assert list(last["tiers"]) == ["ssd"]
    assert await client.inspect(bytes(chain[2]), bytes(16)) == []
    await client.unpin(lease)


async def test_a_damaged_block_is_shown_as_such_and_taken_out(pool_nodes, start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(2))
    lease = await client.pin(worker.ns, chain_of(2), lease_s=30)
    pool_nodes[0].memory.array[lease.offsets[0, 1]] ^= 2
    await client.unpin(lease)
    (block,) = await client.inspect(bytes(chain_of(2)[1]))
    assert not block["tiers"]["dram"]["right"]
    assert await client.inspect(bytes(chain_of(2)[1])) == []
    assert (await client.state())["counters"]["pool_dram_corrupt_blocks"] == 1


async def test_too_short_a_key_is_refused(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(65))
    with pytest.raises(PoolRefused, match="65 blocks match any key, at most 64 are allowed: give a longer prefix"):
        await client.inspect(b"")
    with pytest.raises(PoolRefused, match="2 blocks with 1 numbers of replicas"):
        await client.hint(worker.ns, chain_of(2), [1])


async def test_a_flush_takes_what_nobody_uses(start_pool, worker, chain_of) -> None:
    client = worker.client((await start_pool()).target)
    await worker.put(client, chain_of(6))
    await worker.put(client, chain_of(4, "other"))
    lease = await client.pin(worker.ns, chain_of(2), lease_s=30)
    flushed = await client.flush(worker.ns)
    assert (flushed.removed, flushed.kept) == (8, 2)
    assert (await client.flush(bytes(16))).kept == 0
    await client.unpin(lease)
    nothing_kept = await client.flush(dram_only=True)
    assert (nothing_kept.removed, nothing_kept.kept) == (0, 2)
    assert (await client.flush()).removed == 2
    assert (await client.state())["tiers"]["dram"] == {"blocks": 0, "used_bytes": 0, "capacity_bytes": 1 << 20}


async def test_a_partial_block_is_leased_after_its_run_also_from_ssd(start_pool, worker, chain_of, ssd_dir) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, pool_ssd_bytes=1 << 20)).target)
    chain = chain_of(3)
    await worker.put(client, chain)
    first = await put_tail(worker, client, bytes(chain[2]), [7, 8], seed=1)
    second = await put_tail(worker, client, bytes(chain[2]), [7, 8, 9], seed=2)
    begins = await put_tail(worker, client, bytes(16), [1], seed=3)
    assert (await client.flush(dram_only=True)).removed == 6
    lease = await client.pin(worker.ns, chain, lease_s=30, wait_s=60, tails=True)
    assert lease.num_blocks == 3
    assert {tail.key: tail.num_tokens for tail in lease.tails} == {first: 2, second: 3}
    assert lease.head(3).tails == lease.tails
    assert lease.head(2).tails == ()
    await client.unpin(lease)
    lease = await client.pin(worker.ns, chain[:0], lease_s=30, wait_s=60, tails=True)
    assert (lease.num_blocks, lease.offsets.shape, [tail.key for tail in lease.tails]) == (0, (2, 0), [begins])
    peer = worker.messenger.connect(lease.endpoint)
    slices = np.array([[0, lease.tails[0].offsets[1], worker.spec.slot_nbytes(1)]], np.int64)
    await asyncio.wrap_future(peer.read(lease.key, worker.region, slices))
    got = worker.memory.array[: worker.spec.slot_nbytes(1)].reshape(1, -1)
    assert np.array_equal(layer_digests(got, worker.spec, 1, np.array([1], np.int32))[0], lease.tails[0].digests[1])
    await client.unpin(lease)
    lease = await client.pin(worker.ns, chain, lease_s=30)
    assert lease.tails == ()
    await client.unpin(lease)


async def test_a_quota_keeps_one_model_from_the_room_of_others(start_pool, worker, chain_of) -> None:
    half = (f"{worker.ns.hex()}=0.5",)
    client = worker.client((await start_pool(pool_bytes=64 << 10, pool_quota=half)).target)
    await worker.put(client, chain_of(40))
    await worker.put(client, chain_of(40, "more"))
    used = (await client.state())["tiers"]["dram"]["used_bytes"]
    assert 0.4 * (64 << 10) < used <= 32 << 10


async def test_memory_is_emptied_as_far_as_the_ssd_has_room(start_pool, worker, chain_of, ssd_dir) -> None:
    """1 MiB on SSD holds 256 of these blocks; what came there first gives way when asked again."""
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, pool_ssd_bytes=1 << 20)).target)
    for i in range(4):
        await worker.put(client, chain_of(100, f"prompt {i}"))
    flushed = await client.flush(dram_only=True, deadline_s=60)
    assert flushed.removed >= 200
    assert flushed.removed + flushed.kept == 400
    assert (await client.state())["tiers"]["ssd"]["blocks"] == 256
    again = await client.flush(dram_only=True, deadline_s=60)
    assert (again.removed, again.kept) == (flushed.kept, 0)


async def test_the_state_has_blocks_by_namespace_and_tier_and_what_tenants_retain(
    start_pool, worker, chain_of, ssd_dir
) -> None:
    client = worker.client((await start_pool(pool_ssd_dir=ssd_dir, pool_ssd_bytes=1 << 20)).target)
    await worker.put(client, chain_of(3))
    assert await client.retain(worker.ns, chain_of(2), tenant="t", lifetime_s=60)
    state = await client.state()
    tiers, used_bytes = state["namespaces"][worker.ns.hex()]["tiers"], state["tiers"]["dram"]["used_bytes"]
    assert tiers["dram"] == {"blocks": 3, "used_bytes": used_bytes}
    assert state["retained"]["dram"] == [{"account": "t", "prefixes": 1, "bytes": 2 * used_bytes // 3}]
    await client.flush(dram_only=True)
    tiers = (await client.state())["namespaces"][worker.ns.hex()]["tiers"]
    assert (tiers["dram"]["blocks"], tiers["ssd"]["blocks"]) == (0, 3)
