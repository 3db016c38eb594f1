"""A look at a model folder before any process starts: what would make a worker refuse it is found here, at once."""

from pathlib import Path

from moonpool.config.slices import BUNDLED_MODEL
from moonpool.errors import ConfigError, ModelFolderError


def check_model_folder(path: Path, *, paced: bool = False) -> None:
    """Raises ModelFolderError, in the engine's words, unless `path` is a Hugging Face folder that it can compute.

    Reads configuration and headers, never the weights; takes milliseconds and no torch. A `paced` engine needs no
    weights.
    """
    from engine import EngineError, check_folder, find_tokenizer
    from engine.config import read_config

    if path == BUNDLED_MODEL and not path.is_dir():
        raise ModelFolderError(f"the model folder {path} does not exist; the bundled model was not installed here")
    try:
        read_config(path) if paced else check_folder(path)
        find_tokenizer(path)
    except EngineError as error:
        raise ModelFolderError(str(error)) from error


def check_paced_profile(name: str) -> None:
    """Raises ConfigError unless there is such a cost profile."""
    from worker.errors import ProfileError
    from worker.paced.profiles import profile_of

    try:
        profile_of(name)
    except ProfileError as error:
        raise ConfigError(f"--paced-profile: {error}") from error
