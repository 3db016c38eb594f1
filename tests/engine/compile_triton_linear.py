"""Compile the launches of Triton's linear layers for a generation of GPUs, without a GPU:

    python compile_triton_linear.py CAPABILITY DTYPE ROWS...

CAPABILITY: 80 (A100), 89 (RTX 4090), 90 (H100). Every launch is made with tensors that have no values (torch's "meta"
device), and compiled instead of run. The script fails if a kernel does not compile or needs more shared memory than a
program may have. It prints the names of the kernels.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from engine.backends import triton_expert_kernels, triton_linear_kernels
from engine.backends.triton_linear import TritonLinears, multiply, quantise
from engine.config import ModelConfig, parse_config
from engine.packed_weights import PackedMatrices
from engine.quantisation import INT8_ACTIVATIONS, INT8_WEIGHTS, PackedIntegers, quantization_config
from engine.random_model import RandomModelSpec
from engine.weights import DecoderWeights

SHARED_NBYTES = 99 << 10  # of a program on an RTX 4090; other GPUs have more
KERNELS = {
    triton_linear_kernels: ("quantise_rows", "quantise_norms", "gate_rows", "multiply"),
    triton_expert_kernels: ("gate_by_experts", "weigh_by_experts"),
}


class AbsentGpu:
    """Triton's driver of a GPU for which kernels are compiled."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompiledKernel:
    """A kernel whose launches are compiled."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **options: self._launch(grid, *args, **options)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        found = self._kernel.run(*args, grid=grid, warmup=True, **options)
        assert found.metadata.shared <= SHARED_NBYTES, (self._kernel.__name__, options, found.metadata.shared)
        print(self._kernel.__name__)


def config_of(**given: Any) -> ModelConfig:
    return parse_config(RandomModelSpec(**given).config(), {}, where="spec")


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def weights_of(**given: torch.Tensor) -> DecoderWeights:
    names = DecoderWeights.__dataclass_fields__
    return DecoderWeights(**(dict.fromkeys(names, empty(0, dtype=torch.float32)) | given | {"packed": {}}))


def compile_layers(rows: int, dtype: torch.dtype) -> None:
    """Compile what a layer in int8 and packed layers launch."""
    quantization = {"quantization_config": quantization_config(INT8_WEIGHTS, INT8_ACTIVATIONS)}
    inputs, outputs, bias = 4000, 4096, empty(4096, dtype=dtype)
    x, gate_up = empty(rows, inputs, dtype=dtype), empty(rows, 2 * inputs, dtype=dtype)
    for family, norm in (("llama", dtype), ("gemma2", torch.float32)):
        plain = TritonLinears(config_of(family=family), weights_of())
        in_int8 = TritonLinears(config_of(family=family, extra=quantization), weights_of())
        in_int8.quantised_norm(x, empty(inputs, dtype=norm))
        in_int8.gated(gate_up)
        plain.gated(gate_up)
    weight = empty(outputs, inputs, dtype=torch.int8).t()
    multiply(quantise(x), weight, empty(outputs, dtype=torch.float32), bias)
    for bits in (4, 8):
        for group in (0, 10, 128):
            words, scales = PackedIntegers(bits, group), empty(outputs, inputs // (group or inputs), dtype=dtype).t()
            matrix = PackedMatrices(empty(outputs, inputs * bits // 32, dtype=torch.int32).t(), scales, words, inputs)
            multiply(x, matrix, bias[:0], bias)


def compile_experts(rows: int, dtype: torch.dtype) -> None:
    """Compile what layers with experts in all forms launch."""
    experts, hidden, size = 128, 2048, 768
    shapes = {"experts_gate_up": (hidden, 2 * size), "experts_down": (size, hidden)}
    plain = config_of(family="qwen3_moe", experts=experts, hidden=hidden, intermediate=size)
    packed, int8, floats = {}, dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, (inputs, outputs) in shapes.items():
        words = empty(1, experts, outputs, inputs // 8, dtype=torch.int32).transpose(2, 3)
        scales = empty(1, experts, outputs, inputs // 128, dtype=dtype).transpose(2, 3)
        packed[name] = PackedMatrices(words, scales, PackedIntegers(4, 128), inputs)
        int8[name] = empty(1, experts, outputs, inputs, dtype=torch.int8).transpose(2, 3)
        int8[name + "_scale"] = empty(1, experts, outputs, dtype=torch.float32)
        floats[name] = empty(1, experts, inputs, outputs, dtype=dtype)
        floats[name + "_scale"] = empty(1, experts, 0, dtype=torch.float32)
    router, h = empty(1, hidden, experts, dtype=dtype), empty(rows, hidden, dtype=dtype)
    for weights in (weights_of(**floats), weights_of(**int8), replace(weights_of(**floats), packed=packed)):
        TritonLinears(plain, replace(weights, router=router)).mix_experts(0, h)


def main(capability: str, dtype: str, *rows: str) -> None:
    triton.runtime.driver.set_active(AbsentGpu(int(capability)))
    for module, names in KERNELS.items():
        for name in names:
            setattr(module, name, CompiledKernel(getattr(module, name)))
    for count in map(int, rows):
        compile_layers(count, getattr(torch, dtype))
        compile_experts(count, getattr(torch, dtype))


if __name__ == "__main__":
    main(*sys.argv[1:])
