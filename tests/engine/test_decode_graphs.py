"""Recorded decode steps compute what steps of torch compute. On machines without a GPU, the kernels run in Triton's
interpreter, and a replay runs the recorded function again over its static inputs.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine import ForwardBatch, Model, load_model
from engine.backends import decode_graphs
from engine.backends.decode_graphs import MOST_ROWS, padded_rows
from engine.backends.graph_recorder import CudaGraphRecorder, GraphRecorder, RecordedGraph
from engine.batch import FlatBatch
from engine.int8_rows import read_rows

pytest.importorskip("triton", reason="Triton is not installed: `make test` installs it")
from engine.backends import triton_attention
from tests.long_cases import others_long

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_TOKENS = 4
FAMILIES = [
    "llama-untied-biases",
    "qwen3-layer-types",
    "gemma2",
    "sinks",
    "int8-kv",
    "shared-across-blocks",
    "mixtral",
    "qwen3-moe",
]


class CountedGraph:
    def __init__(self, recorder: "CountingRecorder", replay: Callable[[], torch.Tensor]) -> None:
        self._recorder, self._replay = recorder, replay

    def replay(self) -> torch.Tensor:
        self._recorder.replays += 1
        return self._replay()


class CountingRecorder(GraphRecorder):
    """Recorder whose graphs run the work again, as CUDA graphs do without the host; of CUDA graphs on a GPU."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.records, self.replays = 0, 0
        self._error = error
        self._cuda = CudaGraphRecorder(torch.device("cuda", 0)) if DEVICE == "cuda" else None

    def record(self, work: Callable[[], torch.Tensor]) -> RecordedGraph:
        self.records += 1
        if self._error is not None:
            raise self._error
        if self._cuda is not None:
            return CountedGraph(self, self._cuda.record(work).replay)
        work()
        return CountedGraph(self, work)


@pytest.fixture
def recorded(model_folder: Any, models: Any) -> Callable[..., tuple[Model, Model, CountingRecorder]]:
    """A model that records its steps, the same in torch, and the recorder."""

    def load(family: str, error: RuntimeError | None = None) -> tuple[Model, Model, CountingRecorder]:
        ours = load_model(model_folder(family), threads=1, backend="triton", device=DEVICE)
        recorder = CountingRecorder(error)
        assert ours.record_steps(recorder)
        return ours, models(family, backend="torch", device=DEVICE), recorder

    return load


def poisoned(model: Model, plan: FlatBatch, cache: Any) -> np.ndarray:
    """Run a step and overwrite its arrays, so that a graph that still read them would fail."""
    logits = model.run(plan, cache).cpu().numpy().copy()
    for array in (plan.token_ids, plan.tables, plan.positions, plan.rotations, plan.starts, plan.firsts):
        array[:] = -(1 << 20)
    return logits


class Pair:
    """Both models over caches of their own, with the same prompts."""

    def __init__(self, models: tuple[Model, Model, CountingRecorder], runner: Any, lengths: list[int]) -> None:
        self.runs = [runner(model, [n + 12 for n in lengths], BLOCK_TOKENS) for model in models[:2]]
        self.lengths, self.recorder = lengths, models[2]
        for run in self.runs:
            prompts = [run.chunk(sequence, 0, length) for sequence, length in enumerate(lengths)]
            models[1].forward(ForwardBatch(prompts), run.cache)

    def step(self, sequences: list[int], at: int) -> None:
        """Decode token `at` after each prompt and compare the logits."""
        found = []
        for run in self.runs:
            chunks = [run.chunk(s, self.lengths[s] + at, 1) for s in sequences]
            found.append(poisoned(run.model, run.model.flatten(ForwardBatch(chunks), run.cache), run.cache))
        # Values in int8 may be rounded to the next step.
        tolerance = 0.05 if self.runs[0].cache.scale_group else 1e-4
        np.testing.assert_allclose(*found, atol=tolerance, rtol=0)

    def compare_caches(self) -> None:
        """Compare what has been written and what has not."""
        for views in zip(*(run.cache.views for run in self.runs), strict=True):
            shape = self.runs[0].cache.groups[0]
            ours, theirs = (read_rows(view, shape.head_dim, shape.scale_group) for view in views)
            assert torch.equal(ours.isnan(), theirs.isnan())
            assert float((ours - theirs).nan_to_num(0.0).abs().max()) < (0.1 if shape.scale_group else 1e-4)


@pytest.mark.parametrize("family", others_long(FAMILIES, FAMILIES[:1]))
def test_replayed_steps_agree(family, recorded, runner):
    pair = Pair(recorded(family), runner, [14, 1, 5])
    for at in range(3):
        pair.step([0, 1, 2], at)
    pair.compare_caches()
    assert (pair.recorder.records, pair.recorder.replays) == (1, 3)


