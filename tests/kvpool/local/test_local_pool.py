"""Gets and puts through a pool node's door: what is found, what is right, and what happens when it is not."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import KvGroup, KvSpec, PoolClient, layer_digests
from kvpool.errors import AddressError, LocalPoolUnavailable, PoolConfigError, SpecError, SpecMismatch
from kvpool.local import LocalPoolClient, PutStatus, RegisteredBlocks
from kvpool.local.block_copy import SpecLayout
from kvpool.local.protocol import PutBlocks
from kvpool.node import PoolNode
from messenger import MessengerConfig
from settings.keys import assemble


async def state_of(target: str) -> dict[str, Any]:
    client = PoolClient(target, owner="asks", owner_incarnation=1)
    try:
        return await client.state()
    finally:
        await client.close()


def free_huge_pages() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("HugePages_Free:"))


async def test_what_one_process_puts_another_gets(
    start_process: Any, enter: Any, chain_of: Any, tmp_path: Path
) -> None:
    pool = await start_process(f"unix:{tmp_path}/p.sock")
    writer, reader = await enter(pool.target), await enter(pool.target)
    chain = chain_of(5)
    assert writer.put(chain) == [PutStatus.STORED] * 5
    assert reader.pool.match(reader.ns, chain) == 5
    assert reader.get(chain) == 5
    reader.memory.array[:] = writer.memory.array
    assert reader.got_what_was_put(5, of=5)
    assert (await pool.end(signal.SIGTERM)) == 0


@pytest.mark.parametrize("verify", [True, False])
async def test_a_get_ends_at_the_first_block_that_is_not_there(
    start_pool: Any, enter: Any, chain_of: Any, verify: bool
) -> None:
    host = await enter((await start_pool()).target)
    chain = chain_of(6)
    await asyncio.to_thread(host.put, chain[:4])
    assert await asyncio.to_thread(host.get, chain, verify) == 4
    assert await asyncio.to_thread(host.get, chain[4:], verify) == 0
    assert host.pool.contains(host.ns, chain[3])
    assert not host.pool.contains(host.ns, chain[4])
    assert not host.pool.contains(bytes(16), chain[3])


async def test_blocks_written_through_the_messenger_are_found_too(
    start_pool: Any, enter: Any, worker: Any, chain_of: Any
) -> None:
    pool = await start_pool()
    host = await enter(pool.target)
    chain = chain_of(3)
    written = await worker.put(worker.client(pool.target), chain)
    assert await asyncio.to_thread(host.get, chain) == 3
    assert all(np.array_equal(a, b) for a, b in zip(host.slots(host.landing, 3), written, strict=True))


async def test_blocks_put_here_can_be_leased_and_read_from_elsewhere(
    start_pool: Any, enter: Any, start_worker: Any, chain_of: Any
) -> None:
    pool = await start_pool()
    host, worker = await enter(pool.target), start_worker("tcp")
    chain = chain_of(3)
    await asyncio.to_thread(host.put, chain)
    client = worker.client(pool.target)
    lease = await client.pin(worker.ns, chain, lease_s=10)
    read = await worker.read(lease)
    assert all(np.array_equal(a, b) for a, b in zip(read, host.slots(host.memory.array, 3), strict=True))
    assert all(np.array_equal(a, b) for a, b in zip(worker.digests(3), lease.digests, strict=True))
    await client.unpin(lease)


async def test_leased_blocks_are_copied_and_verified_in_one_pass(
    start_pool: Any, enter: Any, worker: Any, chain_of: Any, pool_nodes: list[PoolNode]
) -> None:
    pool = await start_pool()
    host = await enter(pool.target)
    chain = chain_of(4)
    client = worker.client(pool.target)
    await worker.put(client, chain)
    lease = await client.pin(worker.ns, chain, lease_s=10)
    pool_nodes[0].memory.array[lease.offsets[1, 2]] ^= 1
    digests = np.concatenate(lease.digests, axis=1)
    right = host.pool.read_leased(host.spec, lease.offsets, digests, host.landing, host.offsets(4))
    assert right.tolist() == [True, True, False, True]
    assert np.array_equal(host.slots(host.landing, 4)[0], worker.slots(4)[0])
    await client.unpin(lease)


async def test_of_a_partial_block_the_tokens_it_has_are_verified(start_pool: Any, enter: Any, chain_of: Any) -> None:
    host = await enter((await start_pool()).target)
    chain = chain_of(2)
    lengths = np.array([0, 3], np.uint32)
    assert await asyncio.to_thread(host.put, chain, num_tokens=lengths) == [PutStatus.STORED] * 2
    assert await asyncio.to_thread(host.get, chain) == 2
    for g, (landed, put) in enumerate(zip(host.slots(host.landing, 2), host.slots(host.memory.array, 2), strict=True)):
        valid = np.array([4, 3], np.int32)
        assert np.array_equal(layer_digests(landed, host.spec, g, valid), layer_digests(put, host.spec, g, valid))
        rows = landed[1].reshape(host.spec.num_layers(g), host.spec.groups[g].kv_heads * 2, 4, -1)
        assert not rows[:, :, 3].any()


async def test_a_block_is_stored_once(start_pool: Any, enter: Any, chain_of: Any) -> None:
    host = await enter((await start_pool()).target)
    chain = chain_of(3)
    await asyncio.to_thread(host.put, chain[:2])
    status = await asyncio.to_thread(host.put, chain, 1)
    assert status == [PutStatus.EXISTS, PutStatus.EXISTS, PutStatus.STORED]
    assert await asyncio.to_thread(host.get, chain) == 3


async def test_what_has_the_digests_that_were_told_is_stored_with_them(
    start_pool: Any, enter: Any, chain_of: Any, pool_nodes: list[PoolNode]
) -> None:
    host = await enter((await start_pool()).target)
    chain = chain_of(3)
    lengths = np.array([0, 0, 2], np.uint32)
    await asyncio.to_thread(host.put, chain_of(3, "other"), 7, num_tokens=lengths)
    told = host.pool.digests(host.spec, host.region, host.offsets(3), lengths)
    assert await asyncio.to_thread(host.put, chain, 7, num_tokens=lengths, digests=told) == [PutStatus.STORED] * 3
    for key, row in zip(chain, told, strict=True):
        block = pool_nodes[0].core.store.find(host.ns, key.tobytes())
        assert block is not None
        assert b"".join(block.digests) == row.tobytes()


async def test_what_has_another_digest_than_told_is_not_stored(start_pool: Any, enter: Any, chain_of: Any) -> None:
    pool = await start_pool()
    host = await enter(pool.target)
    chain = chain_of(3)
    told = np.zeros((3, sum(host.spec.num_layers(g) for g in range(2))), np.uint64)
    assert await asyncio.to_thread(host.put, chain, digests=told) == [PutStatus.WRONG] * 3
    assert await asyncio.to_thread(host.pool.match, host.ns, chain) == 0
    assert (await state_of(pool.target))["counters"]["pool_digest_mismatches"] == 3


async def test_a_flipped_bit_is_found_and_the_block_taken_out(
    start_pool: Any, enter: Any, chain_of: Any, until: Any, pool_nodes: list[PoolNode]
) -> None:
    pool = await start_pool()
    host = await enter(pool.target)
    chain = chain_of(3)
    await asyncio.to_thread(host.put, chain)
    node = pool_nodes[0]
    block = node.core.store.find(host.ns, chain[1].tobytes())
    assert block is not None
    node.memory.array[block.offsets[1] + 7] ^= 0x10
    assert await asyncio.to_thread(host.get, chain) == 1
    assert host.pool.corrupt_blocks == 1

    async def gone() -> bool:
        return not host.pool.contains(host.ns, chain[1])

    await until(gone)
    assert (await state_of(pool.target))["counters"]["pool_quarantined_blocks"] == 1


async def test_readers_follow_an_index_that_grows(start_pool: Any, enter: Any, chain_of: Any) -> None:
    pool = await start_pool(pool_bytes=16 << 20)
    tiny = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=2, dtype="float32"),), 4)
    deep = KvSpec((KvGroup("full", 0, tuple(range(60)), kv_heads=1, head_dim=2, dtype="float32"),), 4)
    reader, writer, other = (
        await enter(pool.target, tiny),
        await enter(pool.target, tiny),
        await enter(pool.target, deep),
    )
    chain = chain_of(3000)
    await asyncio.to_thread(writer.put, chain)
    await asyncio.to_thread(other.put, chain[:5])
    assert await asyncio.to_thread(reader.pool.match, reader.ns, chain) == 3000
    assert await asyncio.to_thread(reader.get, chain) == 3000
    assert await asyncio.to_thread(other.get, chain[:6]) == 5


async def test_what_is_read_is_used_and_stays(start_pool: Any, enter: Any, chain_of: Any) -> None:
    big = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=256, dtype="float32"),), 64)
    pool = await start_pool()
    host = await enter(pool.target, big)
    room = (1 << 20) // big.block_nbytes - 1
    old, new = chain_of(room, "old"), chain_of(room // 2, "new")
    for i in range(room):
        await asyncio.to_thread(host.put, old[i : i + 1])
    assert await asyncio.to_thread(host.get, old[:1]) == 1
    await asyncio.to_thread(host.pool.send_touches)
    for i in range(room // 2):
        await asyncio.to_thread(host.put, new[i : i + 1])
    assert host.pool.contains(host.ns, old[0])
    assert not host.pool.contains(host.ns, old[1])


async def test_after_the_pool_nodes_death_no_get_succeeds_and_a_successor_can_be_entered(
    start_process: Any, enter: Any, chain_of: Any, tmp_path: Path
) -> None:
    target = f"unix:{tmp_path}/p.sock"
    pool = await start_process(target)
    host = await enter(target)
    chain = chain_of(2)
    host.put(chain)
    assert host.get(chain) == 2
    await pool.end(signal.SIGKILL)
    for use in (host.get, host.put):
        with pytest.raises(LocalPoolUnavailable, match="gone"):
            use(chain)
    await start_process(target)
    again = await enter(target)
    assert again.pool.incarnation != host.pool.incarnation
    assert again.get(chain) == 0
    assert again.put(chain) == [PutStatus.STORED] * 2


async def test_a_node_that_speaks_tcp_alone_has_no_door(start_pool: Any, local_socket_at: Any, tmp_path: Path) -> None:
    pool = await start_pool(messenger=assemble(MessengerConfig, transport="tcp"))
    assert await local_socket_at(pool.target) == ""
    with pytest.raises(LocalPoolUnavailable, match="no pool node answers"):
        LocalPoolClient(f"{tmp_path}/nothing.sock", owner="host", owner_incarnation=1)


async def test_callers_map_the_arena_and_the_index_for_reading_only(start_pool: Any, enter: Any) -> None:
    host = await enter((await start_pool()).target)
    assert not host.pool._arena.array.flags.writeable
    assert not host.pool._index.words.flags.writeable


async def test_what_cannot_be_is_refused_with_its_reason(
    start_pool: Any, enter: Any, chain_of: Any, pool_nodes: list[PoolNode]
) -> None:
    pool = await start_pool()
    host = await enter(pool.target)
    chain = chain_of(2)
    await asyncio.to_thread(host.put, chain)
    get: Callable[..., int] = host.pool.get
    with pytest.raises(SpecError, match=r"a slot lies beyond memory of .* 1048576 to copy to"):
        await asyncio.to_thread(get, host.ns, host.spec, chain, host.landing, host.offsets(2) + (1 << 20) - 8)
    with pytest.raises(SpecError, match="offsets of shape"):
        await asyncio.to_thread(get, host.ns, host.spec, chain, host.landing, host.offsets(1))
    with pytest.raises(AddressError, match="namespace of 3 bytes"):
        await asyncio.to_thread(get, b"abc", host.spec, chain, host.landing, host.offsets(2))
    other = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=2, dtype="float32"),), 4)
    with pytest.raises(SpecMismatch, match="holds blocks of"):
        await asyncio.to_thread(
            host.pool.put,
            host.ns,
            other,
            chain_of(1, "x"),
            np.zeros((1, 16), np.uint8),
            RegisteredBlocks(host.region, host.offsets(1)[:1]),
        )
    far = host.offsets(1) + (1 << 20)
    with pytest.raises(SpecError, match="a slot lies beyond memory"):
        await asyncio.to_thread(
            host.pool.put,
            host.ns,
            host.spec,
            chain_of(1, "y"),
            np.zeros((1, 16), np.uint8),
            RegisteredBlocks(host.region, far),
        )
    assert not pool_nodes[0].core.puts


async def test_a_node_says_what_its_arena_is_made_of_and_refuses_huge_pages_that_are_not_there(start_pool: Any) -> None:
    pool = await start_pool("auto", pool_hugepages="auto")
    assert (await state_of(pool.target))["arena_pages"] in ("huge", "transparent", "small")
    with pytest.raises(PoolConfigError, match="needs more huge pages than are free"):
        await start_pool("on", pool_hugepages="on", pool_bytes=(free_huge_pages() + 1) << 22)


async def test_a_put_of_many_bytes_keeps_its_order_with_what_follows(
    start_pool: Any, enter: Any, chain_of: Any, pool_nodes: list[PoolNode]
) -> None:
    big = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=128, dtype="float32"),), 64)
    host = await enter((await start_pool(pool_bytes=16 << 20)).target, big)
    chain, one = chain_of(40), host.offsets(1)
    host.memory.array[:] = np.random.default_rng(3).integers(0, 256, 1 << 20, np.uint8)

    def put_and_get() -> int:
        nothing = np.zeros((40, 16), np.uint8)
        status = host.pool.put(host.ns, big, chain, nothing, RegisteredBlocks(host.region, one.repeat(40, axis=1)))
        assert (status == PutStatus.STORED).all()
        host.pool.send_touches()
        return host.pool.get(host.ns, big, chain, host.landing, one.repeat(40, axis=1))

    assert await asyncio.to_thread(put_and_get) == 40
    assert np.array_equal(host.landing[: big.block_nbytes], host.memory.array[: big.block_nbytes])
    assert not pool_nodes[0].core.puts


@pytest.mark.parametrize("n", [1, 40], ids=["at once", "in a thread"])
@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
async def test_a_put_whose_caller_hangs_up_stores_what_has_the_digests_told_and_nothing_without_them(
    start_pool: Any, enter: Any, chain_of: Any, until: Any, pool_nodes: list[PoolNode], n: int, told: bool
) -> None:
    big = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=128, dtype="float32"),), 64)
    leaving = await enter((await start_pool(pool_bytes=16 << 20)).target, big)
    core = pool_nodes[0].core
    chain, offsets = chain_of(n), leaving.offsets(1).repeat(n, axis=1)
    digests = leaving.pool.digests(big, leaving.region, offsets).tobytes() if told else b""
    message = PutBlocks(
        leaving.ns, SpecLayout(big).proto_bytes, leaving.region, chain.tobytes(), bytes(16 * n), offsets.tobytes(),
        digests, bytes(4 * n), 0.0,
    )  # fmt: skip
    # Both in this loop's thread, so that the node reads the put after the caller's end, whose memory may hold anything.
    leaving.pool._connection.send(message)
    leaving.pool.close()

    async def over() -> bool:
        counters = core.counters
        ended = counters["stored_blocks" if told else "aborted_puts"] == (n if told else 1)
        return ended and not core.puts and not core.fenced

    await until(over)
    assert len(core.store.index) == (n if told else 0)
