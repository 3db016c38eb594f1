"""Errors of the package.

TrainingError
├── SourceMismatch     a source's sha256 differs from the recorded one
├── SourceMissing      a source package is neither cached nor downloadable
├── CheckpointMismatch a checkpoint belongs to a run with a different seed or tokenizer
└── UnsuitableShape    the model is too small for the lookup circuit of its initialisation
"""


class TrainingError(Exception):
    """Base class of the package's errors."""


class SourceMismatch(TrainingError):
    """A source's sha256 differs from the recorded one."""


class SourceMissing(TrainingError):
    """A source package is neither cached nor downloadable."""


class CheckpointMismatch(TrainingError):
    """A checkpoint belongs to a run with a different seed or tokenizer."""


class UnsuitableShape(TrainingError):
    """The shape has too few layers or key/value heads, or too small a hidden size, for the lookup circuit."""
