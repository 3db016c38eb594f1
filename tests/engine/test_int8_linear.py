"""Checkpoints whose linear layers are in int8 (W8A8): what is computed, what loads, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine import ForwardBatch, Model, SequenceChunk, TensorMismatch, UnsupportedModel, kernels, load_model
from engine.int8_linear import linear, quantised
from engine.random_model import RandomModelSpec, write_random_model

BACKENDS = ["compiled", "torch"]
MOST_FLIPPED = 0.2
"""Share of the difference to full precision: a sum in another order may round a value to the next step, which changes
all logits after it."""


def quantization_config(**changes: Any) -> dict[str, Any]:
    """Return what compressed-tensors writes for weights and activations in int8."""
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None, "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True, "observer": None},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **changes,
    }


def spec(family: str = "llama", extra: dict[str, Any] | None = None, **changes: Any) -> RandomModelSpec:
    return RandomModelSpec(
        family=family, layers=4, vocab=200, max_len=256, scale=2.0, window=24 if family != "llama" else 0,
        extra={"quantization_config": quantization_config(), **(extra or {})}, **changes,
    )  # fmt: skip


SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "kv_owners": [0, 1, 0, 1],
    "attention_sinks": True,
}
SPECS = {
    "llama with biases, untied": spec(extra={"attention_bias": True, "mlp_bias": True}, tied=False),
    "gemma2: norms behind the layers": spec("gemma2", head_dim=16),
    "mixtral": spec("mixtral", {"quantization_config": quantization_config(ignore=["lm_head", "re:.*gate$"])}),
    "shared KV": spec("moonpool", SHARED),
    "shared KV, all in int8": spec("moonpool", {**SHARED, "kv_dtype": "int8"}),
}


@pytest.fixture(scope="module", params=sorted(SPECS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, and in its folder `exact` the same model in full precision."""
    folder, given = tmp_path_factory.mktemp("model"), SPECS[request.param]
    plain = {key: value for key, value in given.extra.items() if key != "quantization_config"}
    write_random_model(folder / "exact", replace(given, extra=plain))
    return write_random_model(folder, given)


def forward(model: Model, ids: np.ndarray, cuts: list[int]) -> np.ndarray:
    cache = model.new_cache((20,) * len(model.kv_groups), 8)
    table, found, start = np.arange(20, dtype=np.int32)[::-1].copy(), [], 0
    for end in [*cuts, len(ids)]:
        used = (table[: -(-end // 8)],) * len(model.kv_groups)
        chunk = SequenceChunk(ids[start:end], start, used, want_logits=True, every=True)
        found.append(model.forward(ForwardBatch([chunk]), cache).numpy())
        start = end
    return np.concatenate(found)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 50], list(range(1, 90, 7))], ids=str)
def test_logits_are_the_dense_references_in_any_cuts(folder: Path, backend: Any, cuts: list[int]) -> None:
    model = load_model(folder, backend=backend, threads=1)
    ids = np.random.default_rng(3).integers(0, 200, 90).astype(np.int32)
    expected, exact = model.score(ids), load_model(folder / "exact", threads=1).score(ids)
    off = np.abs(forward(model, ids, cuts) - expected)
    assert np.median(off[0]) < 1e-4
    assert off.mean() < MOST_FLIPPED * np.abs(exact - expected).mean()


@pytest.mark.parametrize("cuts", [[1, 2, 3, 50], [33, 34], list(range(1, 90, 7))], ids=str)
def test_cuts_do_not_change_a_bit_with_compiled_kernels(folder: Path, cuts: list[int]) -> None:
    model = load_model(folder)
    ids = np.random.default_rng(1).integers(0, model.config.vocab_size, 100)
    assert np.array_equal(forward(model, ids, cuts), forward(model, ids, []))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 1040), st.integers(1, 24), st.booleans(), st.integers(0, 1 << 30))
