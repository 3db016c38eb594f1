"""Triton's kernels compute what gathered attention computes. On machines without a GPU they run in its interpreter."""

from typing import Any

import numpy as np
import pytest
import torch

from engine import ForwardBatch
from engine.backends.gathered_attention import GatheredAttention
from engine.batch import flatten_batch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="Triton is not installed: `make test` installs it")
from engine.backends import triton_attention  # noqa: E402
from engine.backends.triton_attention import TritonAttention  # noqa: E402

TOLERANCE = 1e-5
CASES: dict[str, tuple[str, int]] = {
    "full attention, grouped queries": ("llama", 4),
    "a head dimension that is no power of two": ("llama-untied-biases", 16),
    "windows beside full attention": ("qwen2-two-groups", 8),
    "soft caps": ("gemma2", 3),
    "learned sinks": ("sinks", 4),
    "one KV head": ("gemma3-rope-by-type", 5),
    "int8 KV": ("int8-kv", 4),
}


class Comparison:
    """Both attentions over one cache, whose unused bytes are NaN, for one step of decode rows and longer chunks."""

    def __init__(self, model: Any, runner: Any, block_tokens: int) -> None:
        self.model = model
        run = runner(model, [75, 130, 1, 40], block_tokens)
        for sequence, length in enumerate((75, 130, 1, 40)):
            run.step((sequence, 0, length))
        chunks = [run.chunk(0, 74, 1), run.chunk(1, 57, 73), run.chunk(2, 0, 1), run.chunk(3, 31, 9)]
        self.cache = run.cache
        self.plan = flatten_batch(ForwardBatch(chunks), model.config, run.cache)
        config = model.config
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(len(self.plan.token_ids), config.num_heads, config.head_dim, generator=generator)
        self.q = self.q.to(model.device)

    def difference(self, layer: int, ours: TritonAttention) -> float:
        """Return the largest difference in one layer."""
        want = GatheredAttention(self.model.config, self.model._weights).begin(self.plan, self.cache)
        got = ours.begin(self.plan, self.cache).run(layer, self.q)
        return float((got - want.run(layer, self.q)).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_of_torch(name, models, runner):
    family, block_tokens = CASES[name]
    model = models(family, backend="torch", device=DEVICE)
    compared = Comparison(model, runner, block_tokens)
    attention = TritonAttention(model.config, model._weights)
    for layer in {0, model.config.num_layers - 1}:
        assert compared.difference(layer, attention) < TOLERANCE


@pytest.mark.parametrize("family", ["sinks", "int8-kv"])
def test_keys_cut_into_parts_give_the_same(family, models, runner, monkeypatch):
    monkeypatch.setattr(triton_attention, "_LEAST_SPLIT_KEYS", 16)
    monkeypatch.setattr(triton_attention, "_KEYS", 16)
    model = models(family, backend="torch", device=DEVICE)
    attention = TritonAttention(model.config, model._weights)
    attention._cores = 64
    compared = Comparison(model, runner, 4)
    step = attention.begin(compared.plan, compared.cache)
    assert max(tiles.splits for tiles in step._of_group[0]) > 1
    assert compared.difference(model.config.num_layers - 1, attention) < TOLERANCE


def test_a_model_runs_with_triton(models, runner):
    model = models("qwen3-layer-types", backend="triton", device=DEVICE)
    assert model.backend.name == "triton"
    run = runner(model, [40, 9])
    want = [model.score(ids) for ids in run.sequences]
    run.step((0, 0, 30))
    for (sequence, last), logits in zip([(0, 30), (1, 8)], run.step((0, 30, 1), (1, 0, 9)), strict=True):
        np.testing.assert_allclose(logits, want[sequence][last], atol=1e-4, rtol=0)
