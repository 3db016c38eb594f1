"""Workers on their pool node's host: KV goes through its door, and through the messenger where there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from engine import Model
from kvpool.local.server import LocalPoolServer, start_local_pool_server
from kvpool.node import PoolNode

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


@pytest.fixture
async def open_at() -> AsyncIterator[Callable[[PoolNode], Awaitable[LocalPoolServer]]]:
    opened: list[LocalPoolServer] = []

    async def open_it(node: PoolNode) -> LocalPoolServer:
        door = await start_local_pool_server(node)
        assert door is not None
        opened.append(door)
        return door

    yield open_it
    for door in opened:
        if door.node.local_socket:
            await door.close()


def by_messenger(pair: Any) -> int:
    """Bytes that the prefill node has read from the pool, or any worker written to it, through the messenger."""
    read = pair.prefill.node.messenger.counters().get("bytes_read_shm", 0)
    return int(read + pair.pool.messenger.counters().get("bytes_landed_shm", 0))


async def answer(pair: Any, prompt: list[int], name: str) -> Any:
    request = await pair.frontend.submit(pair.submit(prompt, name, max_tokens=5))
    await request.ended.wait()
    assert request.failures == []
    await pair.at_rest()
    return request


async def test_blocks_are_stored_and_reused_without_the_messenger(
    start_pair: Start, open_at: Any, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    door = await open_at(pair.pool)
    for seed in range(12):  # more than the workers' own slots hold
        await answer(pair, prompt(128, seed=seed), f"first {seed}")
    second = await answer(pair, [*prompt(128, seed=0), *prompt(9, seed=99)], "second")
    assert second.cached_tokens >= 128
    assert second.token_ids == greedy(model, [*prompt(128, seed=0), *prompt(9, seed=99)], 5)
    assert pair.prefill.node.counters.snapshot()["kv_load_bytes"] > 0
    assert pair.prefill.node.counters.snapshot()["kv_store_bytes"] > 0
    assert by_messenger(pair) == 0
    await door.close()
    third = await answer(pair, [*prompt(128, seed=1), *prompt(9, seed=98)], "third")
    assert third.cached_tokens >= 128
    assert third.token_ids == greedy(model, [*prompt(128, seed=1), *prompt(9, seed=98)], 5)
    assert by_messenger(pair) > 0


async def test_a_block_damaged_in_the_arena_is_computed_again_and_taken_out(
    start_pair: Start, open_at: Any, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    await open_at(pair.pool)
    for seed in range(12):
        await answer(pair, prompt(128, seed=seed), f"first {seed}")
    for block in pair.pool.core.store.in_dram():
        pair.pool.memory.array[block.offsets[0] + 100] ^= 4
    turn = [*prompt(128, seed=0), *prompt(9, seed=99)]
    second = await answer(pair, turn, "second")
    assert second.token_ids == greedy(model, turn, 5)
    assert pair.prefill.node.counters.snapshot()["digest_mismatches"] > 0
    assert pair.pool.core.counters["quarantined_blocks"] > 0
