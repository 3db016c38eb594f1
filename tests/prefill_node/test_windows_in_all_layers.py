"""Models whose layers all have windows: O(window) slots and stored blocks, and reuse where a window is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from engine.rolling import RollingWindow
from kvpool.service import PoolService
from moonpool_proto.v1.worker_pb2 import RollingWindow as RollingMessage
from tests.worker.node_pair import BLOCK, Pair, Start
from tests.worker.window_reports import assert_reports_tell_what_is_usable
from worker.policy import slots_of_prompt

WINDOW, CHUNK = 24, 32
WINDOW_BLOCKS = 3
"""Blocks before a block that its first token sees: 23 tokens."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RandomModelSpec(family="mistral", layers=3, window=WINDOW, vocab=256, max_len=512, scale=3.0, seed=4)
    return write_random_model(tmp_path_factory.mktemp("mistral"), spec)


@pytest.fixture(scope="module")
def mistral(path: Path) -> Model:
    return load_model(path, threads=1)


def stored_blocks(pair: Pair) -> int:
    """Return the number of blocks in the pool, all of the model's only part."""
    assert pair.pool is not None
    parts = pair.prefill.node.stored_parts
    assert parts.all == [parts.windowed]
    assert {block.kv_namespace for block in pair.pool.core.store.index} <= {parts.kv_namespace}
    return sum(1 for _ in pair.pool.core.store.index)


