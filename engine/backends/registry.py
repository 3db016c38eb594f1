"""The backends by name: what each needs, and which one runs a model.

With "auto", the first one of the registry that can run the model is taken.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from engine.backends.compiled import CompiledBackend
from engine.backends.interface import Backend
from engine.backends.tensors import TensorBackend
from engine.config import ModelConfig
from engine.errors import BackendUnavailable
from engine.rope import RopeTable
from engine.weights import DecoderWeights

AUTO: Final = "auto"
BATCH_INVARIANT: Final = "batch-invariant"
"""The backend compiled in a form for verification: the logits of a row do not depend on the rest of the batch."""


@dataclass(frozen=True)
class Placement:
    """Where a model runs: device, dtype of the computation, tokens per block of its cache; None: not known yet."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    block_tokens: int | None = None


@dataclass(frozen=True)
class BackendKind:
    """A backend of the registry."""

    name: str
    chosen: str  # when "auto" takes it, for the docs
    needs: str  # for the docs
    problem: Callable[[Placement], str]  # why it cannot run the model; empty if it can
    build: Callable[[ModelConfig, DecoderWeights, RopeTable], Backend]
    takes_auto: bool = True
    computes_endless: bool = True
    keeps_packed: bool = False  # multiplies by packed weights as they are stored


def choose_backend(name: str, placement: Placement) -> BackendKind:
    """Return the backend of that name, or with "auto" the first that can run the model. Raises `BackendUnavailable`."""
    if name == AUTO:
        return next(kind for kind in BACKENDS.values() if kind.takes_auto and not kind.problem(placement))
    kind = _BATCH_INVARIANT if name == BATCH_INVARIANT else BACKENDS.get(name)
    if kind is None:
        raise BackendUnavailable(f"engine-backend must be one of {', '.join((AUTO, *BACKENDS))}, got {name!r}")
    if problem := kind.problem(placement):
        can = [kind.name for kind in BACKENDS.values() if not kind.problem(placement)]
        raise BackendUnavailable(f"engine-backend {name} {problem}; use {' or '.join((AUTO, *can))}")
    return kind


def _compiled_problem(placement: Placement) -> str:
    if placement.device.type == "cpu" and placement.dtype == torch.float32:
        return ""
    return f"runs on cpu in float32, not on {placement.device} in {_name(placement.dtype)}"


def _triton_problem(placement: Placement) -> str:
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed (it comes with torch's CUDA build)"
    if placement.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return "runs on CUDA, or on cpu under TRITON_INTERPRET=1 for tests"
    return ""


def _flash_problem(placement: Placement) -> str:
    from engine.backends.flash_attention import HEAD_UNIT, LARGEST_HEAD, PAGE_UNIT

    config, block_tokens = placement.config, placement.block_tokens
    if placement.device.type != "cuda":
        return f"runs on CUDA, not on {placement.device}"
    if placement.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 or bfloat16, not in {_name(placement.dtype)}"
    if find_spec("flash_attn") is None:
        return "needs the package flash-attn, which is not installed: pip install --no-build-isolation 'moonpool[gpu]'"
    if config.attention_sinks:
        return "does not compute learned sinks, which the model has"
    if config.kv_scale_group:
        return "does not read KV in int8, which the model has"
    if config.head_dim > LARGEST_HEAD or config.head_dim % HEAD_UNIT:
        return (
            f"computes heads of a multiple of {HEAD_UNIT} and up to {LARGEST_HEAD} dimensions, the model's have "
            f"{config.head_dim}"
        )
    if block_tokens is not None and block_tokens % PAGE_UNIT:
        return f"reads pages of a multiple of {PAGE_UNIT} tokens: block-tokens is {block_tokens}"
    return ""


def _tensors(attention: str, linears: str, rows: str) -> Callable[[ModelConfig, DecoderWeights, RopeTable], Backend]:
    """Return what builds the backend in torch operations around these classes, named by module and class; the modules
    are imported then.
    """
    named = [name.split(".") for name in (attention, linears, rows)]

    def build(config: ModelConfig, weights: DecoderWeights, rope: RopeTable) -> Backend:
        parts = [getattr(import_module(f"engine.backends.{module}"), kind)(config, weights) for module, kind in named]
        return TensorBackend(config, weights, rope, *parts)

    return build


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BACKENDS: Final = {
    kind.name: kind
    for kind in (
        BackendKind(
            "compiled",
            "on CPUs in float32",
            "a CPU, float32",
            _compiled_problem,
            CompiledBackend,
        ),
        BackendKind(
            "triton",
            "not yet: it has not run on a GPU",
            "a GPU and the package triton, which torch's CUDA build brings",
            _triton_problem,
            _tensors("triton_attention.TritonAttention", "triton_linear.TritonLinears", "triton_rows.TritonRows"),
            takes_auto=False,
            keeps_packed=True,
        ),
        BackendKind(
            "flash-attn",
            "not yet: it has not run on a GPU",
            "a GPU, the package flash-attn, float16 or bfloat16, `--block-tokens` that are a multiple of 256; computes "
            "neither learned sinks, KV in int8 nor endless requests",
            _flash_problem,
            _tensors("flash_attention.FlashAttention", "torch_linear.TorchLinears", "torch_rows.TorchRows"),
            takes_auto=False,
            computes_endless=False,
        ),
        BackendKind(
            "torch",
            "otherwise",
            "any device and dtype",
            lambda placement: "",
            _tensors("gathered_attention.GatheredAttention", "torch_linear.TorchLinears", "torch_rows.TorchRows"),
        ),
    )
}
"""All backends, in the order in which "auto" tries them."""
_BATCH_INVARIANT: Final = replace(BACKENDS["compiled"], build=partial(CompiledBackend, batch_invariant=True))
