"""A quick look at a model folder before any process starts; the engine checks the rest when it loads it."""

import json
from pathlib import Path

from moonpool.config.slices import BUNDLED_MODEL
from moonpool.errors import ModelFolderError


def check_model_folder(path: Path) -> None:
    """Raises ModelFolderError, naming what is missing, unless `path` looks like a Hugging Face model folder."""
    if not path.is_dir():
        hint = "; the bundled model was not installed with this copy" if path == BUNDLED_MODEL else ""
        raise ModelFolderError(f"the model folder {path} does not exist{hint}")
    config = path / "config.json"
    if not config.is_file():
        raise ModelFolderError(f"{path} is no model folder: it has no config.json (expected a Hugging Face folder)")
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{config} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderError(f"{config} must hold a JSON object, not {type(content).__name__}")
    if not any(path.glob("*.safetensors")):
        raise ModelFolderError(f"{path} holds no *.safetensors file: other weight formats are not read")
    if not (path / "tokenizer.json").is_file():
        raise ModelFolderError(f"{path} has no tokenizer.json: save a fast tokenizer there")
