"""A pool node's stream to a conductor: what it reports, and that it ends although its conductor is gone."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.node import PoolNode
from kvpool.server import _reports, stay_joined

StartPool = Callable[..., Awaitable[object]]


async def test_one_that_is_told_to_end_while_nobody_answers_ends(
    start_pool: StartPool, pool_nodes: list[PoolNode], short_path: Path
) -> None:
    """Also where the stream breaks in the same moment: then gRPC tells of that alone."""
    await start_pool()
    for moment in range(400):
        joined = asyncio.create_task(stay_joined(pool_nodes[0], "unix:p.sock", f"unix:{short_path}/nobody.sock"))
        for _ in range(moment % 10):
            await asyncio.sleep(0)
        joined.cancel()
        done, _ = await asyncio.wait([joined], timeout=10)
        if not done:
            joined.cancel()
            pytest.fail(f"told to end after {moment % 10} steps of the loop, it goes on")


async def test_loads_from_ssd_are_reported_once_so_that_their_costs_are_learned(
    start_pool: StartPool, pool_nodes: list[PoolNode], worker: Any, chain_of: Any, ssd_dir: Path
) -> None:
    pool: Any = await start_pool(pool_ssd_dir=ssd_dir, pool_ssd_bytes=1 << 20)
    client = worker.client(pool.target)
    await worker.put(client, chain_of(20))
    await client.flush(dram_only=True)
    async with contextlib.aclosing(_reports(pool_nodes[0], "unix:p.sock")) as reports:
        assert not (await anext(reports)).transfers
        lease = await client.pin(worker.ns, chain_of(20), lease_s=30, wait_s=60)
        await client.unpin(lease)
        transfers = (await anext(reports)).transfers
        assert {sample.path for sample in transfers} == {"ssd_read"}
        assert sum(sample.bytes for sample in transfers) == 20 * worker.spec.block_nbytes
        assert all(sample.seconds > 0 for sample in transfers)
        assert not (await anext(reports)).transfers
