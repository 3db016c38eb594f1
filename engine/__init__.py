"""The transformer: model folders, the paged KV cache, forward steps and sampling.

Knows pages and layers, never the pool, the network or a request.
"""

from engine.batch import ForwardBatch, SequenceChunk
from engine.cache import PagedCache
from engine.config import KvGroupShape, ModelConfig, find_tokenizer
from engine.errors import (
    CacheMismatch,
    CheckpointDamaged,
    ConfigInvalid,
    DeviceUnavailable,
    EngineError,
    InvalidBatch,
    ModelFormatError,
    ModelNotFound,
    SamplingError,
    TensorMismatch,
    TokenizerMissing,
    UnsupportedModel,
)
from engine.model import Model, load_model
from engine.sampling import SamplingRow, noisy_scores, sample

__all__ = [
    "CacheMismatch",
    "CheckpointDamaged",
    "ConfigInvalid",
    "DeviceUnavailable",
    "EngineError",
    "ForwardBatch",
    "InvalidBatch",
    "KvGroupShape",
    "Model",
    "ModelConfig",
    "ModelFormatError",
    "ModelNotFound",
    "PagedCache",
    "SamplingError",
    "SamplingRow",
    "SequenceChunk",
    "TensorMismatch",
    "TokenizerMissing",
    "UnsupportedModel",
    "find_tokenizer",
    "load_model",
    "noisy_scores",
    "sample",
]
