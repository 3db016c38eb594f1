"""A pool node's stream to a conductor, where it must end although its conductor is gone."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvpool.node import PoolNode
from kvpool.server import stay_joined

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
