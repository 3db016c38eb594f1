"""A look at a model folder before any process starts: what would make a worker refuse it is found here, at once."""

from pathlib import Path

from moonpool.config.slices import BUNDLED_MODEL
from moonpool.errors import ModelFolderError


def check_model_folder(path: Path) -> None:
    """Raises ModelFolderError, in the engine's words, unless `path` is a Hugging Face folder that it can compute.

    Reads configuration and headers, never the weights; takes milliseconds and no torch.
    """
    from engine import EngineError, check_folder, find_tokenizer

    if path == BUNDLED_MODEL and not path.is_dir():
        raise ModelFolderError(f"the model folder {path} does not exist; the bundled model was not installed here")
    try:
        check_folder(path)
        find_tokenizer(path)
    except EngineError as error:
        raise ModelFolderError(str(error)) from error
