"""Triton's linear layers compute what torch computes. On machines without a GPU they run in Triton's interpreter."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from engine import ForwardBatch, load_model
from engine.backends.interface import QuantisedRows
from engine.backends.torch_linear import TorchLinears
from engine.backends.torch_rows import rms_norm
from engine.config import GELU_TANH, SILU
from engine.int8_linear import linear as int8_linear
from engine.int8_linear import quantised
from engine.packed_weights import PackedMatrices, pack, unpacked
from engine.quantisation import INT8_ACTIVATIONS, INT8_WEIGHTS, PackedIntegers, quantization_config
from engine.random_model import RandomModelSpec, write_random_model
from engine.weights import MATRICES, DecoderWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytest.importorskip("triton", reason="Triton is not installed: `make test` installs it")
from engine.backends import triton_expert_kernels, triton_linear  # noqa: E402
from engine.backends.triton_linear import TritonLinears, multiply, quantise  # noqa: E402

pytestmark = pytest.mark.long

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NONE = torch.empty(0, device=DEVICE)
LENGTH = 41


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    drawn = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    return drawn.to(DEVICE)


def assert_same_steps(found: QuantisedRows, want: torch.Tensor) -> None:
    """Compare with the reference on the CPU: on CUDA, torch divides by a number as it multiplies by its reciprocal."""
    steps, scales = quantised(want.cpu())
    assert torch.equal(found.steps.cpu(), steps.to(torch.int8))
    assert torch.equal(found.scales.cpu(), scales[:, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 1), (3, 17), (2, 64), (5, 1000)])
def test_rows_are_rounded_to_the_same_bits(rows: int, inputs: int, dtype: torch.dtype) -> None:
    x = values(rows, inputs, seed=inputs, dtype=dtype) * torch.logspace(-4, 4, rows)[:, None].to(DEVICE, dtype)
    found = quantise(x)
    assert_same_steps(found, x)
    assert found.dtype == dtype


def test_halves_rows_of_zeros_and_values_that_underflow_are_rounded_to_the_same_bits() -> None:
    halves = (torch.arange(-127, 127) + 0.5).repeat(2)[:255]
    halves[-1] = 127.0  # the scale is 1
    x = torch.stack([halves, torch.zeros(255), torch.full((255,), 1e-44), -halves]).to(DEVICE)
    assert_same_steps(quantise(x), x)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_spoils_its_own_row_only(bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 3] = bad
    weight = torch.ones(8, 3, dtype=torch.int8)
    out = multiply(quantise(x.to(DEVICE)), weight.to(DEVICE), torch.ones(3).to(DEVICE), torch.zeros(0).to(DEVICE))
    assert out[0].tolist() == [8.0] * 3
    assert not out[1].isfinite().any()


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (1, 100, 40), (16, 33, 7), (17, 65, 70), (70, 130, 129), (150, 40, 300)]
)
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_products_in_int8_are_exact(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    given = QuantisedRows(integers(rows, inputs, seed=rows), values(rows, seed=1).abs(), torch.float32)
    weight, scale = integers(outputs, inputs, seed=outputs).t(), values(outputs, seed=2).abs()
    bias = values(outputs if has_bias else 0, seed=3)
    sums = (given.steps.cpu().int() @ weight.cpu().int()).float().to(DEVICE)  # fewer digits than float32 has
    want = sums * given.scales[:, None] * scale
    found = multiply(given, weight, scale, bias)
    if has_bias:
        torch.testing.assert_close(found, want + bias, rtol=1e-6, atol=1e-4)
    else:
        assert torch.equal(found, want)


def test_sums_beyond_the_digits_of_float32_are_exact() -> None:
    inputs = 3000
    steps = torch.full((1, inputs), 127, dtype=torch.int8, device=DEVICE)
    weight = torch.full((inputs, 2), 127, dtype=torch.int8, device=DEVICE)
    weight[0, 1] = 126
    one = torch.ones(1, device=DEVICE)
    found = multiply(QuantisedRows(steps, one, torch.float32), weight, one.expand(2).contiguous(), one[:0])
    assert found.tolist() == [[127 * 127 * inputs, float(np.float32(127 * 127 * inputs - 127))]]


@pytest.mark.parametrize("seed", range(6))
def test_a_layer_in_int8_gives_the_bits_of_torch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, inputs, outputs = (int(rng.integers(1, most)) for most in (40, 300, 90))
    x, weight = values(rows, inputs, seed=seed).cpu(), integers(inputs, outputs, seed=seed).cpu()
    scale, bias = values(outputs, seed=seed).abs().cpu(), torch.zeros(0)
    found = multiply(quantise(x.to(DEVICE)), weight.to(DEVICE), scale.to(DEVICE), bias.to(DEVICE))
    assert torch.equal(found.cpu(), int8_linear(x, weight, scale, bias))


@pytest.fixture(scope="module")
def int8_linears(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TritonLinears]:
    """The linear layers of a model in int8, by activation."""
    spec = RandomModelSpec(extra={"quantization_config": quantization_config(INT8_WEIGHTS, INT8_ACTIVATIONS)})
    folder = write_random_model(tmp_path_factory.mktemp("model"), spec)
    model = load_model(folder, backend="triton", device=DEVICE, threads=1)
    kinds = (SILU, GELU_TANH)
    return {kind: TritonLinears(replace(model.config, activation=kind), model._weights) for kind in kinds}


def assert_close_steps(found: QuantisedRows, want: torch.Tensor) -> None:
    """Compare with rows whose values were summed in another order: a few round to the next integer."""
    steps, scales = quantised(want)
    off = (found.steps.float() - steps).abs()
    assert off.max() <= 1
    assert off.mean() < 0.01
    torch.testing.assert_close(found.scales, scales[:, 0], rtol=2 * torch.finfo(want.dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "inputs"), [(1, 64), (5, 93)])
def test_norms_are_quantised_at_once(int8_linears: Any, rows: int, inputs: int, norm_dtype: Any, dtype: Any) -> None:
    x, weight = values(rows, inputs, dtype=dtype), values(inputs, seed=1, dtype=norm_dtype)
    linears = int8_linears[SILU]
    found = linears.quantised_norm(x, weight)
    assert isinstance(found, QuantisedRows)
    assert_close_steps(found, rms_norm(x, weight.to(torch.promote_types(dtype, norm_dtype)), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [SILU, GELU_TANH])
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 93)])
def test_gated_rows_are_quantised_at_once(int8_linears: Any, rows: int, size: int, activation: str, dtype: Any) -> None:
    gate_up = 3 * values(rows, 2 * size, dtype=dtype)
    found = int8_linears[activation].gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    want = up * (F.silu(gate) if activation == SILU else F.gelu(gate, approximate="tanh"))
    assert isinstance(found, QuantisedRows)
    assert_close_steps(found, want)


def packed(outputs: int, inputs: int, of: PackedIntegers) -> tuple[PackedMatrices, torch.Tensor]:
    """Return a packed matrix, and as floats [inputs, outputs]."""
    words, scales = pack(values(outputs, inputs, seed=outputs).cpu(), of)
    floats = unpacked(words, scales, of, inputs).t()
    return PackedMatrices(words.to(DEVICE).t(), scales.to(DEVICE).t(), of, inputs), floats.to(DEVICE)


SHAPES = {
    "groups of 64": (64, 128, 40),
    "groups of 32": (32, 128, 40),
    "groups of 192, of which a part is multiplied at a time": (192, 384, 33),
    "groups of 128": (128, 384, 17),
    "small groups, in a part of a word": (5, 65, 30),
    "groups of 16": (16, 48, 64),
    "one scale": (0, 64, 40),
    "one scale, and inputs that do not fill a word": (0, 67, 9),
}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 20, 90])
def test_packed_weights_are_multiplied_as_their_floats(rows: int, shape: str, bits: int) -> None:
    group, inputs, outputs = SHAPES[shape]
    matrix, floats = packed(outputs, inputs, PackedIntegers(bits, group))
    x, bias = values(rows, inputs, seed=rows), values(outputs * (rows % 2), seed=9)
    want = x @ floats + bias if bias.numel() else x @ floats
    torch.testing.assert_close(multiply(x, matrix, NONE, bias), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("group", [0, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_packed_weights_are_multiplied_in_16_bits(dtype: torch.dtype, group: int) -> None:
    matrix, floats = packed(24, 64, PackedIntegers(4, group))
    x = values(3, 64, dtype=dtype)
    found = multiply(x, matrix, NONE, x.new_empty(0))
    assert found.dtype == dtype
    want = x.float() @ floats
    assert (found.float() - want).abs().max() < 4 * torch.finfo(dtype).eps * want.abs().max()


PACKED = {
    f"{bits} bits by {'group' if group else 'channel'}": quantization_config(
        {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "group" if group else "channel",
            **({"group_size": group} if group else {}),
        }
    )
    for bits in (4, 8)
    for group in (32, 0)
}
INT8 = quantization_config(INT8_WEIGHTS, INT8_ACTIVATIONS)


def of_mixture(form: dict[str, Any]) -> dict[str, Any]:
    """Return a scheme for a mixture, of which the routers stay floats."""
    return form | {"ignore": ["lm_head", "re:.*gate$"]}


BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS = {
    **{name: RandomModelSpec(scale=2.0, extra={"quantization_config": form}) for name, form in PACKED.items()},
    "4 bits, biases": RandomModelSpec(tied=False, extra={"quantization_config": PACKED["4 bits by group"], **BIASES}),
    "4 bits, gemma2": RandomModelSpec(
        family="gemma2", head_dim=16, extra={"quantization_config": PACKED["4 bits by group"]}
    ),
    "4 bits, shared KV": RandomModelSpec(
        family="moonpool", layers=3, extra={"kv_owners": [0, 0, 2], "quantization_config": PACKED["4 bits by group"]}
    ),
    "int8": RandomModelSpec(scale=2.0, extra={"quantization_config": INT8}),
    "int8, biases": RandomModelSpec(tied=False, extra={"quantization_config": INT8, **BIASES}),
    "int8, gemma2": RandomModelSpec(family="gemma2", head_dim=16, extra={"quantization_config": INT8}),
    "mixtral": RandomModelSpec(family="mixtral", hidden=32, experts=7, scale=2.0),
    "int8, mixtral": RandomModelSpec(family="mixtral", hidden=32, extra={"quantization_config": of_mixture(INT8)}),
    "8 bits, mixtral": RandomModelSpec(
        family="mixtral", hidden=32, experts=3, extra={"quantization_config": of_mixture(PACKED["8 bits by channel"])}
    ),
    "4 bits, qwen3_moe": RandomModelSpec(
        family="qwen3_moe",
        extra={
            "quantization_config": of_mixture(PACKED["4 bits by group"]),
            "mlp_only_layers": [1],
            "moe_intermediate_size": 96,
        },
    ),
    "qwen3_moe": RandomModelSpec(
        family="qwen3_moe",
        layers=3,
        experts=9,
        scale=2.0,
        extra={"num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [1], "moe_intermediate_size": 40},
    ),
}


def steps_of(model: Any, runner: Any) -> list[np.ndarray]:
    """Return the logits of a long chunk, of two together, and of decode rows."""
    run = runner(model, [LENGTH, LENGTH])
    return [
        run.step((0, 0, 30)),
        run.step((0, 30, 9), (1, 0, LENGTH - 1)),
        run.step((0, LENGTH - 2, 1), (1, LENGTH - 1, 1)),
        model.forward(ForwardBatch([run.chunk(0, LENGTH - 1, 1)]), run.cache).cpu().numpy(),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_logits_of_the_torch_backend(name: str, runner: Any, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, MODELS[name])
    models = [load_model(folder, backend=backend, device=DEVICE, threads=1) for backend in ("triton", "torch")]
    for found, want in zip(*(steps_of(model, runner) for model in models), strict=True):
        off = np.abs(found - want)
        if name.startswith("int8"):  # a sum in another order may round an activation to the next integer
            assert np.median(off) < 0.02 * want.std()
        else:
            assert off.max() < 2e-4
    ids = np.arange(20, dtype=np.int32)
    np.testing.assert_allclose(models[0].score(ids), models[1].score(ids), atol=1e-5, rtol=0)
    assert models[0].fingerprint == models[1].fingerprint


def linear_nbytes(weights: DecoderWeights) -> int:
    """Return the bytes that the linear layers' matrices and scales occupy."""
    held = [getattr(weights, name) for name in MATRICES]
    for matrices in weights.packed.values():
        held += [matrices.words, matrices.scales]
    return sum(tensor.numel() * tensor.element_size() for tensor in held)


