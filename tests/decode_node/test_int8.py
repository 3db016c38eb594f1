"""KV in int8 between two nodes: what an answer is told of it, wherever it was used, and what a damaged copy costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvpool import PoolClient
from tests.worker.node_pair import forget

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]


async def timing_of(pair: Any, ids: list[int], name: str) -> Any:
    return (await pair.ask(ids, name)).messages[0].timing


async def test_what_the_decode_node_alone_had_is_told_as_approximate(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True, storage="int8")
    cold = await timing_of(pair, prompt(40), "cold")
    assert (cold.cached_tokens, cold.approximate_tokens) == (0, 0)
    pair.forget()
    warm = await timing_of(pair, prompt(40), "from the pool")
    assert warm.approximate_tokens == warm.cached_tokens == 32
    forget(pair.prefill)
    client = PoolClient(pair.prefill.node.config.pool_target, owner="test", owner_incarnation=1)
    await client.flush()
    await client.close()
    late = await timing_of(pair, prompt(40), "from the decode node's own pages")
    assert (late.cached_tokens, late.approximate_tokens) == (0, 40)


async def test_what_the_decode_node_alone_could_read_is_told_as_approximate(
    start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair(pool=True, storage="int8")
    await timing_of(pair, prompt(40), "cold")
    pair.forget()

    connector = pair.prefill.node.kv_connector
    begin_load = connector.begin_load
    monkeypatch.setattr(connector, "begin_load", lambda pinned, slots, first: begin_load(pinned, [], first))
    timing = await timing_of(pair, prompt(40), "warm")
    assert (timing.cached_tokens, timing.approximate_tokens) == (0, 32)


async def test_blocks_that_all_came_damaged_are_pushed(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair(pool=True, storage="int8")
    await timing_of(pair, prompt(17), "cold")
    forget(pair.decode)  # the prefill node has its own
    pair.pool.memory.array[:] ^= 1
    await timing_of(pair, prompt(17), "warm")
    assert pair.decode.node.counters.snapshot()["digest_mismatches"] == 2
    assert pair.prefill.node.counters.snapshot()["repushed_blocks"] == 2
