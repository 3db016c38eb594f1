"""Models given by their id on the Hugging Face hub, ORG/NAME or ORG/NAME@REVISION, in place of a local folder.

A path of this form is an id unless it, or the folder that would contain it, exists: a misspelt folder must not become a
download. Paths that begin with /, ./, ../ or ~, that end with / or that have another number of parts are always local.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from settings.keys import parse_path

__all__ = ["HubModel", "hub_model_named", "hub_model_of", "parse_model", "why_no_id"]

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<id>{_NAME}/{_NAME})(?:@(?P<revision>[^@\s]+))?")


@dataclass(frozen=True)
class HubModel:
    """Model on the Hugging Face hub."""

    id: str  # ORG/NAME
    revision: str = "main"  # branch, tag or commit

    def __str__(self) -> str:
        return self.id if self.revision == "main" else f"{self.id}@{self.revision}"


def parse_model(text: str) -> Path:
    """Return the path that a text names; absolute if only its spelling tells it from an id. Raises ValueError."""
    path = parse_path(text)
    is_spelt_local = text.startswith("./") or text.endswith("/")
    return path.absolute() if is_spelt_local and hub_model_named(path) is not None else path


def hub_model_of(path: Path) -> HubModel | None:
    """Return the model whose id `path` is; None for a local path."""
    model = hub_model_named(path)
    return None if model is None or path.exists() or path.parents[-2].exists() else model


def why_no_id(path: Path) -> str:
    """Return why a missing path was not taken as the id whose form it has; empty if it is one, or has another form."""
    if hub_model_named(path) is None or hub_model_of(path) is not None:
        return ""
    return (
        "it was not taken as the id of a model on the Hugging Face hub because there is a folder "
        f"{path.parts[0]}: correct the path, or run from another folder"
    )


def hub_model_named(path: Path) -> HubModel | None:
    """Return the model whose id has the form of `path`, even if it is a local path; None if it has another form."""
    found = _ID.fullmatch(str(path))
    return HubModel(found["id"], found["revision"] or "main") if found else None
