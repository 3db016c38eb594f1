"""The errors of the recipe.

TrainingError
├── SourceMismatch     a source's bytes are not the recorded ones
├── SourceMissing      a source package could not be found in the cache or fetched
├── CheckpointMismatch a checkpoint belongs to another run (seed or tokenizer)
└── UnsuitableShape    the model is too small for the circuit its initialisation writes
"""


class TrainingError(Exception):
    """Root of every error the recipe raises on purpose."""


class SourceMismatch(TrainingError):
    """A source's sha256 differs from the recorded one."""


class SourceMissing(TrainingError):
    """A source package is neither cached nor could be downloaded."""


class CheckpointMismatch(TrainingError):
    """A checkpoint does not fit the run that would resume it."""


class UnsuitableShape(TrainingError):
    """The shape has too few key/value heads or too narrow a residual stream for the lookup circuit."""
