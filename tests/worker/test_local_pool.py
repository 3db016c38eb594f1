"""Workers on their pool node's host: KV goes through its door, and through the messenger where there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from engine import Model
from kvpool import PoolClient
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


async def test_a_prompt_of_which_the_pool_holds_nothing_is_looked_up_without_a_call(
    start_pair: Start, open_at: Any, model: Model, prompt: Prompt, greedy: Greedy, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    pin = PoolClient.pin

    async def counted(client: PoolClient, kv_namespace: bytes, chain: Any, **how: Any) -> Any:
        pinned.append(len(chain))
        return await pin(client, kv_namespace, chain, **how)

    monkeypatch.setattr(PoolClient, "pin", counted)
    pair = await start_pair(pool=True)
    await open_at(pair.pool)
    await answer(pair, prompt(128, seed=1), "first")  # its store connects to the pool
    asked, looked_up = len(pinned), pair.pool.core.totals()["lookup_blocks"]
    await answer(pair, prompt(128, seed=2), "new")
    assert len(pinned) == asked
    assert pair.pool.core.totals()["lookup_blocks"] > looked_up  # and still counts as a miss
    for seed in range(3, 15):  # more than the workers' own slots hold
        await answer(pair, prompt(128, seed=seed), f"other {seed}")
    again = await answer(pair, [*prompt(128, seed=2), *prompt(9, seed=99)], "again")
    assert len(pinned) == asked + 1
    assert again.cached_tokens >= 128
    assert again.token_ids == greedy(model, [*prompt(128, seed=2), *prompt(9, seed=99)], 5)


async def test_a_partial_block_that_begins_a_prompt_is_found_without_a_whole_one(
    start_pair: Start, open_at: Any, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True)
    await open_at(pair.pool)
    await answer(pair, prompt(128, seed=1), "first")
    opening = prompt(3, seed=2)
    short = await pair.frontend.submit(pair.submit(opening, "short", max_tokens=2))
    await short.ended.wait()
    await pair.at_rest()
    for seed in range(3, 15):
        await answer(pair, prompt(128, seed=seed), f"other {seed}")
    turn = [*opening, *short.token_ids, *prompt(9, seed=99)]
    second = await answer(pair, turn, "second")
    assert second.cached_tokens >= len(opening)
    assert second.token_ids == greedy(model, turn, 5)
