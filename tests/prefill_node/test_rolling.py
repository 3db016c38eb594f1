"""Endless requests with sinks and a rolling window: right tokens through any hand-off, in constant memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Model, load_model
from engine.backends.registry import BACKENDS
from engine.random_model import RandomModelSpec, write_random_model
from engine.rolling import RollingWindow
from moonpool_proto.v1.worker_pb2 import RollingWindow as RollingMessage
from moonpool_proto.v1.worker_pb2 import Submit
from tests.worker.node_pair import BLOCK, Pair, Start
from worker.request import Request

ROLLING = RollingWindow(sinks=3, window=64, slide=16, block_tokens=BLOCK)
SHAPES = {
    "full": RandomModelSpec(layers=3, vocab=256, max_len=96, scale=3.0, seed=3),
    "windows": RandomModelSpec(
        family="qwen2", layers=4, window=24, full_layers=2, vocab=256, max_len=96, scale=3.0, seed=3
    ),
}


@pytest.fixture(scope="module", params=sorted(SHAPES))
def shape(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("shapes") / request.param, SHAPES[request.param])


@pytest.fixture(scope="module")
def shaped(shape: Path) -> Model:
    return load_model(shape, threads=1)


def endless(pair: Pair, ids: list[int], name: str, *, max_tokens: int, **options: Any) -> Submit:
    submit = pair.submit(ids, name, max_tokens=max_tokens, **options)
    submit.rolling.CopyFrom(RollingMessage(sinks=ROLLING.sinks, window=ROLLING.window, slide=ROLLING.slide))
    return submit


async def ask(pair: Pair, ids: list[int], name: str, *, max_tokens: int, **options: Any) -> Any:
    request = await pair.frontend.submit(endless(pair, ids, name, max_tokens=max_tokens, **options))
    await request.ended.wait()
    assert request.failures == []
    await pair.at_rest()
    return request


def answer(model: Model, ids: list[int], count: int) -> list[int]:
    """The greedy answer of brute force over what each token sees."""
    out = list(ids)
    for _ in range(count):
        out.append(int(model.score(np.array(out, np.int32), ROLLING)[-1].argmax()))
    return out[len(ids) :]


@pytest.mark.parametrize("length", [10, 63, 64, 65, 80, 81, 200])
async def test_answers_are_those_of_brute_force(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any, length: int
) -> None:
    pair = await start_pair(pool=True, path=shape)
    ids, count = prompt(length), 120
    expected = answer(shaped, ids, count)
    request = await ask(pair, ids, "one", max_tokens=count)
    assert request.token_ids == expected
    if length > ROLLING.window:  # another request stores what is reused of its beginning
        await pair.ask(ids[: ROLLING.window + 1], "plain", max_tokens=1)
    again = await ask(pair, ids, "two", max_tokens=count)
    assert again.token_ids == expected
    assert again.cached_tokens == min((length - 1) // BLOCK * BLOCK, ROLLING.window)


async def test_a_request_goes_on_on_other_nodes_from_any_token(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any
) -> None:
    pair = await start_pair(path=shape)
    ids = prompt(50)
    expected = answer(shaped, ids, 90)
    for split in (5, 14, 30, 55, 89):
        request = await ask(pair, ids + expected[:split], f"split {split}", max_tokens=90, generated=split, attempt=2)
        assert [request.tokens[i] for i in range(split, 90)] == expected[split:]


@pytest.mark.parametrize("length", [30, 64, 130])
async def test_a_worker_that_decodes_what_it_has_prefilled_gives_the_same_answer(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any, length: int
) -> None:
    pair = await start_pair(pool=True, path=shape)
    for name in ("one", "two"):
        submit = endless(pair, prompt(length), name, max_tokens=90)
        submit.placement.ClearField("decode")
        request = await pair.frontend.submit(submit)
        await request.ended.wait()
        assert request.failures == []
        assert request.token_ids == answer(shaped, prompt(length), 90)
    await pair.at_rest()


@pytest.mark.parametrize("length", [65, 200])
async def test_a_prompt_in_which_the_window_slides_is_computed_by_one_node(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any, length: int
) -> None:
    pair = await start_pair(path=shape, helpers=1, prefill_options={"prefill_chunk_tokens": 24})
    request = await ask(pair, prompt(length), "grouped", max_tokens=20)
    assert request.token_ids == answer(shaped, prompt(length), 20)


async def test_a_sequence_holds_as_many_slots_as_its_window_and_one_more(
    start_pair: Start, shape: Path, prompt: Any
) -> None:
    pair = await start_pair(path=shape)
    request = await pair.frontend.submit(endless(pair, prompt(20), "long", max_tokens=400))
    held = set()
    for count in range(1, 400, 20):
        await request.reaches(count)
        held.add(pair.decode.node.slots.pool.num_held)
    await request.ended.wait()
    assert held - {0} == {ROLLING.capacity // BLOCK}
    await pair.at_rest()


async def test_a_node_reports_all_that_is_left_to_compute_but_only_what_it_holds(
    start_pair: Start, shape: Path, prompt: Any
) -> None:
    pair = await start_pair(path=shape)
    node, submit = pair.prefill.node, endless(pair, prompt(200), "long", max_tokens=400)
    request = Request.from_proto(submit, vocab_size=256, max_model_len=96, block_tokens=BLOCK)
    held = node.hold(request, remaining_prefill_tokens=190)
    assert (held.remaining_prefill_tokens, held.prompt_tokens, held.max_new_tokens) == (190, ROLLING.capacity, 0)
    del node.held["long"]


async def test_what_a_window_has_left_behind_is_never_stored(start_pair: Start, shape: Path, prompt: Any) -> None:
    pair = await start_pair(pool=True, path=shape)
    assert pair.pool is not None
    await ask(pair, prompt(200), "long", max_tokens=20)
    assert not len(pair.pool.core.store.index)
    await ask(pair, prompt(40), "short", max_tokens=60)
    kept = pair.prefill.node.stored_parts.kv_namespace
    assert [block.kv_namespace for block in pair.pool.core.store.index].count(kept) == 40 // BLOCK


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sinks": 5}, "endless: sinks must be in 0..4"),
        ({"slide": 12}, "endless: slide must be whole blocks of 8 tokens, got 12"),
        ({"window": 16}, "endless: window must be whole blocks of 8 tokens and more than slide"),
        ({"window": 96}, "endless: window must be at most 88 tokens, a block less than max_model_len (96), got 96"),
    ],
)
async def test_a_bad_window_is_refused_by_its_field(
    start_pair: Start, shape: Path, prompt: Any, fields: dict[str, int], words: str
) -> None:
    pair = await start_pair(path=shape)
    submit = endless(pair, prompt(20), "bad", max_tokens=9)
    submit.rolling.MergeFrom(RollingMessage(**fields))
    request = await pair.frontend.submit(submit)
    await request.ended.wait()
    assert request.failures[0].code == "bad_endless"
    assert words in request.failures[0].message


async def test_a_backend_that_does_not_compute_it_refuses_it(
    start_pair: Start, shape: Path, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = replace(BACKENDS["compiled"], computes_endless=False)
    monkeypatch.setattr("engine.model.choose_backend", lambda name, placement: without)
    pair = await start_pair(path=shape)
    request = await pair.frontend.submit(endless(pair, prompt(20), "refused", max_tokens=9))
    await request.ended.wait()
    assert request.failures[0].code == "bad_endless"
    assert "engine-backend compiled does not compute it" in request.failures[0].message


async def test_a_flipped_bit_before_the_first_slide_is_found(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any
) -> None:
    pair = await start_pair(pool=True, path=shape)
    assert pair.pool is not None
    await ask(pair, prompt(60), "first", max_tokens=1)
    pair.forget()
    for block in pair.pool.core.store.index:
        pair.pool.region.array[block.offsets[0] + 5] ^= 16
    request = await ask(pair, prompt(60) + prompt(100, seed=1), "again", max_tokens=40)
    assert request.token_ids == answer(shaped, prompt(60) + prompt(100, seed=1), 40)
    assert request.cached_tokens == 0
    assert pair.prefill.node.counters.snapshot()["digest_mismatches"] >= 1


@pytest.mark.parametrize("length", [40, 130])
async def test_blocks_damaged_on_the_way_are_pushed_again(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any, length: int
) -> None:
    pair = await start_pair(path=shape)
    memory = pair.prefill.node.memory
    whole, damaged = memory.one_layer_digests, 0

    def wrong_at_first(layer: int, slots: Any, valid: Any) -> Any:
        nonlocal damaged
        damaged += 1
        return whole(layer, slots, valid) ^ np.uint64(damaged == 1)

    memory.one_layer_digests = wrong_at_first  # type: ignore[method-assign]
    request = await ask(pair, prompt(length), "pushed", max_tokens=90)
    assert request.token_ids == answer(shaped, prompt(length), 90)
    assert pair.prefill.node.counters.snapshot()["repushed_blocks"] >= 1


async def test_parity_compares_nothing_of_a_request_whose_window_slides(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any
) -> None:
    pair = await start_pair(pool=True, path=shape, parity=1.0)
    for name in ("one", "two"):
        request = await ask(pair, prompt(60), name, max_tokens=90)
        assert request.token_ids == answer(shaped, prompt(60), 90)
        pair.forget()
    counters = pair.decode.node.counters.snapshot(), pair.prefill.node.counters.snapshot()
    assert all(counter.get("parity_mismatches", 0) == 0 for counter in counters)


async def test_kv_rounded_in_the_pool_is_reused_up_to_the_first_slide(
    start_pair: Start, shape: Path, shaped: Model, prompt: Any
) -> None:
    pair = await start_pair(pool=True, path=shape, storage="int8")
    cold = await ask(pair, prompt(60), "cold", max_tokens=90)
    assert cold.token_ids == answer(shaped, prompt(60), 90)
    pair.forget()
    warm = await ask(pair, prompt(60), "warm", max_tokens=90)
    timing = warm.messages[0].timing
    assert timing.cached_tokens == timing.approximate_tokens >= 56
    assert len(warm.token_ids) == 90
