"""Parity mode: KV that was computed wrongly, and stored under digests of just that, is found, replaced, not used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import Model
from kvpool import Lease, PoolClient, chain_keys, chain_seed, layer_digests
from messenger import Messenger, MessengerConfig, SharedMemory
from settings.keys import assemble
from worker.parity import ParityChecker
from worker.slot_memory import spec_of

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]
BLOCK = 8
LENGTH = 65  # eight whole blocks of which all can be reused


class BadHost:
    """Another process's pool client and messenger: it stores what it likes, under digests of just that."""

    def __init__(self, pair: Any, model: Model, run_dir: Any) -> None:
        self._pair = pair
        self._spec = spec_of(model.kv_groups, BLOCK)
        self._messenger = Messenger(assemble(MessengerConfig, shm_dir=run_dir), node_id="bad", incarnation=7)
        self._messenger.start()
        self._memory = SharedMemory.create(self._spec.slot_nbytes(0), "bad")
        self._region = self._messenger.register(self._memory)
        self._client = PoolClient(pair.prefill.node.config.pool_target, owner="bad", owner_incarnation=7)

    async def spoil(self, ids: list[int], block: int) -> None:
        """Replace one block of the prompt by one that is a little off, with the digests of what is stored."""
        seed = chain_seed("", "test", BLOCK)
        chain = chain_keys(seed, np.array(ids, np.int32), BLOCK)
        namespace = self._pair.prefill.node.namespace
        right = await self._read(chain, block)
        assert await self._client.quarantine(namespace, chain[block : block + 1]) == 1
        wrong = right.view(np.float32)
        wrong += 0.05 * np.abs(wrong).max() * np.random.default_rng(1).standard_normal(wrong.shape, np.float32)
        ticket = await self._client.allocate(
            namespace, self._spec, chain[block : block + 1], chain[block - 1 : block], ttl_s=30
        )
        self._memory.array[:] = right
        slices = np.array([[0, ticket.offsets[0, 0], len(right)]], np.int64)
        peer = self._messenger.connect(ticket.endpoint)
        await asyncio.wrap_future(peer.write(ticket.key, self._region, slices, deadline_s=30))
        digests = layer_digests(right[None], self._spec, 0, np.array([BLOCK], np.int32))
        assert await self._client.seal(ticket, [digests]) == 1

    async def _read(self, chain: Any, block: int) -> Any:
        lease: Lease | None = await self._client.pin(self._pair.prefill.node.namespace, chain, lease_s=30)
        assert lease is not None
        offset = int(lease.offsets[0, block])
        await self._client.unpin(lease)
        return self._pair.pool.memory.array[offset : offset + self._spec.slot_nbytes(0)].copy()

    async def close(self) -> None:
        await self._client.close()
        self._messenger.close()
        self._memory.close()


@pytest.mark.parametrize("parity", [0.0, 1.0])
async def test_only_parity_mode_finds_a_block_that_was_computed_wrongly(
    parity: float, start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, tmp_path: Any
) -> None:
    pair = await start_pair(pool=True, parity=parity)
    ids = prompt(LENGTH)
    right = greedy(model, ids, 12)
    assert (await pair.ask(ids, "first")).token_ids == right
    bad = BadHost(pair, model, tmp_path)
    try:
        await bad.spoil(ids, 7)
    finally:
        await bad.close()
    counters = pair.prefill.node.counters.snapshot
    pair.forget()
    second = await pair.ask(ids, "second")
    assert "digest_mismatches" not in counters()
    if not parity:  # the negative control: nothing else finds it
        assert second.cached_tokens == 64
        assert second.token_ids != right
        return
    assert second.token_ids == right
    assert second.cached_tokens <= 56
    assert counters()["parity_mismatches"] == 1
    pair.forget()
    for face in (pair.prefill, pair.decode):
        face.node.parity = ParityChecker(face.node.memory, 0.0)
    third = await pair.ask(ids, "third")
    assert third.cached_tokens == 64  # the block was stored again, from what was computed
    assert third.token_ids == right


async def test_what_was_found_wrong_is_shared_no_more_on_either_node(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy, tmp_path: Any
) -> None:
    pair = await start_pair(pool=True)
    ids = prompt(LENGTH)
    await pair.ask(ids, "first")
    bad = BadHost(pair, model, tmp_path)
    try:
        await bad.spoil(ids, 7)
    finally:
        await bad.close()
    pair.forget()
    assert (await pair.ask(ids, "second")).token_ids != greedy(model, ids, 12)  # both nodes hold the wrong block now
    for share in (1.0, 0.0):
        for face in (pair.prefill, pair.decode):
            face.node.parity = ParityChecker(face.node.memory, share)
        assert (await pair.ask(ids, f"share {share}")).token_ids == greedy(model, ids, 12)


async def test_kv_of_any_chunks_and_decode_steps_is_within_the_tolerance(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair(pool=True, parity=1.0)
    history = prompt(20)
    for turn in range(6):
        answer = await pair.ask(history, f"turn {turn}")
        assert answer.token_ids == greedy(model, history, 12)
        history = [*history, *answer.token_ids, *prompt(3 + 5 * turn, seed=turn)]
        pair.forget()
    counters = pair.prefill.node.counters.snapshot()
    assert counters["parity_checked_blocks"] >= 12
    assert "parity_mismatches" not in counters


def test_a_share_of_requests_is_chosen_and_all_nodes_choose_alike() -> None:
    memory: Any = SimpleNamespace(spec=SimpleNamespace(windowed=(), lasting=(0,)))
    none, some, all_of_them = (ParityChecker(memory, share) for share in (0.0, 0.25, 1.0))
    ids = [f"request {i}" for i in range(2000)]
    assert not any(none.cut(name, 10) is not None for name in ids)
    assert {all_of_them.cut(name, 10) for name in ids} == set(range(10))
    assert all_of_them.cut("request 0", 0) is None
    chosen = [name for name in ids if some.cut(name, 10) is not None]
    assert 400 < len(chosen) < 600
    assert [some.cut(name, 10) for name in chosen] == [all_of_them.cut(name, 10) for name in chosen]
