"""Copying blocks between two pool nodes: verified, complete, and nothing held when it fails."""

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

from kvpool import Lease
from kvpool.errors import CopyFailed
from messenger import Endpoint, MessengerConfig, RemoteKey
from moonpool_proto.v1 import pool_pb2, pool_pb2_grpc
from rpc.control import start_server
from settings.keys import assemble


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_a_copy_is_bit_equal_and_sealed(start_pool, start_worker, chain_of, tmp_path, transport: str) -> None:
    config = assemble(MessengerConfig, shm_dir=tmp_path, transport=transport)
    source, target = await start_pool("source", messenger=config), await start_pool("target", messenger=config)
    worker = start_worker(transport)
    chain = chain_of(6)
    written = await worker.put(worker.client(source.target), chain)
    client = worker.client(target.target)
    assert await client.copy(worker.ns, chain, source.target, 10) == (6, 6 * worker.spec.block_nbytes)
    lease = await client.pin(worker.ns, chain, lease_s=30)
    assert all(np.array_equal(a, b) for a, b in zip(await worker.read(lease), written, strict=True))
    await client.unpin(lease)


async def test_a_copy_brings_only_what_the_source_has_and_the_target_lacks(start_pool, worker, chain_of) -> None:
    source, target = await start_pool("source"), await start_pool("target")
    at_source, at_target = worker.client(source.target), worker.client(target.target)
    await worker.put(at_source, chain_of(5))
    await worker.put(at_target, chain_of(2))
    assert (await at_target.copy(worker.ns, chain_of(9), source.target, 10))[0] == 3
    assert await at_target.copy(worker.ns, chain_of(5), source.target, 10) == (0, 0)
    assert await at_target.copy(worker.ns, chain_of(5, salt="other"), source.target, 10) == (0, 0)


async def test_a_copy_into_too_small_an_arena_brings_a_leading_run(start_pool, worker, chain_of) -> None:
    source, target = await start_pool("source"), await start_pool("target", pool_bytes=64 << 10)
    await worker.put(worker.client(source.target), chain_of(200))
    client = worker.client(target.target)
    copied, _ = await client.copy(worker.ns, chain_of(200), source.target, 10)
    assert 20 < copied < 200
    lease = await client.pin(worker.ns, chain_of(200), lease_s=30)
    assert lease.num_blocks == copied
    await client.unpin(lease)


async def test_a_flipped_bit_at_the_source_is_refused_and_reported(pool_nodes, start_pool, worker, chain_of) -> None:
    source, target = await start_pool("source"), await start_pool("target")
    at_source, at_target = worker.client(source.target), worker.client(target.target)
    await worker.put(at_source, chain_of(5))
    lease = await at_source.pin(worker.ns, chain_of(5), lease_s=30)
    pool_nodes[0].memory.array[lease.offsets[1, 2] + 5] ^= 1 << 3
    await at_source.unpin(lease)
    assert (await at_target.copy(worker.ns, chain_of(5), source.target, 10))[0] == 4
    for client, run in ((at_source, 2), (at_target, 2)):
        lease = await client.pin(worker.ns, chain_of(5), lease_s=30)
        assert lease.num_blocks == run
        await client.unpin(lease)
    assert (await at_target.state())["counters"]["pool_digest_mismatches"] == 1
    assert (await at_source.state())["counters"]["pool_quarantined_blocks"] == 1


async def test_a_source_that_is_not_there_fails_by_name(start_pool, worker, chain_of, tmp_path) -> None:
    target = await start_pool("target")
    client = worker.client(target.target)
    with pytest.raises(CopyFailed, match=r"nobody\.sock"):
        await client.copy(worker.ns, chain_of(2), f"unix:{tmp_path}/nobody.sock", 5)


async def test_a_copy_that_cannot_read_leaves_nothing_behind(start_pool, worker, chain_of, tmp_path) -> None:
    """The source accepts tcp only, the target shm only: blocks are pinned and allocated, then the read fails."""
    source = await start_pool("source", messenger=assemble(MessengerConfig, shm_dir=tmp_path, transport="tcp"))
    target = await start_pool("target", messenger=assemble(MessengerConfig, shm_dir=tmp_path, transport="shm"))
    await worker.put(worker.client(source.target), chain_of(3))
    client = worker.client(target.target)
    with pytest.raises(CopyFailed, match="no transport in common"):
        await client.copy(worker.ns, chain_of(3), source.target, 5)
    assert (await client.validate())["ok"]
    assert (await client.state())["used_bytes"] == 0


class SilentSource(pool_pb2_grpc.PoolServicer):
    """Grants leases on blocks that can never be read: its messenger's port accepts and says nothing."""

    def __init__(self, worker: Any, port: int) -> None:
        self.worker, self.port, self.unpinned = worker, port, 0

    async def Pin(self, request: Any, context: Any) -> pool_pb2.PinReply:
        spec = self.worker.spec
        n = len(request.chain) // 16
        endpoint = Endpoint("silent", 1, "another host", "127.0.0.1", self.port, "")
        key = RemoteKey(1, 1, 0, 1 << 20, read=True, write=False)
        digests = [np.zeros((n, spec.num_layers(g)), np.uint64) for g in range(2)]
        lease = Lease("lease", key, endpoint, np.zeros((2, n), np.int64), digests)
        pulled = lease.to_pull_range(0)
        return pool_pb2.PinReply(
            lease_id="lease", key=pulled.key, endpoint=pulled.endpoint, blocks=pulled.blocks, spec=spec.to_proto()
        )

    async def Unpin(self, request: Any, context: Any) -> pool_pb2.UnpinReply:
        self.unpinned += 1
        return pool_pb2.UnpinReply()


SilentSource.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


async def test_a_source_that_falls_silent_ends_the_copy_in_time(start_pool, worker, chain_of, tmp_path) -> None:
    target = await start_pool("target")
    client = worker.client(target.target)
    await worker.put(client, chain_of(1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        source = SilentSource(worker, listener.getsockname()[1])
        server = await start_server(
            f"unix:{tmp_path}/s.sock", lambda s: pool_pb2_grpc.add_PoolServicer_to_server(source, s)
        )
        with pytest.raises(CopyFailed):
            await client.copy(worker.ns, chain_of(4), server.target, 0.5)
        assert source.unpinned == 1
        assert (await client.validate())["ok"]
        assert (await client.state())["counts"]["blocks"] == 1
        await server.stop(0)


async def test_copies_of_overlapping_prompts_bring_each_block_once(start_pool, worker, chain_of) -> None:
    source, target = await start_pool("source"), await start_pool("target", max_incoming_copies=1)
    await worker.put(worker.client(source.target), chain_of(40))
    client = worker.client(target.target)
    copies = [client.copy(worker.ns, chain_of(n), source.target, 10) for n in (10, 20, 40)]
    assert sum(copied for copied, _ in await asyncio.gather(*copies)) == 40
