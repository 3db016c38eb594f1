"""A group of layers is computed from another model's hidden states as a model grafted from both computes it."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import (
    ForwardBatch,
    InvalidBatch,
    LayerInputs,
    LayerSpan,
    Model,
    PagedCache,
    Recomputation,
    SequenceChunk,
    load_model,
)
from engine.backends.registry import AUTO, BATCH_INVARIANT
from engine.random_model import RandomModelSpec, write_random_model
from tests.engine.conftest import FAMILIES

BLOCK = 4
LENGTH = 43
MODELS = ["llama-untied-biases", "qwen2-two-groups", "qwen3-layer-types", "gemma3"]
BACKENDS = ["torch", "compiled"]
TOLERANCE = 1e-5


class Prompt:
    """One sequence in a cache of its own, whose unused bytes are NaN."""

    def __init__(self, model: Model, ids: np.ndarray) -> None:
        groups = len(model.kv_groups)
        self.model, self.ids = model, ids
        self.table = np.arange(-(-len(ids) // BLOCK), dtype=np.int32)[::-1].copy()
        self.cache = PagedCache(model.kv_groups, [len(self.table)] * groups, BLOCK)
        self.cache.memory.fill_(255)
        self.inputs: dict[int, list[torch.Tensor]] = {}

    def chunks(self, sizes: Sequence[int], *, want_logits: bool) -> list[SequenceChunk]:
        """Return the whole sequence in chunks of these sizes, and one with the rest."""
        ends = [*np.minimum(np.cumsum(sizes), len(self.ids)).tolist(), len(self.ids)]
        tables = (self.table,) * len(self.cache.groups)
        return [
            SequenceChunk(self.ids[start:end], start, tables, want_logits)
            for start, end in zip([0, *ends], ends, strict=False)
            if end > start
        ]

    def compute(self, sizes: Sequence[int] = ()) -> torch.Tensor:
        """Compute everything, keep what enters each layer, and return the logits of the last token."""

        def keep(layer: int, rows: torch.Tensor) -> None:
            self.inputs.setdefault(layer, []).append(rows.clone())

        wanted = LayerInputs(frozenset(range(self.model.config.num_layers)), keep)
        for chunk in self.chunks(sizes, want_logits=True):
            logits = self.model.forward(ForwardBatch([chunk], layer_inputs=wanted), self.cache)
        return logits

    def recompute(self, span: LayerSpan, sender: "Prompt", sizes: Sequence[int] = ()) -> list[int]:
        """Compute the span from what entered it in `sender`; return the layers of which KV was written."""
        written = list[int]()
        inputs = torch.cat(sender.inputs[span.first]) if span.first else None
        for chunk in self.chunks(sizes, want_logits=False):
            rows = None if inputs is None else inputs[chunk.start : chunk.start + len(chunk.token_ids)]
            batch = ForwardBatch([chunk], Recomputation(span, rows))
            assert self.model.forward(batch, self.cache, on_layer=written.append).shape[0] == 0
        return written

    def kv(self, layer: int) -> torch.Tensor:
        """Return a layer's KV, [tokens, kv_heads, 2, head_dim]."""
        group = int(self.cache.layer_group[layer])
        view = self.cache.views[group][self.table.astype(np.int64), self.cache.groups[group].layers.index(layer)]
        return view.permute(0, 3, 1, 2, 4).flatten(0, 1)[: len(self.ids)]


def write_pair(folder: Path, family: str) -> tuple[Path, Path]:
    spec = RandomModelSpec(scale=2.0, **FAMILIES[family])
    return (
        write_random_model(folder / "sender", spec),
        write_random_model(folder / "receiver", replace(spec, seed=spec.seed + 1)),
    )


def write_graft(folder: Path, sender: Path, receiver: Path, first: int) -> Path:
    """Write a model of the sender's embedding and layers before `first`, and of all else from the receiver."""
    target = Path(shutil.copytree(receiver, folder / f"graft-{first}"))
    weights = load_file(receiver / "model.safetensors")
    for name, tensor in load_file(sender / "model.safetensors").items():
        layer = name.removeprefix("model.layers.").split(".")[0]
        if "embed_tokens" in name or (layer.isdigit() and int(layer) < first):
            weights[name] = tensor
    save_file(weights, target / "model.safetensors")
    return target


