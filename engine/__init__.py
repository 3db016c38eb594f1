"""The transformer: model folders, the paged KV cache, forward steps and sampling.

The engine works on pages and layers and has no access to the pool, the network or requests; `engine.hub`, which
downloads model folders, runs before it. Modules that compute are imported on first use, so that a process can check a
model folder without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.config import KvGroupShape, ModelConfig, find_tokenizer
from engine.errors import (
    BackendUnavailable,
    CacheMismatch,
    CheckpointDamaged,
    ConfigInvalid,
    DeviceUnavailable,
    EngineError,
    HubError,
    InvalidBatch,
    ModelFolderMissing,
    ModelFormatError,
    SamplingError,
    TensorMismatch,
    TokenizerMissing,
    UnsupportedModel,
)
from engine.folder import check_folder

if TYPE_CHECKING:
    from engine.batch import FlatBatch, ForwardBatch, SequenceChunk
    from engine.cache import PagedCache
    from engine.layer_reuse import LayerInputs, LayerSpan, Recomputation
    from engine.logprobs import TokenLogprobs, log_probs
    from engine.model import Model, load_model
    from engine.sampling import SamplingRow, noisy_scores, sample
    from engine.steered_row import Bias, LogitSteering, Penalties
    from engine.steering import steer

__all__ = [
    "BackendUnavailable",
    "Bias",
    "CacheMismatch",
    "CheckpointDamaged",
    "ConfigInvalid",
    "DeviceUnavailable",
    "EngineError",
    "FlatBatch",
    "ForwardBatch",
    "HubError",
    "InvalidBatch",
    "KvGroupShape",
    "LayerInputs",
    "LayerSpan",
    "LogitSteering",
    "Model",
    "ModelConfig",
    "ModelFolderMissing",
    "ModelFormatError",
    "PagedCache",
    "Penalties",
    "Recomputation",
    "SamplingError",
    "SamplingRow",
    "SequenceChunk",
    "TensorMismatch",
    "TokenLogprobs",
    "TokenizerMissing",
    "UnsupportedModel",
    "check_folder",
    "find_tokenizer",
    "load_model",
    "log_probs",
    "noisy_scores",
    "sample",
    "steer",
]

_COMPUTING = {
    "Bias": "steered_row",
    "FlatBatch": "batch",
    "ForwardBatch": "batch",
    "TokenLogprobs": "logprobs",
    "LayerInputs": "layer_reuse",
    "LayerSpan": "layer_reuse",
    "LogitSteering": "steered_row",
    "Model": "model",
    "PagedCache": "cache",
    "Penalties": "steered_row",
    "Recomputation": "layer_reuse",
    "SamplingRow": "sampling",
    "SequenceChunk": "batch",
    "load_model": "model",
    "log_probs": "logprobs",
    "noisy_scores": "sampling",
    "sample": "sampling",
    "steer": "steering",
}


def __getattr__(name: str) -> Any:
    if name not in _COMPUTING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_COMPUTING[name]}"), name)