def test_the_kernels_give_the_bits_of_integer_products(
    rows: int, inputs: int, outputs: int, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator) * torch.logspace(-20, 20, rows)[:, None]
    weight = torch.randint(-127, 128, (inputs, outputs), generator=generator, dtype=torch.int8)
    scale = torch.rand(outputs, generator=generator)
    bias = torch.randn(outputs if has_bias else 0, generator=generator)
    exact = linear(x, weight, scale, bias)
    steps, token_scales = quantised(x)
    whole = steps.to(torch.int32) @ weight.to(torch.int32)
    assert torch.equal(exact, whole.float() * token_scales * scale + (bias if has_bias else 0))
    none = np.empty((0, 0), np.float32)
    work = kernels.WorkBuffers(
        *[none] * 6, np.empty(0, np.float32),
        steps=np.empty(rows * inputs, np.float32), products=np.empty(rows * outputs, np.float32),
        token_scales=np.empty(rows, np.float32), packed=np.empty(kernels.PACKED, np.float32),
        chosen=np.empty((0, 0), np.int32), taken=np.empty(0, np.int32),
        **dict.fromkeys(("router", "shares", "expert_in", "expert_gate_up"), none),
        **dict.fromkeys(("expert_gated", "expert_out", "made"), none),
    )  # fmt: skip
    out = np.full((rows, outputs), np.nan, np.float32)
    kernels.project(x.numpy(), weight.numpy(), scale.numpy(), bias.numpy(), out, False, outputs, work)
    assert np.array_equal(work.steps.reshape(rows, inputs), steps.numpy())
    assert np.array_equal(work.token_scales, token_scales[:, 0].numpy())
    np.testing.assert_allclose(out, exact.numpy(), rtol=1e-6, atol=1e-6 * np.abs(exact.numpy()).max())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_spoils_its_own_outputs_only(bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    out = linear(x, torch.ones(8, 3, dtype=torch.int8), torch.ones(3), torch.zeros(0))
    assert out[0].tolist() == [8.0] * 3
    assert not out[1].isfinite().any()


def test_it_is_close_to_the_model_in_full_precision(tmp_path: Path) -> None:
    exact = write_random_model(tmp_path / "exact", RandomModelSpec(layers=2, vocab=200, scale=1.0))
    rounded = write_random_model(
        tmp_path / "int8", RandomModelSpec(layers=2, vocab=200, extra={"quantization_config": quantization_config()})
    )
    ids = np.arange(60, dtype=np.int32)
    one, other = (load_model(path, threads=1) for path in (exact, rounded))
    off = np.abs(one.score(ids) - other.score(ids))
    assert 0 < off.mean() < 0.05 * one.score(ids).std()
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "gptq"}, r'quant_method must be "compressed-tensors", got "gptq"'),
        ({"format": "float-quantized"}, r'format must be "int-quantized" or "pack-quantized", got "float-quan'),
        ({"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme must be null"),
        ({"config_groups": {}}, "config_groups must be 1, got 0"),
        ({"config_groups": {"g": None}}, r'config_groups\.g\.targets must be \["Linear"\], got null'),
        ({"ignore": ["lm_head", "model.layers.0.mlp.down_proj"]}, r'ignore must be \["lm_head"\], got '),
    ],
)
def test_other_quantisations_are_refused_by_key(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    folder = write_random_model(tmp_path / "model", spec())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=said):
        load_model(folder)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("weights", "strategy", "tensor"), ("weights", "num_bits", 4), ("weights", "symmetric", False),
        ("input_activations", "dynamic", False), ("input_activations", "strategy", "tensor"),
    ],
)  # fmt: skip
def test_other_schemes_are_refused_by_key(tmp_path: Path, part: str, key: str, value: object) -> None:
    folder = write_random_model(tmp_path / "model", spec())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"][part][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=rf"config_groups\.group_0\.{part}\.{key} must be .*, got "):
        load_model(folder)


def test_scales_that_are_missing_or_of_the_wrong_shape_and_weights_that_are_not_int8_are_named(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "model", spec())
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"

    def load_with(changes: dict[str, torch.Tensor | None]) -> None:
        kept = {key: tensor for key, tensor in (tensors | changes).items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        load_model(folder)

    with pytest.raises(TensorMismatch, match=r"missing.*layers\.1\.mlp\.down_proj\.weight_scale"):
        load_with({f"{name}_scale": None})
    with pytest.raises(TensorMismatch, match=r"layers\.1\.mlp\.down_proj\.weight_scale"):
        load_with({f"{name}_scale": torch.ones(3, 1)})
    with pytest.raises(UnsupportedModel, match=r"down_proj\.weight is stored as F32 \(supported: I8\)"):
        load_with({name: tensors[name].float()})
