"""The model of a load test: a local folder, or the id of a model on the Hugging Face hub.

The distribution moonpool-client lacks the packages that download models, and takes folders only.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from loadtest.errors import ModelUnavailable, VerificationError

__all__ = ["local_model_folder", "parse_model_path"]


def parse_model_path(text: str) -> Path:
    """Return the path or id that a flag names: Typer parser. Raises ValueError."""
    if not _can_download():
        return Path(text)
    from settings.hub_model import parse_model

    return parse_model(text)


def local_model_folder(path: Path, *, flag: str, weights: bool) -> Path:
    """Return the model's folder, which is downloaded if `path` is an id and the hub's cache lacks it.

    `weights`: they are needed, and so is a family that the engine supports; otherwise only a tokenizer. Raises
    ModelUnavailable, naming `flag`, or VerificationError.
    """
    if not _can_download():
        if not path.exists():
            raise ModelUnavailable(
                f"{flag}: there is no folder {path}; give the folder of the served model. Ids of the Hugging Face hub "
                "need moonpool in place of moonpool-client"
            )
        return path
    from engine import EngineError, UnsupportedModel
    from engine.local_folder import local_folder
    from settings.hub_model import why_no_id

    if not path.exists() and (why := why_no_id(path)):
        raise ModelUnavailable(f"{flag}: there is no folder {path}; {why}")
    try:
        return local_folder(path, weights=weights, any_family=not weights)
    except UnsupportedModel as error:
        raise VerificationError(f"cannot verify: {error}; omit --verify") from error
    except EngineError as error:
        raise ModelUnavailable(f"{flag}: {error}") from error


def _can_download() -> bool:
    return find_spec("engine") is not None
