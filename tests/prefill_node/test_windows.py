"""Layers with windows: O(window) slots on every node, only what is seen is pushed and stored, and reuse ends where
it can go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from tests.worker.node_pair import BLOCK, Pair, Start
from tests.worker.window_reports import assert_reports_tell_what_is_usable
from worker.errors import StartupError
from worker.policy import WindowHold, slots_of_prompt
from worker.slot_memory import spec_of

WINDOW, CHUNK = 24, 32
WINDOW_BLOCKS = 3
"""Blocks before a block that its first token sees: 23 tokens."""


@pytest.fixture(scope="module")
def windowed_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("windowed"),
        RandomModelSpec(family="qwen2", layers=4, window=WINDOW, full_layers=2, vocab=256, max_len=512, scale=3.0),
    )


@pytest.fixture(scope="module")
def windowed(windowed_path: Path) -> Model:
    return load_model(windowed_path, threads=1)


@pytest.fixture
def most_held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The largest number of window slots that any request held at once."""
    most = [0]
    reach = WindowHold.reach

    def counted(self: WindowHold, first: int, end: int) -> None:
        reach(self, first, end)
        most[0] = max(most[0], len(self._held))

    monkeypatch.setattr(WindowHold, "reach", counted)
    return most


def pool_blocks(pair: Pair) -> tuple[int, int]:
    """Blocks in the pool: of the lasting groups, and of the windowed ones."""
    assert pair.pool is not None
    parts = pair.prefill.node.stored_parts
    assert parts.windowed is not None
    stored = [block.kv_namespace for block in pair.pool.core.store.index]
    return stored.count(parts[False].kv_namespace), stored.count(parts.windowed.kv_namespace)


async def test_a_long_prompt_takes_no_more_window_slots_than_its_window_and_a_chunk(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any, most_held: list[int]
) -> None:
    pair = await start_pair(
        pool=True, path=windowed_path, capacity_tokens=1024, max_batch=4, prefill_options={"max_batch": 4}
    )
    request = await pair.ask(prompt(430), "long", max_tokens=40)
    assert request.token_ids == greedy(windowed, prompt(430), 40)
    assert most_held[0] <= 2 * WINDOW_BLOCKS + CHUNK // BLOCK + 2
    for face in (pair.prefill, pair.decode):
        memory = face.node.memory
        lasting, seen = memory.slots_per_group
        assert (lasting, seen) == (128, 4 * 5 + 2 * (4 * 3 + 4 + 3))
        assert memory.nbytes == lasting * memory.spec.slot_nbytes(0) + seen * memory.spec.slot_nbytes(1)
    pushed = pair.prefill.node.counters.snapshot()["kv_push_bytes"]
    spec = pair.prefill.node.memory.spec
    assert pushed == 54 * spec.slot_nbytes(0) + (WINDOW_BLOCKS + 1) * spec.slot_nbytes(1)
    # The prompt's 53 whole blocks and the answer's; of the windowed ones, those before both ends.
    assert pool_blocks(pair) == (59, WINDOW_BLOCKS + WINDOW_BLOCKS + 1)


