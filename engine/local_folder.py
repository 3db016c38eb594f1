"""The folder of a model that is given by a path or by its id on the Hugging Face hub."""

import sys
from pathlib import Path

from settings.hub_model import hub_model_named, hub_model_of


def local_folder(path: Path, *, weights: bool, any_family: bool = False) -> Path:
    """Return the folder of a model, which is downloaded if `path` is its id and the hub's cache lacks files of it.

    `weights`, `any_family`: as for `engine.hub.download`. Reports the choice on stderr if `path` could be either.
    Raises `HubError` or `UnsupportedModel`.
    """
    model = hub_model_of(path)
    if model is None:
        if hub_model_named(path) is None or not path.is_dir():
            return path
        print(f"Using the local folder {path}, not the model with this id on the Hugging Face hub", file=sys.stderr)
        return path.absolute()
    from engine.hub import download  # imported late: the hub's client takes a while

    return download(model, weights=weights, any_family=any_family)
