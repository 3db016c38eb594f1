"""The engine's errors, one tree.

EngineError
├── ModelFormatError        the folder is not a complete, well-formed checkpoint
│   ├── ModelFolderMissing  no such folder, or no config.json / weights in it
│   ├── TokenizerMissing    no tokenizer.json where one was asked for
│   ├── ConfigInvalid       config.json is not JSON, or a value in it is missing or out of range
│   ├── CheckpointDamaged   a safetensors file is truncated or its header is malformed
│   └── TensorMismatch      tensors missing, unknown or of the wrong shape
├── UnsupportedModel        well-formed, but it asks for something this engine does not compute
├── DeviceUnavailable       the requested device or dtype cannot be had here
├── CacheMismatch           cache memory, slot counts or groups that do not fit together
├── InvalidBatch            a forward batch that cannot be computed as stated
└── SamplingError           sampling parameters out of range, or logits that are not numbers
"""

from collections.abc import Mapping, Sequence


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


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
    """The checkpoint's tensors are not those that its config.json promises.

    `missing`, `unexpected`: tensor names. `wrong_shape`: name -> (expected, found).
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
        super().__init__(f"{where} does not hold the tensors that its config.json promises: {'; '.join(parts)}")


class UnsupportedModel(EngineError):
    """The model asks for an architecture or a feature that this engine does not compute."""


class DeviceUnavailable(EngineError):
    """The requested device or dtype cannot be had on this machine."""


class CacheMismatch(EngineError):
    """Cache memory, slot counts or groups that do not fit together."""


class InvalidBatch(EngineError):
    """A forward batch that cannot be computed as stated."""


class SamplingError(EngineError):
    """Sampling parameters out of range, or logits that are not numbers."""


def _abridged(items: Sequence[str], shown: int = 4) -> str:
    """The first few items and how many more there are."""
    more = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {more} more" if more > 0 else "")