async def test_a_long_prompt_takes_slots_and_room_in_the_pool_for_its_window_only(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(pool=True, path=path, capacity_tokens=1024, max_batch=4, prefill_options={"max_batch": 4})
    request = await pair.ask(prompt(430), "long", max_tokens=40)
    assert request.token_ids == greedy(mistral, prompt(430), 40)
    for face in (pair.prefill, pair.decode):
        memory = face.node.memory
        seen = 4 * (WINDOW_BLOCKS + 2) + 2 * slots_of_prompt(WINDOW_BLOCKS, CHUNK // BLOCK)
        assert memory.slots_per_group == (seen,)
        assert memory.nbytes == seen * memory.spec.block_nbytes
    pushed = pair.prefill.node.counters.snapshot()["kv_push_bytes"]
    assert pushed == (WINDOW_BLOCKS + 1) * pair.prefill.node.memory.spec.block_nbytes
    # Of the prompt's 53 whole blocks and the answer's, those before both ends, and the answer's partial block.
    assert stored_blocks(pair) == 2 * WINDOW_BLOCKS + 1


@pytest.mark.parametrize("storage", ["exact", "int8"])
async def test_the_next_turn_goes_on_where_the_answer_ended(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any, storage: Any
) -> None:
    pair = await start_pair(pool=True, path=path, storage=storage)
    dialogue = prompt(100)
    for turn in range(4):
        request = await pair.ask(dialogue, f"turn {turn}", max_tokens=20)
        if storage == "exact" or not turn:
            assert request.token_ids == greedy(mistral, dialogue, 20)
        if turn:  # all but the tokens since the last answer's end, which has no KV for its last token
            assert request.cached_tokens == len(dialogue) - 10 - 1
            timing = request.messages[0].timing
            assert timing.cached_dram_tokens == request.cached_tokens
        dialogue = [*dialogue, *request.token_ids, *prompt(10, seed=turn + 1)]
        pair.forget()


@pytest.mark.parametrize("length", [3, 9, 20, 41])
async def test_a_prompt_that_is_shorter_than_the_window_or_a_block_is_reused(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any, length: int
) -> None:
    pair = await start_pair(pool=True, path=path)
    first = await pair.ask(prompt(length), "first", max_tokens=2)
    pair.forget()
    again = [*prompt(length), first.token_ids[0], *prompt(5, seed=1)]
    request = await pair.ask(again, "again")
    assert request.token_ids == greedy(mistral, again, 12)
    assert request.cached_tokens == length + 1


async def test_a_prompt_that_ends_inside_another_is_computed(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    """The pool has the windows before the other prompt's end and its answer's only."""
    pair = await start_pair(pool=True, path=path)
    await pair.ask(prompt(200), "first")
    pair.forget()
    for length in (8, 24, 25, 100, 190, 199):
        request = await pair.ask(prompt(length), f"inside {length}", max_tokens=1)
        assert request.token_ids == greedy(mistral, prompt(length), 1)
        assert request.cached_tokens == 0
        pair.forget()
        assert pair.pool is not None
        pair.pool.core.flush(0, None, dram_only=False)
        await pair.ask(prompt(200), f"first {length}")
        pair.forget()


async def test_a_beginning_that_prompts_of_a_worker_share_is_reused_from_the_third_one_on(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    """The second one finds its beginning in the worker's index, without content, and stores the window at its end."""
    pair = await start_pair(pool=True, path=path, prefill_options={"max_batch": 1})
    cached = list[int]()
    for i, shared in enumerate([80, 0, 80, 80]):  # the second prompt takes the window slots of the first
        ids = [*prompt(shared), *prompt(380 - shared, seed=i + 1)]
        request = await pair.ask(ids, f"request {i}")
        assert request.token_ids == greedy(mistral, ids, 12)
        cached.append(request.cached_tokens)
        if i == 2:
            pair.forget()
    assert cached == [0, 0, 0, 80]


async def test_a_head_that_the_frontend_names_is_reused_from_the_second_time_on(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(pool=True, path=path)
    cached = list[int]()
    for i in range(3):
        ids = [*prompt(10 * BLOCK + 5), *prompt(60, seed=i + 1)]
        request = await pair.ask(ids, f"request {i}", head_tokens=10 * BLOCK + 5)
        assert request.token_ids == greedy(mistral, ids, 12)
        cached.append(request.cached_tokens)
        pair.forget()
    assert cached == [0, 10 * BLOCK, 10 * BLOCK]


async def test_a_window_with_a_missing_block_is_not_used(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(pool=True, path=path)
    first = await pair.ask(prompt(200), "first", max_tokens=60)
    dialogue = [*prompt(200), *first.token_ids, *prompt(10, seed=1)]
    pair.forget()
    assert pair.pool is not None
    # The block before the last whole one of the answer's: what remains is the window before the prompt's end.
    last = (200 + 59) // BLOCK
    key = bytes(pair.submit(dialogue, "keys").chain[16 * (last - 2) : 16 * (last - 1)])
    assert pair.pool.core.quarantine(pair.prefill.node.namespace, [key]) == 1
    request = await pair.ask(dialogue, "again")
    assert request.token_ids == greedy(mistral, dialogue, 12)
    assert request.cached_tokens == 200


@pytest.mark.parametrize("storage", ["exact", "int8"])
async def test_a_flipped_bit_is_found_and_never_used(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any, storage: Any
) -> None:
    pair = await start_pair(pool=True, path=path, storage=storage)
    await pair.ask(prompt(160), "first")
    pair.forget()
    assert pair.pool is not None
    for block in pair.pool.core.store.index:
        pair.pool.region.array[block.offsets[0] + 5] ^= 16
    request = await pair.ask([*prompt(160), 1, 2, 3], "again")
    assert request.token_ids == greedy(mistral, [*prompt(160), 1, 2, 3], 12)
    assert request.cached_tokens == 0
    assert pair.prefill.node.counters.snapshot()["digest_mismatches"] >= 1


async def test_a_prefix_is_reused_in_the_worker_s_own_slots(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(path=path)
    first = await pair.ask(prompt(200), "first")
    again = await pair.ask([*prompt(200), *prompt(9, seed=1)], "again")
    assert (first.cached_tokens, again.cached_tokens) == (0, 200)
    assert again.token_ids == greedy(mistral, [*prompt(200), *prompt(9, seed=1)], 12)


async def test_many_answers_at_once_take_each_other_s_slots(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(pool=True, path=path, max_batch=3, prefill_options={"max_batch": 3})
    prompts = [prompt(20 + 31 * i, seed=i) for i in range(9)]
    for ids, request in zip(prompts, await pair.ask_all(prompts, max_tokens=30), strict=True):
        assert request.token_ids == greedy(mistral, ids, 30)


async def test_parity_samples_compare_nothing(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(pool=True, path=path, parity=1.0)
    await pair.ask(prompt(100), "first")
    pair.forget()
    request = await pair.ask([*prompt(100), 7], "again")
    assert request.token_ids == greedy(mistral, [*prompt(100), 7], 12)
    assert request.cached_tokens == 96


async def test_a_pool_node_of_an_earlier_version_leases_no_window(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leases the leading run, which is a window only if it is no longer than one."""
    pin = PoolService.Pin

    async def earlier(self: PoolService, request: Any, context: Any) -> Any:
        request.window_blocks = 0
        return await pin(self, request, context)

    monkeypatch.setattr(PoolService, "Pin", earlier)
    pair = await start_pair(pool=True, path=path)
    cached = list[int]()
    for i, ids in enumerate([prompt(24), [*prompt(24), 1], prompt(48), [*prompt(48), 1]]):
        request = await pair.ask(ids, f"request {i}")
        assert request.token_ids == greedy(mistral, ids, 12)
        cached.append(request.cached_tokens)
        pair.forget()
    # Of the last prompt, the pool node has six blocks and leases them all.
    assert cached == [0, 24, 24, 0]


async def test_a_turn_waits_for_its_window_and_its_partial_block_on_ssd(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, greedy: Any, tmp_path: Path
) -> None:
    pair = await start_pair(pool={"pool_ssd_dir": tmp_path, "pool_ssd_bytes": 64 << 20}, path=path)
    assert pair.pool is not None
    first = await pair.ask(prompt(60), "first")
    turn = [*prompt(60), *first.token_ids, *prompt(5, seed=1)]
    pair.forget()
    _, left = await pair.pool.flush(None, dram_only=True)
    assert left == 0
    second = await pair.ask(turn, "second")
    assert second.token_ids == greedy(mistral, turn, 12)
    timing = second.messages[0].timing
    assert (timing.cached_tokens, timing.cached_ssd_tokens) == (71, WINDOW_BLOCKS * BLOCK)
    assert timing.cached_dram_tokens + timing.cached_ssd_tokens == 71


@pytest.mark.parametrize("length", [10, 64, 65, 200])
async def test_endless_answers_are_those_of_brute_force(
    start_pair: Start, path: Path, mistral: Model, prompt: Any, length: int
) -> None:
    rolling = RollingWindow(sinks=0, window=64, slide=16, block_tokens=BLOCK)
    pair = await start_pair(pool=True, path=path)
    out = list(prompt(length))
    for _ in range(100):
        out.append(int(mistral.score(np.array(out, np.int32), rolling)[-1].argmax()))
    for name in ("one", "two"):
        submit = pair.submit(prompt(length), name, max_tokens=100)
        submit.rolling.CopyFrom(RollingMessage(sinks=0, window=64, slide=16))
        request = await pair.frontend.submit(submit)
        await request.ended.wait()
        assert request.failures == []
        assert request.token_ids == out[length:]
        await pair.at_rest()


async def test_a_worker_reports_what_it_can_reuse_of_its_own_memory(start_pair: Start, path: Path, prompt: Any) -> None:
    """Whatever prompt comes next, a directory of the reports finds what the worker's slots would share."""
    pair = await start_pair(path=path, prefill_options={"max_batch": 1}, max_batch=1)
    await assert_reports_tell_what_is_usable(pair, prompt)
