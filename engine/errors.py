"""The engine's errors, one tree.

EngineError
├── ModelFormatError        the folder is not a complete, well-formed checkpoint
│   ├── ModelFolderMissing  the folder, its config.json or its weights do not exist
│   ├── TokenizerMissing    a tokenizer is needed and the folder has no tokenizer.json
│   ├── ConfigInvalid       config.json is not JSON, or a value is missing or out of range
│   ├── CheckpointDamaged   a safetensors file is truncated or its header is malformed
│   └── TensorMismatch      tensors missing, unknown or of the wrong shape
├── HubError                a model cannot be downloaded from the Hugging Face hub, nor is it in its cache
├── UnsupportedModel        well-formed, but needs a feature that this engine does not support
├── DeviceUnavailable       the requested device or dtype is not available on this machine
├── BackendUnavailable      the requested backend does not exist, or cannot run the model on the device
├── CacheMismatch           cache memory, slot counts and groups do not match
├── InvalidBatch            a forward batch is invalid for the model or the cache
└── SamplingError           sampling parameters are out of range, or logits are not finite
"""

from collections.abc import Mapping, Sequence


class EngineError(Exception):
    """Base class of the engine's errors."""


class ModelFormatError(EngineError):
    """The model folder is not a complete, well-formed checkpoint."""


class ModelFolderMissing(ModelFormatError):
    """The folder, its config.json or its weights do not exist."""


class TokenizerMissing(ModelFormatError):
    """The folder has no tokenizer.json."""


class ConfigInvalid(ModelFormatError):
    """config.json cannot be read as a model configuration."""


class CheckpointDamaged(ModelFormatError):
    """A safetensors file is truncated or malformed."""


class TensorMismatch(ModelFormatError):
    """The checkpoint's tensors do not match its config.json.

    `missing` and `unexpected` are tensor names; `wrong_shape` maps a name to (expected, found).
    """

    def __init__(
        self,
        where: str,
        *,
        missing: Sequence[str],
        unexpected: Sequence[str],
        wrong_shape: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.wrong_shape = dict(wrong_shape)
        parts = []
        if missing:
            parts.append(f"missing {_abridged(self.missing)}")
        if unexpected:
            parts.append(f"not part of this architecture {_abridged(self.unexpected)}")
        if wrong_shape:
            shapes = [f"{name}: expected {list(want)}, found {list(got)}" for name, (want, got) in wrong_shape.items()]
            parts.append(f"wrong shape {_abridged(shapes)}")
        super().__init__(f"{where} does not have the tensors that its config.json describes: {'; '.join(parts)}")


class HubError(EngineError):
    """A model cannot be downloaded from the Hugging Face hub, and is not in its cache."""


class UnsupportedModel(EngineError):
    """The model needs an architecture or a feature that this engine does not support."""


class DeviceUnavailable(EngineError):
    """The requested device or dtype is not available on this machine."""


class BackendUnavailable(EngineError):
    """The requested backend does not exist, or cannot run the model on the device."""


class CacheMismatch(EngineError):
    """Cache memory, slot counts and groups do not match."""


class InvalidBatch(EngineError):
    """A forward batch is invalid for the model or the cache."""


class SamplingError(EngineError):
    """Sampling parameters are out of range, or logits are not finite."""


def _abridged(items: Sequence[str], shown: int = 4) -> str:
    """Return the first `shown` items and the number of the others."""
    more = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {more} more" if more > 0 else "")