async def test_the_next_turn_goes_on_where_the_answer_ended(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(pool=True, path=windowed_path)
    dialogue = prompt(100)
    for turn in range(4):
        request = await pair.ask(dialogue, f"turn {turn}", max_tokens=20)
        assert request.token_ids == greedy(windowed, dialogue, 20)
        if turn:  # all but the tokens since the last answer's end, which has no KV for its last token
            assert request.cached_tokens == len(dialogue) - 10 - 1
        dialogue = [*dialogue, *request.token_ids, *prompt(10, seed=turn + 1)]
        pair.forget()


async def test_a_full_pool_evicts_windowed_blocks_that_dialogues_have_left_behind(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any
) -> None:
    spec = spec_of(windowed.kv_groups, BLOCK)
    assert spec.slot_nbytes(0) == spec.slot_nbytes(1)
    pair = await start_pair(pool={"pool_bytes": 74 * spec.slot_nbytes(0)}, path=windowed_path)
    dialogue = prompt(60)
    for turn in range(12):
        request = await pair.ask(dialogue, f"turn {turn}", max_tokens=20)
        assert request.token_ids == greedy(windowed, dialogue, 20)
        if turn:
            assert request.cached_tokens > len(dialogue) - 10 - 1 - BLOCK  # perhaps without the partial block
        dialogue = [*dialogue, *request.token_ids, *prompt(10, seed=turn + 1)]
        pair.forget()
    lasting, seen = pool_blocks(pair)
    assert lasting >= (len(dialogue) - 11) // BLOCK  # all of the dialogue: only windowed blocks were evicted
    assert WINDOW_BLOCKS <= seen < 40
    assert pair.pool is not None
    assert pair.pool.core.validate() == []


async def test_a_prefix_that_ends_inside_another_prompt_is_reused_from_the_third_time_on(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(pool=True, path=windowed_path)
    cached = list[int]()
    for i in range(3):
        ids = [*prompt(10 * BLOCK), *prompt(60, seed=i + 1)]
        request = await pair.ask(ids, f"request {i}")
        assert request.token_ids == greedy(windowed, ids, 12)
        cached.append(request.cached_tokens)
        pair.forget()
    assert cached == [0, 0, 10 * BLOCK]


@pytest.mark.parametrize("head_tokens", [10 * BLOCK, 10 * BLOCK + 5])
async def test_a_shared_head_that_the_frontend_names_is_reused_from_the_second_time_on(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any, head_tokens: int
) -> None:
    pair = await start_pair(pool=True, path=windowed_path)
    cached = list[int]()
    for i in range(3):
        ids = [*prompt(head_tokens), *prompt(60, seed=i + 1)]
        request = await pair.ask(ids, f"request {i}", head_tokens=head_tokens)
        assert request.token_ids == greedy(windowed, ids, 12)
        cached.append(request.cached_tokens)
        pair.forget()
    assert cached == [0, 10 * BLOCK, 10 * BLOCK]
    # The head's windowed blocks once, and for each request those before the ends of its prompt and its answer.
    ends = [len(ids) // BLOCK, (len(ids) + 11) // BLOCK]
    of_each = {block for end in ends for block in range(end - WINDOW_BLOCKS, end)}
    assert pool_blocks(pair)[1] == WINDOW_BLOCKS + 3 * (len(of_each) + 1)  # and the answer's partial block


async def test_heads_of_their_own_behind_a_shared_beginning_are_reused_from_the_second_time_on(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any, most_held: list[int]
) -> None:
    """The beginning is where prompts were seen to part, the head ends behind it: both are kept."""
    pair = await start_pair(pool=True, path=windowed_path)
    cached = list[int]()
    for i, user in enumerate([1, 2, 3, 2, 2, 4]):
        head = [*prompt(12 * BLOCK), *prompt(10 * BLOCK, seed=user)]
        ids = [*head, *prompt(60, seed=10 + i)]
        request = await pair.ask(ids, f"request {i}", head_tokens=len(head))
        assert request.token_ids == greedy(windowed, ids, 12)
        cached.append(request.cached_tokens)
        pair.forget()
    shared, whole = 12 * BLOCK, 22 * BLOCK
    assert cached == [0, 0, shared, whole, whole, shared]
    assert most_held[0] <= slots_of_prompt(WINDOW_BLOCKS, CHUNK // BLOCK)


@pytest.mark.parametrize("head_tokens", [0, 3, 4000, 2**32 - 1])
async def test_any_length_of_a_shared_head_is_correct(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any, head_tokens: int
) -> None:
    pair = await start_pair(pool=True, path=windowed_path)
    for i in range(2):
        request = await pair.ask(prompt(100), f"request {i}", head_tokens=head_tokens)
        assert request.token_ids == greedy(windowed, prompt(100), 12)
        pair.forget()
    assert request.cached_tokens == 12 * BLOCK


async def test_a_prefix_is_reused_in_the_worker_s_own_slots(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any
) -> None:
    pair = await start_pair(path=windowed_path)
    first = await pair.ask(prompt(200), "first")
    again = await pair.ask([*prompt(200), *prompt(9, seed=1)], "again")
    assert (first.cached_tokens, again.cached_tokens) == (0, 200)
    assert again.token_ids == greedy(windowed, [*prompt(200), *prompt(9, seed=1)], 12)


@pytest.mark.parametrize("part", ["lasting", "windowed"])
@pytest.mark.parametrize("storage", ["exact", "int8"])
async def test_a_flipped_bit_in_either_part_is_found_and_never_used(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any, part: str, storage: Any
) -> None:
    pair = await start_pair(pool=True, path=windowed_path, storage=storage)
    await pair.ask(prompt(160), "first")
    pair.forget()
    assert pair.pool is not None
    stored = pair.prefill.node.stored_parts
    namespace = stored[part == "windowed"].kv_namespace
    damaged = 0
    for block in pair.pool.core.store.index:
        if block.kv_namespace == namespace:
            pair.pool.region.array[block.offsets[0] + 5] ^= 16
            damaged += 1
    assert damaged
    request = await pair.ask([*prompt(160), 1, 2, 3], "again")
    assert request.token_ids == greedy(windowed, [*prompt(160), 1, 2, 3], 12)
    assert request.cached_tokens == 0
    assert pair.prefill.node.counters.snapshot()["digest_mismatches"] >= 1


async def test_a_worker_with_blocks_longer_than_the_window_does_not_start(start_pair: Start, tmp_path: Path) -> None:
    path = write_random_model(
        tmp_path / "short", RandomModelSpec(family="qwen2", layers=2, window=6, full_layers=1, vocab=256, max_len=512)
    )
    with pytest.raises(
        Exception, match="sliding_window is 6 tokens, shorter than a block: set block_tokens to at most 6"
    ):
        await start_pair(path=path)


async def test_sampled_answers_are_those_of_a_model_that_keeps_everything(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any
) -> None:
    """Several sequences at once, whose blocks take each other's slots."""
    pair = await start_pair(pool=True, path=windowed_path, max_batch=3, prefill_options={"max_batch": 3})
    prompts = [prompt(int(length), seed=i) for i, length in enumerate(np.random.default_rng(5).integers(20, 300, 9))]
    for ids, request in zip(prompts, await pair.ask_all(prompts, max_tokens=30), strict=True):
        assert request.token_ids == greedy(windowed, ids, 30)


async def test_a_model_with_every_kind_of_small_kv_goes_on_where_it_ended_and_finds_flipped_bits(
    start_pair: Start, tmp_path: Path, prompt: Any, greedy: Any
) -> None:
    """Multi-query attention, windows, shared KV and int8 KV, through two nodes and the pool."""
    spec = RandomModelSpec(
        family="moonpool", layers=6, heads=4, kv_heads=1, head_dim=16, vocab=256, max_len=512, window=WINDOW, scale=3.0,
        extra={
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "kv_owners": [0, 1, 2, 3, 0, 1],
            "kv_dtype": "int8",
        },
    )  # fmt: skip
    path = write_random_model(tmp_path / "small", spec)
    model = load_model(path, threads=1)
    pair = await start_pair(pool=True, path=path)
    assert pair.prefill.node.memory.spec.bytes_per_token == 4 * 2 * (16 + 2 * 2)
    dialogue = prompt(100)
    for turn in range(3):
        request = await pair.ask(dialogue, f"turn {turn}", max_tokens=20)
        assert request.token_ids == greedy(model, dialogue, 20)
        assert request.cached_tokens == (len(dialogue) - 10 - 1 if turn else 0)
        dialogue = [*dialogue, *request.token_ids, *prompt(10, seed=turn + 1)]
        pair.forget()
    assert pair.pool is not None
    for block in pair.pool.core.store.index:
        pair.pool.region.array[block.offsets[0] + 3] ^= 2
    request = await pair.ask(dialogue, "damaged", max_tokens=20)
    assert request.token_ids == greedy(model, dialogue, 20)
    assert request.cached_tokens == 0


async def test_requests_take_turns_with_the_window_slots_of_one_prompt(
    start_pair: Start, windowed_path: Path, windowed: Model, prompt: Any, greedy: Any
) -> None:
    least = slots_of_prompt(WINDOW_BLOCKS, CHUNK // BLOCK)
    pair = await start_pair(pool=True, path=windowed_path, window_slots=least, prefill_options={"window_slots": least})
    for face in (pair.prefill, pair.decode):
        assert face.node.memory.slots_per_group[1] == least
    prompts = [prompt(150 + 10 * i, seed=i) for i in range(6)]
    for ids, request in zip(prompts, await pair.ask_all(prompts, max_tokens=30), strict=True):
        assert request.token_ids == greedy(windowed, ids, 30)


async def test_a_worker_with_too_few_window_slots_for_one_prompt_does_not_start(
    start_pair: Start, windowed_path: Path
) -> None:
    least = slots_of_prompt(WINDOW_BLOCKS, CHUNK // BLOCK)
    with pytest.raises(StartupError, match=f"--window-slots must be at least {least}, .* got {least - 1}"):
        await start_pair(path=windowed_path, prefill_options={"window_slots": least - 1})


async def test_a_worker_reports_what_it_can_reuse_of_its_own_memory(
    start_pair: Start, windowed_path: Path, prompt: Any
) -> None:
    """Whatever prompt comes next, a directory of the reports finds what the worker's slots would share."""
    pair = await start_pair(path=windowed_path, prefill_options={"max_batch": 1}, max_batch=1)
    await assert_reports_tell_what_is_usable(pair, prompt)
