"""Matrices in 16 or 8 bits stay so in memory, and give the bits of the same values in float32."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import Model, kernels, load_model

pytestmark = pytest.mark.long

MATRICES = ("qkv", "out", "gate_up", "down", "router", "experts_gate_up", "experts_down", "embedding", "head")


def stored_as(folder: Path, target: Path, kind: torch.dtype, then: torch.dtype) -> Model:
    """Return the folder's model with its weights rounded to `kind` and stored as `then`."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    save_file({name: t.to(kind).to(then) for name, t in tensors.items()}, target / "model.safetensors")
    return load_model(target)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama-untied-biases", "qwen2-two-groups", "mixtral"])
def test_matrices_in_16_bits_take_half_the_memory_and_give_the_same_logits(
    name: str, kind: torch.dtype, model_folder: Callable, runner: Callable, tmp_path: Path
) -> None:
    folder = model_folder(name)
    narrow = stored_as(folder, tmp_path / "narrow", kind, kind)
    wide = stored_as(folder, tmp_path / "wide", kind, torch.float32)
    assert narrow.dtype == wide.dtype == "float32"
    assert narrow.kv_groups == wide.kv_groups
    for field in MATRICES:
        few, many = (getattr(model._weights, field) for model in (narrow, wide))
        assert 2 * few.nbytes == many.nbytes
    runs = [runner(model, [150, 30]) for model in (narrow, wide)]
    for step in ([(0, 0, 100), (1, 0, 9)], [(0, 100, 3), (1, 9, 1)], [(0, 103, 40)], [(0, 143, 1), (1, 10, 20)]):
        ours, theirs = (run.step(*step) for run in runs)
        assert np.array_equal(np.concatenate(ours), np.concatenate(theirs))
    assert np.array_equal(narrow.score(runs[0].sequences[0]), wide.score(runs[0].sequences[0]))


def test_tensors_of_different_types_are_widened(model_folder: Callable, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder("llama-untied-biases"), tmp_path / "model")
    tensors = {name: t.half() for name, t in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    weights = load_model(folder)._weights
    assert weights.gate_up.dtype == torch.float32
    assert weights.down.dtype == weights.head.dtype == torch.float16
    assert load_model(folder, backend="torch")._weights.down.dtype == torch.float32


STORED = {torch.float32: None, torch.float16: np.int16, torch.bfloat16: np.uint16, torch.int8: np.int8}


@settings(max_examples=80, deadline=None)
@given(
    rows=st.one_of(st.integers(1, 20), st.integers(60, 75)),
    depth=st.one_of(st.integers(1, 70), st.integers(250, 530)),
    width=st.one_of(st.integers(1, 70), st.integers(250, 300)),
    unused=st.integers(0, 20),
    kind=st.sampled_from(list(STORED)),
    accumulate=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_products_are_those_of_the_widened_matrix(
    rows: int, depth: int, width: int, unused: int, kind: torch.dtype, accumulate: bool, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(depth, width + unused, generator=generator) * 9).to(kind)
    a, out = torch.randn(rows, depth, generator=generator), torch.randn(rows, width + unused, generator=generator)
    bias = torch.randn(width + unused if has_bias else 0, generator=generator)
    want = a.double() @ weight[:, :width].double() + (bias[:width].double() if has_bias else 0)
    want += out[:, :width].double() if accumulate else 0
    arrays = []
    for matrix in (weight, weight.float()):
        stored = matrix if STORED[matrix.dtype] is None or matrix.dtype == torch.int8 else matrix.view(torch.int16)
        array, packed = stored.numpy(), np.empty(kernels.PACKED, np.float32)
        array = array.view(STORED[matrix.dtype] or np.float32)
        arrays.append(out.numpy().copy())
        kernels.multiply(a.numpy(), array, bias.numpy(), arrays[-1], accumulate, width, packed)
    assert np.array_equal(arrays[0], arrays[1])
    assert np.array_equal(arrays[0][:, width:], out[:, width:].numpy()), "columns beyond the width are not written"
    np.testing.assert_allclose(arrays[0][:, :width], want, rtol=1e-5, atol=1e-4 * depth**0.5)
    alone = out[-1:].numpy().copy()
    kernels.multiply(
        a[-1:].numpy(),
        weight.float().numpy(),
        bias.numpy(),
        alone,
        accumulate,
        width,
        np.empty(kernels.PACKED, np.float32),
    )
    assert np.array_equal(alone[0], arrays[0][-1]), "a row does not depend on the others"
