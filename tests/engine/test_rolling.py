"""Sequences with sinks and a rolling window compute what brute force computes over the same visible tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import ForwardBatch, InvalidBatch, Model, PagedCache, SequenceChunk, load_model
from engine.config import ModelConfig, parse_config
from engine.random_model import RandomModelSpec, write_random_model
from engine.rolling import RollingWindow, check_rolling, default_sinks, least_window

TOLERANCE = 1e-4
BLOCK = 4
ROLLING = RollingWindow(sinks=2, window=24, slide=8, block_tokens=BLOCK)
LENGTH = 150
MODELS = ["llama", "llama-rope-yarn", "qwen2-two-groups", "gemma2", "gemma3-rope-by-type", "shared-across-blocks"]


@dataclass
class Rolled:
    """A sequence in exactly the slots that it needs at most; those behind the window are used again."""

    model: Model
    rolling: RollingWindow
    ids: np.ndarray
    cache: PagedCache | None = None
    first_slot: int = 0
    at: int = 0
    slid: int = 0
    table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = self.rolling.capacity // BLOCK
        if self.cache is None:
            self.cache = PagedCache(self.model.kv_groups, [slots] * len(self.model.kv_groups), BLOCK)
            self.cache.memory.fill_(255)
        self.free = list(range(self.first_slot + 1, self.first_slot + slots))

    def slide(self) -> None:
        """Give back the slots behind the window, and keep the sinks."""
        start = self.rolling.start(self.at)
        if start == self.slid:
            return
        groups = len(self.cache.groups)
        sinks = (self.first_slot,) * groups
        self.model.keep_sinks(self.cache, (self.table[0],) * groups, sinks, self.rolling, self.at)
        dropped = (start - self.slid) // BLOCK + (1 if self.slid else 0)
        self.free += [slot for slot in self.table[:dropped] if slot != self.first_slot]
        self.table = [self.first_slot, *self.table[dropped:]]
        self.slid = start

    def chunk(self, size: int) -> SequenceChunk:
        """Take the next `size` tokens."""
        self.slide()
        row = self.at - (self.slid - BLOCK if self.slid else 0)
        while len(self.table) * BLOCK < row + size:
            self.table.append(self.free.pop())
        tables = tuple(np.array(self.table, np.int32) for _ in self.cache.groups)
        ids = self.ids[self.at : self.at + size]
        chunk = SequenceChunk(ids, self.at, tables, want_logits=True, every=True, rolling=self.rolling)
        self.at += size
        return chunk

    def run(self, sizes: Sequence[int]) -> np.ndarray:
        """Compute the whole sequence in chunks of these sizes, shortened where the window slides; logits of all
        tokens.
        """
        logits = []
        for size in sizes:
            end = min(self.at + size, self.rolling.end(self.at), len(self.ids))
            if end > self.at:
                logits.append(self.model.forward(ForwardBatch([self.chunk(end - self.at)]), self.cache).numpy())
        return np.concatenate(logits)


def ids_of(model: Model, length: int = LENGTH, seed: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, model.config.vocab_size, length).astype(np.int32)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("size", [1, 100])
def test_every_token_sees_what_the_window_leaves_it(name, backend, size, models):
    model = models(name, backend=backend)
    ids = ids_of(model)
    want = model.score(ids, ROLLING)
    np.testing.assert_allclose(Rolled(model, ROLLING, ids).run([size] * LENGTH), want, atol=TOLERANCE, rtol=0)
    full = model.score(ids)
    np.testing.assert_allclose(want[: ROLLING.window], full[: ROLLING.window], atol=TOLERANCE, rtol=0)
    assert np.abs(want[ROLLING.window :] - full[ROLLING.window :]).max() > 100 * TOLERANCE


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_any_window_and_any_chunks_give_the_dense_logits(backend, models, data):
    model = models("qwen2-two-groups", backend=backend)
    slide = BLOCK * data.draw(st.integers(1, 3))
    window = slide + BLOCK * data.draw(st.integers(1, 4))
    rolling = RollingWindow(data.draw(st.integers(0, BLOCK // 2)), window, slide, BLOCK)
    ids = ids_of(model, 80)
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=80, max_size=80))
    np.testing.assert_allclose(
        Rolled(model, rolling, ids).run(sizes), model.score(ids, rolling), atol=TOLERANCE, rtol=0
    )


def test_sinks_change_what_is_computed(models):
    model = models("llama")
    ids = ids_of(model)
    with_sinks, without = (model.score(ids, RollingWindow(sinks, 24, 8, BLOCK)) for sinks in (2, 0))
    assert np.abs(with_sinks - without).max() > 100 * TOLERANCE


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_a_sequence_may_be_longer_than_the_models_positions(backend, models):
    model = models("llama", backend=backend)
    ids = ids_of(model, model.config.max_positions + 60)
    run = Rolled(model, ROLLING, ids).run([50] * len(ids))
    np.testing.assert_allclose(run[-90:], model.score(ids, ROLLING)[-90:], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_rows_of_several_sequences_see_their_own_windows(backend, models):
    model = models("qwen2-two-groups", backend=backend)
    slots = ROLLING.capacity // BLOCK
    cache = PagedCache(model.kv_groups, [2 * slots] * len(model.kv_groups), BLOCK)
    runs = [Rolled(model, ROLLING, ids_of(model, 70, seed), cache, seed * slots) for seed in (0, 1)]
    runs[0].run([9] * 4)
    assert (runs[0].at, runs[1].at) == (32, 0)
    for size in (1, 7, 1, 10, 5, 2, 6, 3, 1):
        sizes = [min(size, run.rolling.end(run.at) - run.at) for run in runs]
        chunks = [run.chunk(size) for run, size in zip(runs, sizes, strict=True)]
        logits = model.forward(ForwardBatch(chunks), cache).numpy()
        want = [model.score(run.ids, ROLLING)[run.at - size : run.at] for run, size in zip(runs, sizes, strict=True)]
        np.testing.assert_allclose(logits, np.concatenate(want), atol=TOLERANCE, rtol=0)
    assert runs[1].slid


@pytest.mark.parametrize("backend", ["compiled", "torch"])
def test_int8_rows_of_sinks_are_rounded_again(backend, tmp_path):
    spec = RandomModelSpec(family="moonpool", layers=3, extra={"kv_dtype": "int8"})
    model = load_model(write_random_model(tmp_path / "int8", spec), threads=1, backend=backend)
    ids = ids_of(model)
    got, want = Rolled(model, ROLLING, ids).run([1] * LENGTH), model.score(ids, ROLLING)
    # A sum in another order may round a value to the next step, which changes what follows a little.
    assert np.abs(got - want).mean() < 0.01 * np.abs(want - model.score(ids)).mean()


def test_bad_windows_are_refused_by_the_field(models):
    for fields, message in [
        ({"sinks": 3}, "sinks must be in 0..2"),
        ({"slide": 6}, "slide must be whole blocks of 4 tokens, got 6"),
        ({"slide": 0}, "slide must be whole blocks of 4 tokens, got 0"),
        ({"window": 8}, r"window must be whole blocks of 4 tokens and more than slide \(8\), got 8"),
        ({"window": 25}, "window must be whole blocks"),
    ]:
        with pytest.raises(InvalidBatch, match=message):
            RollingWindow(**{"sinks": 2, "window": 24, "slide": 8, "block_tokens": BLOCK, **fields})


def test_chunks_across_a_slide_are_refused(models):
    model = models("llama")
    cache = PagedCache(model.kv_groups, (7,), BLOCK)
    table = (np.arange(7, dtype=np.int32),)
    for start, size in ((0, 25), (20, 5), (31, 2)):
        end = ROLLING.end(start)
        chunk = SequenceChunk(ids_of(model, size), start, table, want_logits=True, rolling=ROLLING)
        with pytest.raises(
            InvalidBatch, match=f"chunk 0 must end by position {end}, where its window slides, got {start + size}"
        ):
            model.forward(ForwardBatch([chunk]), cache)


@given(st.integers(0, 5000), st.integers(1, 8), st.integers(1, 8))
def test_windows_are_full_when_they_slide(position, slides, more):
    rolling = RollingWindow(4, 16 * (slides + more), 16 * slides, 16)
    start = rolling.start(position)
    assert start % 16 == 0
    assert start <= position < rolling.end(position)
    assert rolling.start(rolling.end(position)) == start + rolling.slide
    assert rolling.start(rolling.end(position) - 1) == start
    assert start == 0 or position - start >= rolling.window - rolling.slide


def config_of(**spec: Any) -> ModelConfig:
    return parse_config(RandomModelSpec(**spec).config(), {}, where="config.json")


def test_models_with_learned_sinks_or_windows_in_all_layers_have_no_first_tokens_as_sinks():
    learned = config_of(family="moonpool", extra={"attention_sinks": True, "layer_types": ["full_attention"] * 2})
    windows = config_of(family="mistral", window=8)
    assert (default_sinks(learned), default_sinks(windows), default_sinks(config_of())) == (0, 0, 4)
    with pytest.raises(InvalidBatch, match=r"^sinks must be 0, since the model has learned sinks, got 2$"):
        check_rolling(learned, ROLLING)
    with pytest.raises(InvalidBatch, match=r"^sinks must be 0, since all layers of the model have windows, got 2$"):
        check_rolling(windows, ROLLING)
    for config in (learned, windows):
        check_rolling(config, replace(ROLLING, sinks=0))


def test_a_window_is_a_block_longer_than_the_models_own():
    mixed = config_of(family="moonpool", window=21, extra={"layer_types": ["full_attention", "sliding_attention"]})
    assert least_window(mixed, BLOCK) == 25
    with pytest.raises(InvalidBatch, match=r"^window must be at least 25 tokens, a block more than .*, got 24$"):
        check_rolling(mixed, ROLLING)
    check_rolling(mixed, replace(ROLLING, window=28))
    check_rolling(config_of(), ROLLING)