def test_ids_that_the_host_has_not_read_reach_a_graph(recorded, runner):
    models = recorded("llama")
    recorder = models[2]
    pair, found = Pair(models, runner, [14, 5]), []
    pair.step([0, 1], 0)
    for run, goes_ahead in zip(pair.runs, (True, False), strict=True):
        chunks = [run.chunk(s, length + 1, 1) for s, length in enumerate(pair.lengths)]
        first = run.model.flatten(ForwardBatch(chunks), run.cache)
        ids = run.model.run(first, run.cache).argmax(dim=-1)
        plan = first.advanced(ids if goes_ahead else ids.cpu().numpy().astype(np.int32), run.model.config)
        found.append(run.model.run(plan, run.cache).cpu().numpy())
    np.testing.assert_allclose(*found, atol=1e-4, rtol=0)
    assert (recorder.records, recorder.replays) == (1, 3)


def test_rows_of_padding_see_and_write_nothing(recorded, runner, monkeypatch):
    """With keys in parts, too."""
    monkeypatch.setattr(triton_attention, "_LEAST_SPLIT_KEYS", 8)
    monkeypatch.setattr(triton_attention, "_KEYS", 8)
    models = recorded("sinks")
    models[0]._backend._attention._cores = 64  # type: ignore[attr-defined]
    pair = Pair(models, runner, [40, 25, 31])
    seen: list[torch.Tensor] = []
    record = pair.recorder.record
    monkeypatch.setattr(pair.recorder, "record", lambda work: record(lambda: seen.append(work()) or seen[-1]))
    pair.step([0, 1, 2], 0)
    assert seen[-1].shape[0] == 4
    assert bool(seen[-1].isfinite().all())
    forms = [form for _, form in models[0]._backend._graphs._graphs]
    assert max(splits for form in forms for _, _, splits in form) > 1
    pair.compare_caches()


def test_a_graph_serves_longer_contexts_and_a_rotary_table_that_has_moved(recorded, runner):
    """Attention is recorded anew only when its keys are cut into more parts."""
    pair = Pair(recorded("llama"), runner, [6, 9])
    pair.step([0, 1], 0)
    rope = pair.runs[0].model._rope
    old = rope._cos, rope._sin
    rope._cos, rope._sin = old[0].clone(), old[1].clone()
    for table in old:
        table.fill_(torch.nan)
    for at in range(1, 4):
        pair.step([0, 1], at)
    assert pair.recorder.records == 1


def test_numbers_of_rows_share_graphs(recorded, runner):
    pair = Pair(recorded("llama"), runner, [3, 4, 5, 2, 7])
    for at, count in enumerate((5, 4, 3)):
        pair.step(list(range(count)), at)
    assert pair.recorder.records == 2  # of 8 and of 4 rows
    assert [padded_rows(n) for n in (1, 3, 8, 9, 17, 255)] == [1, 4, 8, 16, 24, 256]
    assert padded_rows(MOST_ROWS) == MOST_ROWS


def test_what_is_recorded_belongs_to_one_cache(recorded, runner):
    models = recorded("llama")
    first, second = Pair(models, runner, [6]), Pair(models, runner, [7])
    for pair in (first, second, second, first):
        pair.step([0], 0)
    assert models[2].records == 3


def test_steps_that_the_host_takes_part_in_are_not_recorded(recorded, runner):
    pair = Pair(recorded("llama"), runner, [6, 9])
    run, layers = pair.runs[0], list[int]()
    run.model.forward(ForwardBatch([run.chunk(0, 6, 1)]), run.cache, layers.append)
    run.step((0, 7, 2), (1, 9, 1))
    assert layers == list(range(run.model.config.num_layers))
    assert pair.recorder.records == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("not permitted")])
def test_what_cannot_be_recorded_runs_without_a_graph(error, recorded, runner, caplog):
    pair = Pair(recorded("llama", error), runner, [6, 9, 4])
    with caplog.at_level(logging.WARNING):
        for at in range(3):
            pair.step([0, 1], at)
    assert [record.getMessage() for record in caplog.records] == [
        f"decode steps of 2 rows run without a CUDA graph: {error}"
    ]
    pair.step([0, 1, 2], 3)
    assert pair.recorder.records == 2


def test_slot_tables_that_do_not_fit_run_without_a_graph(recorded, runner, monkeypatch):
    monkeypatch.setattr(decode_graphs, "_MOST_INTEGERS", 96)
    pair = Pair(recorded("llama"), runner, [6, 100])
    pair.step([0], 0)
    pair.step([1], 0)
    assert pair.recorder.records == 1


@pytest.mark.parametrize(("family", "backend"), [("mixtral", "torch"), ("llama", "torch"), ("llama", "compiled")])
def test_models_whose_steps_need_the_host_record_nothing(family, backend, model_folder):
    model = load_model(model_folder(family), threads=1, backend=backend)
    assert not model.record_steps(CountingRecorder())
    assert not model.record_steps()