@pytest.mark.parametrize("name", [*PACKED, "4 bits, qwen3_moe"])
def test_packed_weights_stay_as_small_as_they_are_stored(name: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, MODELS[name])
    by_triton, by_torch = (load_model(folder, backend=backend, device=DEVICE) for backend in ("triton", "torch"))
    stored = load_file(folder / "model.safetensors")
    want = sum(tensor.nbytes for key, tensor in stored.items() if key.endswith(("_packed", "_scale")))
    assert linear_nbytes(by_triton._weights) == want
    assert linear_nbytes(by_torch._weights) > (3.5 if name.startswith("8") else 6) * want
    assert not by_torch._weights.packed


def test_scales_of_several_dtypes_are_kept_in_float32(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, MODELS["4 bits by group"])
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight_scale"
    tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    weights = load_model(folder, backend="triton", device=DEVICE)._weights
    assert {name: held.scales.dtype for name, held in weights.packed.items()} == {
        "qkv": torch.float32,
        **dict.fromkeys(("out", "gate_up", "down"), torch.float16),
    }


def compile_for(folder: Path, *arguments: str) -> set[str]:
    """Return the kernels that `compile_triton_linear.py` compiles, with Triton's cache in `folder`."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compile_triton_linear.py")), *arguments]
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


KERNELS = {
    "gate_by_experts", "gate_rows", "multiply", "quantise_norms", "quantise_rows", "weigh_by_experts",
}  # fmt: skip


def test_all_launches_compile_for_a_gpu(tmp_path: Path) -> None:
    assert compile_for(tmp_path, "90", "bfloat16", "1", "16384") == KERNELS


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("capability", ["80", "89", "90"])
def test_all_launches_compile_for_all_gpus(capability: str, dtype: str, tmp_path: Path) -> None:
    assert compile_for(tmp_path, capability, dtype, "1", "20", "60", "16384") == KERNELS


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Any:
    spec = RandomModelSpec(family="qwen3_moe", experts=11, hidden=40, intermediate=50, extra={"num_experts_per_tok": 3})
    return load_model(write_random_model(tmp_path_factory.mktemp("model"), spec), backend="triton", device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 19, 150])
def test_experts_are_those_of_torch(mixture: Any, rows: int, dtype: torch.dtype) -> None:
    weights = moved(mixture._weights, dtype)
    h = values(rows, 40, seed=rows, dtype=dtype)
    found = TritonLinears(mixture.config, weights).mix_experts(1, h)
    want = TorchLinears(mixture.config, weights).mix_experts(1, h)
    assert found.dtype == dtype
    assert (found - want).abs().max() <= 8 * torch.finfo(dtype).eps * want.abs().max()


def moved(weights: DecoderWeights, to: Any) -> DecoderWeights:
    """Return the weights in a dtype or on a device."""
    every = {field.name: getattr(weights, field.name) for field in fields(weights)}
    return DecoderWeights(
        **{name: held.to(to) if isinstance(held, torch.Tensor) else held for name, held in every.items()}
    )


@pytest.mark.parametrize("favourite", [0, 10])
def test_all_rows_may_choose_the_same_experts(mixture: Any, favourite: int) -> None:
    router = torch.zeros_like(mixture._weights.router)
    router[:, :, favourite] = 1.0
    weights = replace(mixture._weights, router=router)
    h = values(70, 40).abs()
    found, want = (kind(mixture.config, weights).mix_experts(0, h) for kind in (TritonLinears, TorchLinears))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_most_tiles_of_any_choice_are_launched(seed: int) -> None:
    rng = np.random.default_rng(seed)
    choices, experts, rows = (int(rng.integers(1, most)) for most in (500, 40, 65))
    most = triton_expert_kernels.most_tiles(choices, experts, rows)
    for _ in range(50):
        counts = rng.multinomial(choices, rng.dirichlet(np.full(experts, 0.3)))
        assert (-(-counts // rows)).sum() <= most


@contextmanager
def host_may_not_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield a device on which reading a tensor's values fails: CUDA, or without it torch's "meta", whose tensors have
    no values, with kernels that do nothing.
    """
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield DEVICE
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return
    for name in ("gate_by_experts", "weigh_by_experts"):
        monkeypatch.setattr(triton_linear.expert_kernels, name, NoKernel())
    yield "meta"


class NoKernel:
    """A kernel of which launches do nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(type(size) is int for size in grid)
        return lambda *args, **options: None


def test_the_host_does_not_wait_for_the_choice_of_experts(mixture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with host_may_not_wait(monkeypatch) as device:
        linears = TritonLinears(mixture.config, moved(mixture._weights, device))
        found = linears.mix_experts(0, torch.empty(30, 40, device=device))
        assert found.shape == (30, 40)
        with pytest.raises((RuntimeError, NotImplementedError)):
            TorchLinears(mixture.config, moved(mixture._weights, device)).mix_experts(
                0, torch.empty(30, 40, device=device)
            )