def ids_of(model: Model) -> np.ndarray:
    return np.random.default_rng(3).integers(0, model.config.vocab_size, LENGTH).astype(np.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", MODELS)
def test_a_span_is_what_the_grafted_model_computes(family: str, backend: str, tmp_path: Path) -> None:
    folders = write_pair(tmp_path, family)
    sender, receiver = (load_model(folder, threads=1, backend=backend) for folder in folders)
    ids, layers = ids_of(sender), sender.config.num_layers
    source = Prompt(sender, ids)
    source.compute()
    for first in range(layers):
        entered = source if first else Prompt(receiver, ids)
        graft = load_model(write_graft(tmp_path, *folders, first), threads=1, backend=backend) if first else receiver
        expected = Prompt(graft, ids)
        expected.compute()
        for last in range(first, layers):
            for sizes in ((), (17, 5, 1)):
                mixed = Prompt(receiver, ids)
                written = mixed.recompute(LayerSpan(first, last), entered, sizes)
                assert written == list(range(first, last + 1)) * len(mixed.chunks(sizes, want_logits=False))
                for layer in range(first, last + 1):
                    torch.testing.assert_close(mixed.kv(layer), expected.kv(layer), rtol=TOLERANCE, atol=TOLERANCE)
                others = [layer for layer in range(layers) if not first <= layer <= last]
                assert all(mixed.kv(layer).isnan().all() for layer in others)


@pytest.mark.parametrize("backend", [AUTO, BATCH_INVARIANT])
def test_a_model_is_its_own_sibling_exactly(models: Callable[..., Model], backend: str) -> None:
    model = models("llama-untied-biases", backend=backend)
    ids = ids_of(model)
    source = Prompt(model, ids)
    source.compute((20,))
    for first in range(model.config.num_layers):
        for last in range(first, model.config.num_layers):
            mixed = Prompt(model, ids)
            mixed.recompute(LayerSpan(first, last), source, (20,))
            for layer in range(first, last + 1):
                assert torch.equal(mixed.kv(layer), source.kv(layer))


def test_what_enters_a_layer_does_not_depend_on_the_chunks(models: Callable[..., Model]) -> None:
    model = models("qwen3-layer-types")
    whole, decoded = Prompt(model, ids_of(model)), Prompt(model, ids_of(model))
    torch.testing.assert_close(whole.compute(), decoded.compute([1] * LENGTH), rtol=1e-4, atol=1e-4)
    assert sorted(whole.inputs) == list(range(model.config.num_layers))
    for layer, rows in whole.inputs.items():
        torch.testing.assert_close(torch.cat(rows), torch.cat(decoded.inputs[layer]), rtol=1e-4, atol=1e-4)


def spoiled(model: Model, recomputation: Recomputation, *, want_logits: bool = False, layer: int = 0) -> ForwardBatch:
    chunk = Prompt(model, ids_of(model)).chunks((), want_logits=want_logits)
    return ForwardBatch(chunk, recomputation, LayerInputs(frozenset({layer}), lambda *_: None))


def test_unsuitable_spans_are_refused(models: Callable[..., Model]) -> None:
    model = models("llama-untied-biases")
    last, rows = model.config.num_layers - 1, torch.zeros(LENGTH, model.config.hidden_size)
    cache = Prompt(model, ids_of(model)).cache
    for batch, message in (
        (spoiled(model, Recomputation(LayerSpan(0, last + 1))), f"must end by layer {last}"),
        (spoiled(model, Recomputation(LayerSpan(0, 0)), want_logits=True), "no chunk may want logits"),
        (spoiled(model, Recomputation(LayerSpan(1, 1))), "needs inputs"),
        (spoiled(model, Recomputation(LayerSpan(0, 1), rows)), "needs inputs unless it is the first layer"),
        (spoiled(model, Recomputation(LayerSpan(1, 1), rows[1:])), rf"must be \[{LENGTH}, "),
        (spoiled(model, Recomputation(LayerSpan(0, 0)), layer=last + 1), "inputs of layers must be of"),
    ):
        with pytest.raises(InvalidBatch, match=message):
            model.forward(batch, cache)
    for first, end in ((1, 0), (-1, 0)):
        with pytest.raises(InvalidBatch, match="first <= last"):
            LayerSpan(first, end)
    shared = models("shared-neighbours")
    with pytest.raises(InvalidBatch, match="KV of its own"):
        shared.forward(spoiled(shared, Recomputation(LayerSpan(0, 0))), Prompt(shared, ids_of(shared)).cache)
