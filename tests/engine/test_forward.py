"""Logits agree with transformers for every family, and do not depend on how sequences are cut, paged and batched."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import ForwardBatch, InvalidBatch, PagedCache, SequenceChunk, load_model
from engine.backends.registry import BATCH_INVARIANT

TOLERANCE = 1e-4
BACKENDS = ["compiled", "torch"]


def test_score_agrees_with_transformers(family, models, reference):
    ids = np.random.default_rng(3).integers(0, 256, 70).astype(np.int32)
    scores = models(family).score(ids)
    assert scores.dtype == np.float32
    assert scores.shape == (70, 256)
    np.testing.assert_allclose(scores, reference(family, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mixed_steps_agree_with_transformers(family, backend, models, runner, reference):
    run = runner(models(family, backend=backend), [60, 33, 5])
    want = [reference(family, ids) for ids in run.sequences]
    pieces = [
        [(0, 0, 41)],
        [(1, 0, 20), (0, 41, 1)],
        [(0, 42, 1), (2, 0, 5), (1, 20, 9)],
        [(1, 29, 1), (0, 43, 16)],
        [(0, 59, 1), (1, 30, 3)],
    ]
    for step in pieces:
        for (sequence, start, size), logits in zip(step, run.step(*step), strict=True):
            np.testing.assert_allclose(logits, want[sequence][start + size - 1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunking_and_paging_gives_the_dense_logits(backend, models, runner, data):
    model = models("qwen2-two-groups", backend=backend)
    lengths = data.draw(st.lists(st.integers(1, 48), min_size=1, max_size=3))
    run = runner(model, lengths, data.draw(st.sampled_from([1, 3, 8, 16])), data.draw(st.integers(0, 9)))
    want = [model.score(ids) for ids in run.sequences]
    done = [0] * len(lengths)
    while unfinished := [i for i, length in enumerate(lengths) if done[i] < length]:
        chosen = data.draw(st.lists(st.sampled_from(unfinished), min_size=1, unique=True))
        step = [(i, done[i], data.draw(st.integers(1, lengths[i] - done[i]))) for i in chosen]
        for (i, start, size), logits in zip(step, run.step(*step), strict=True):
            np.testing.assert_allclose(logits, want[i][start + size - 1], atol=TOLERANCE, rtol=0)
            done[i] = start + size


def test_a_long_chunk_after_a_prefix_is_tiled_correctly(models, runner):
    model = models("qwen2-two-groups")
    run = runner(model, [700], block_tokens=16)
    want = model.score(run.sequences[0])
    run.step((0, 0, 100))
    np.testing.assert_allclose(run.step((0, 100, 600))[0], want[-1], atol=TOLERANCE, rtol=0)


def test_greedy_margins_of_enlarged_weights_are_clear(models):
    scores = np.sort(models("llama").score(np.arange(64, dtype=np.int32)), axis=1)
    assert np.median(scores[:, -1] - scores[:, -2]) > 100 * TOLERANCE


def test_logits_are_returned_only_where_wanted(models, runner):
    run = runner(models("llama"), [9, 9, 9])
    chunks = [run.chunk(0, 0, 9), run.chunk(1, 0, 9, want_logits=False), run.chunk(2, 0, 9)]
    logits = run.model.forward(ForwardBatch(chunks), run.cache)
    assert logits.shape == (2, 256)
    np.testing.assert_allclose(logits[1], run.model.score(run.sequences[2])[-1], atol=TOLERANCE, rtol=0)
    assert run.model.forward(ForwardBatch([run.chunk(1, 0, 9, want_logits=False)]), run.cache).shape == (0, 256)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_row_of_a_chunk_may_be_asked_for(backend, models, runner):
    run = runner(models("qwen2-two-groups", backend=backend), [37, 9, 20])
    want = [run.model.score(ids) for ids in run.sequences]
    run.step((0, 0, 7))
    chunks = [run.chunk(1, 0, 9), run.chunk(0, 7, 30, every=True), run.chunk(2, 0, 20, want_logits=False)]
    logits = run.model.forward(ForwardBatch(chunks), run.cache).numpy()
    np.testing.assert_allclose(logits, np.concatenate([want[1][-1:], want[0][7:]]), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_made_from_the_last_one_has_the_same_bits_as_a_new_one(backend, models, runner):
    run = runner(models("llama", backend=backend), [20, 9])
    run.step((0, 0, 12), (1, 0, 3))
    step = run.model.flatten(ForwardBatch([run.chunk(0, 12, 1), run.chunk(1, 3, 1)]), run.cache)
    for at in range(1, 6):
        run.model.run(step, run.cache)
        step = step.advanced(np.array([run.sequences[0][12 + at], run.sequences[1][3 + at]]), run.model.config)
        logits = run.model.run(step, run.cache).cpu().numpy()
        assert np.array_equal(logits, run.step((0, 12 + at, 1), (1, 3 + at, 1)))


def test_a_step_made_from_the_last_one_is_validated(models, runner):
    model = models("llama")
    run = runner(model, [8])  # two blocks of four tokens

    def step(start, token=0):
        chunk = SequenceChunk(np.array([token], np.int32), start, run.tables[0], want_logits=True)
        return model.flatten(ForwardBatch([chunk]), run.cache)

    step(6).advanced(np.array([5]), model.config)
    with pytest.raises(InvalidBatch, match="slot"):
        step(7).advanced(np.array([5]), model.config)
    with pytest.raises(InvalidBatch, match="token ids"):
        step(3).advanced(np.array([256]), model.config)
    long = runner(model, [model.config.max_positions], block_tokens=4)
    last = model.flatten(ForwardBatch([long.chunk(0, model.config.max_positions - 1, 1)]), long.cache)
    with pytest.raises(InvalidBatch, match=r"needs a slot|position"):
        last.advanced(np.array([5]), model.config)
    run.tables[0] = (np.array([run.tables[0][0][0], -1], np.int32),)
    with pytest.raises(InvalidBatch, match="slots of group 0"):
        step(2)


def test_slots_behind_the_window_are_not_touched(models, runner):
    run = runner(models("mistral-window"), [40])
    want = run.model.score(run.sequences[0])
    run.step((0, 0, 32))
    table = run.tables[0][0]
    table[:5] = -1  # positions 0..19; a query at 32 sees 22..32
    for position in range(32, 40):
        np.testing.assert_allclose(run.step((0, position, 1))[0], want[position], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(1, 3), (30, 12)])
def test_on_layer_comes_in_order_when_the_layers_kv_is_there(backend, sizes, models, runner):
    model = models("qwen2-two-groups", backend=backend)
    run = runner(model, sizes)
    final = runner(model, sizes)
    pieces = [(i, 0, size) for i, size in enumerate(sizes)]
    final.step(*pieces)
    seen = []

    def on_layer(layer: int) -> None:
        seen.append(layer)
        for group, shape in enumerate(model.kv_groups):
            for depth, own in enumerate(shape.layers):
                got, want = run.cache.views[group][:, depth], final.cache.views[group][:, depth]
                if own <= layer:
                    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
                else:
                    assert got.isnan().all()

    model.forward(ForwardBatch([run.chunk(*piece) for piece in pieces]), run.cache, on_layer)
    assert seen == list(range(model.config.num_layers))


@pytest.mark.parametrize("block_tokens", [1, 6, 16])
@pytest.mark.parametrize("name", ["qwen2-two-groups", "llama", "qwen3", "sinks"])
def test_batch_invariant_logits_are_equal_bit_for_bit(name, block_tokens, models, runner):
    model = models(name, backend=BATCH_INVARIANT)
    whole = runner(model, [70, 30], block_tokens=4).step((0, 0, 70))[0]
    other = runner(model, [70, 30], block_tokens=block_tokens)
    other.step((0, 0, 23), (1, 0, 17))
    other.step((1, 17, 1), (0, 23, 46))
    assert np.array_equal(other.step((0, 69, 1), (1, 18, 12))[0], whole)


def test_bfloat16_runs_and_stays_close_to_float32(model_folder, models, runner):
    model = load_model(model_folder("llama"), dtype="bfloat16")
    assert model.kv_groups[0].dtype == "bfloat16"
    run = runner(model, [20])
    want = models("llama").score(run.sequences[0])
    run.step((0, 0, 19))
    assert np.abs(run.step((0, 19, 1))[0] - want[-1]).mean() < 0.1 * np.abs(want[-1]).mean()
    assert np.abs(model.score(run.sequences[0])[-1] - want[-1]).mean() < 0.1 * np.abs(want[-1]).mean()


def test_warming_up_runs_every_kind_of_step(models):
    for backend in BACKENDS:
        models("qwen2-two-groups", backend=backend).warm_up()


@pytest.mark.parametrize("name", ["qwen2-two-groups", "mixtral", "llama"])
def test_long_chunks_give_the_same_bits_on_any_number_of_threads(name, models, runner):
    model, steps = models(name), (((0, 0, 50), (1, 0, 3)), ((0, 50, 250), (1, 3, 1)))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            run = runner(model, [300, 4])
            found.append(np.concatenate([np.stack(run.step(*step)) for step in steps]))
    finally:
        torch.set_num_threads(before)
    want = [model.score(ids) for ids in run.sequences]
    np.testing.assert_allclose(found[0], [want[0][49], want[1][2], want[0][299], want[1][3]], atol=TOLERANCE, rtol=0)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_forward_runs_in_memory_that_is_given(models, runner):
    model = models("llama")
    run = runner(model, [12])
    needed = PagedCache.required_nbytes(model.kv_groups, run.cache.num_slots, 4)
    memory = torch.zeros(needed + 64, dtype=torch.uint8)
    own, run.cache = run.cache, PagedCache(model.kv_groups, run.cache.num_slots, 4, memory)
    run.step((0, 0, 12))
    other, run.cache = run.cache, own
    run.step((0, 0, 12))
    slot = int(run.tables[0][0][0])
    span = slice(own.slot_offset(0, slot), own.slot_offset(0, slot) + own.slot_nbytes(0))
    assert torch.equal(memory[span], own.memory[span])
    assert other.memory.data_ptr() == memory.data_ptr()
    assert not memory[needed:].any()
