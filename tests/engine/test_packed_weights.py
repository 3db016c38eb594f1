"""Checkpoints with weights as packed integers: what is unpacked, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import CheckpointDamaged, UnsupportedModel, load_model
from engine.config import parse_config
from engine.packed_weights import pack, unpacked
from engine.quantisation import PackedIntegers
from engine.random_model import RandomModelSpec, write_random_model


def quantisation(**weights: Any) -> dict[str, Any]:
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head"],
    }


@given(
    of=st.builds(PackedIntegers, st.sampled_from([4, 8]), st.sampled_from([0, 4, 10])),
    outputs=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_packed_integers_come_back_as_themselves(of: PackedIntegers, outputs: int, seed: int) -> None:
    rng, inputs = np.random.default_rng(seed), 20
    steps = rng.integers(-(1 << (of.bits - 1)), 1 << (of.bits - 1), (outputs, inputs))
    scales = torch.from_numpy(rng.uniform(0.1, 2.0, of.shapes(outputs, inputs)["_scale"])).half()
    words = np.zeros(of.shapes(outputs, inputs)["_packed"], np.uint32)
    for row, column in np.ndindex(outputs, inputs):  # bit by bit, as the format says
        code, bit = int(steps[row, column]) + (1 << (of.bits - 1)), column * of.bits
        words[row, bit // 32] |= np.uint32(code << bit % 32)
    found = unpacked(torch.from_numpy(words.view(np.int32)), scales, of, inputs)
    want = steps.reshape(*scales.shape, -1) * scales.float().numpy()[..., None]
    np.testing.assert_array_equal(found.numpy(), want.reshape(outputs, inputs).astype(np.float32))
    again, scales_again = pack(found, of)
    np.testing.assert_allclose(
        unpacked(again, scales_again, of, inputs), found, atol=float(found.abs().max()) * 0.6 / (1 << (of.bits - 1))
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = RandomModelSpec(family="qwen2", scale=2.0, extra={"quantization_config": quantisation()})
    return write_random_model(tmp_path_factory.mktemp("packed"), spec)


def plain_copy(folder: Path, target: Path) -> Path:
    """Write the same model with its weights as floats."""
    target.mkdir()
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (target / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_packed") for name in tensors if name.endswith("_packed")]:
        inputs = int(tensors.pop(f"{name}_shape")[1])
        packed, scales = tensors.pop(f"{name}_packed"), tensors.pop(f"{name}_scale")
        tensors[name] = unpacked(packed, scales, PackedIntegers(4, 32), inputs)
    save_file(tensors, target / "model.safetensors")
    return target


def test_a_packed_model_computes_what_its_floats_do(folder: Path, tmp_path: Path) -> None:
    plain = plain_copy(folder, tmp_path / "plain")
    ids = np.arange(40, dtype=np.int32)
    first, second = load_model(folder, threads=1), load_model(plain, threads=1)
    assert np.array_equal(first.score(ids), second.score(ids))
    assert first.fingerprint != second.fingerprint
    size, plain_size = ((path / "model.safetensors").stat().st_size for path in (folder, plain))
    assert size < 0.4 * plain_size  # embeddings stay floats


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"num_bits": 3}, "weights.num_bits must be 4 or 8, got 3"),
        ({"symmetric": False}, "weights.symmetric must be true, got false"),
        ({"actorder": "group"}, 'weights.actorder must be null, got "group"'),
        ({"strategy": "tensor"}, 'weights.strategy must be "group" or "channel", got "tensor"'),
        ({"group_size": 48}, r"group_size .* must divide the inputs of all linear layers \(64, 64, 192\), got 48"),
    ],
)
def test_other_schemes_are_refused_by_key(folder: Path, weights: dict[str, Any], message: str) -> None:
    raw = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantisation(**weights)}
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(raw, {}, where="config.json")


def test_a_shape_that_is_not_the_layers_is_damage(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight_shape"] = torch.tensor([64, 191])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointDamaged, match=r"down_proj.weight_shape must be \[64, 192\], got \[64, 191\]"):
        load_model(tmp_path)
