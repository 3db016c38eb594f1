"""Prompts that clients announce to use again: the pool keeps their KV, the answer's included, beside other traffic."""

from __future__ import annotations

from kvpool.policy.eviction import Retention


def retention_of(pair) -> Retention:
    return pair.pool.core.store.dram.retention


async def test_an_announced_prompt_and_its_answer_outlast_other_traffic_in_the_pool(start_pair, prompt) -> None:
    pair = await start_pair(pool={"pool_bytes": 1 << 20, "pool_policy": "lru"})
    first = pair.submit(prompt(40), "kept", max_tokens=17)
    first.hints.lifetime_s, first.hints.pause_s = 600, 30
    request = await pair.frontend.submit(first)
    await request.ended.wait()
    await pair.at_rest()
    retention = retention_of(pair)
    keys = [pair.prefill.node.namespace + key for key in _chain(pair, prompt(40) + request.token_ids[:16])]
    assert len(keys) == 7
    assert all(retention.holds(key) for key in keys), "5 blocks of the prompt, 2 of the answer"
    evicted = 0
    for number in range(1, 200):
        await pair.ask(prompt(120, number), f"other-{number}", max_tokens=2)
        evicted = pair.pool.core.totals()["evicted_dram_room_blocks"]
        if evicted > 60:
            break
    assert evicted > 60
    pair.forget()
    again = await pair.ask([*prompt(40), *request.token_ids[:16], 5], "again", max_tokens=2)
    assert again.cached_tokens == 56


async def test_without_hints_nothing_is_retained(start_pair, prompt) -> None:
    pair = await start_pair(pool=True)
    await pair.ask(prompt(40), "plain")
    assert len(retention_of(pair)) == 0


def _chain(pair, tokens: list[int]) -> list[bytes]:
    chain = pair.submit(tokens, "name").chain
    return [chain[i : i + 16] for i in range(0, len(chain), 16)]
