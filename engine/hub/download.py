"""Download of what a model needs: first its description, which is checked, then its weights if the disk has room.

`huggingface_hub` locks each file of the cache, so that processes of one host that want the same model download it once.
"""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_cached_repo_tree, snapshot_download
from huggingface_hub.errors import CachedRepoTreeNotFoundError
from rich.filesize import decimal

from engine.config import find_tokenizer, read_config
from engine.errors import HubError, ModelFormatError, UnsupportedModel
from engine.folder import WEIGHT_INDEX, WEIGHTS, indexed_shards
from engine.hub.failures import explained
from engine.hub.progress import Reporter, reporting_bars
from settings.hub_model import HubModel

# All that is read beside the weights; duplicates of the weights in other formats are left out.
_DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    WEIGHT_INDEX,
)


def download(model: HubModel, *, weights: bool, any_family: bool = False) -> Path:
    """Return the model's snapshot in the hub's cache, a folder named after the commit.

    Downloads what the cache lacks, the weights only if they are needed. Raises `HubError`; for a model that cannot be
    served, `HubError` or `UnsupportedModel` before its weights are downloaded. With `any_family`, that is left to
    another engine.
    """
    folder = Path(_snapshot(model, model.revision, _DESCRIPTION))
    try:
        if not any_family:
            read_config(folder)
        find_tokenizer(folder)
        files = _weight_files(model, folder) if weights else []
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{model}: {error}") from error
    except ModelFormatError as error:
        raise HubError(f"{model} is not a model that can be served: {error}") from error
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        _download_weights(model, folder.name, missing)
    return folder


def _weight_files(model: HubModel, folder: Path) -> list[str]:
    """Return the names of the snapshot's safetensors files. Raises `HubError` if it has none."""
    if (folder / WEIGHT_INDEX).is_file() and not (folder / WEIGHTS).is_file():
        return indexed_shards(folder)
    listed = _listed_files(model, folder)
    if WEIGHTS in listed:
        return [WEIGHTS]
    others = ", ".join(
        sorted(name for name in listed if name.endswith((".bin", ".gguf", ".pth", ".pt", ".safetensors")))
    )
    raise HubError(
        f"{model} has no weights in the safetensors format: expected {WEIGHTS} or {WEIGHT_INDEX}, found "
        f"{others or 'no weights'}; choose a model or a revision with safetensors files"
    )


def _listed_files(model: HubModel, folder: Path) -> set[str]:
    """Return the names of the files of the snapshot on the hub; those in the cache if that has no list of them."""
    try:
        return {file.path for file in get_cached_repo_tree(model.id, revision=folder.name)}
    except CachedRepoTreeNotFoundError:
        return {path.name for path in folder.iterdir()}


def _download_weights(model: HubModel, commit: str, names: list[str]) -> None:
    if constants.is_offline_mode():
        raise HubError(
            f"{model} is not complete in the cache {constants.HF_HUB_CACHE}, which lacks {', '.join(names)}, and "
            "HF_HUB_OFFLINE forbids downloads: run once without it"
        )
    planned = _snapshot(model, commit, names, dry_run=True)
    needed = sum(file.file_size for file in planned if file.will_download)
    _require_space(model, Path(constants.HF_HUB_CACHE), needed)
    with Reporter(str(model), needed) as reporter:
        _snapshot(model, commit, names, tqdm_class=reporting_bars(reporter))


def _require_space(model: HubModel, cache: Path, needed: int) -> None:
    """Raise `HubError` unless the cache's file system has room for `needed` bytes."""
    existing = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise HubError(
            f"{model} needs {decimal(needed)} for its weights, but only {decimal(free)} are free in the cache "
            f"{cache}: free some, or set HF_HOME to a folder of a larger disk"
        )


def _snapshot(model: HubModel, revision: str, names: Any, **options: Any) -> Any:
    """Call `snapshot_download` for these files. Raises `HubError`."""
    options = {"tqdm_class": reporting_bars(None)} | options
    try:
        return snapshot_download(model.id, revision=revision, allow_patterns=list(names), **options)
    except Exception as error:  # the hub's own errors, those of its HTTP client and of the file system
        raise explained(error, model) from error
