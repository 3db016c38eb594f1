"""Checks and downloads of models, and checks of cost profiles, before any process starts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moonpool.config import FrontendRole, ServeConfig, WorkerRole
from moonpool.errors import ConfigError, ModelFolderError, ModelNotDownloaded
from settings.hub_model import hub_model_of, why_no_id
from settings.worker import BUNDLED_MODEL, EngineSettings, ModelSettings

if TYPE_CHECKING:
    from worker.policy.cost_profile import CostProfile


C = TypeVar("C", ServeConfig, WorkerRole, FrontendRole)


def with_local_models(config: C) -> C:
    """Return the configuration with the snapshot's folder in place of each Hugging Face id; the names stay the same.

    Downloads what is missing in the hub's cache; a frontend and paced engines need no weights. Raises
    ModelNotDownloaded, or ModelFolderError.
    """
    cluster = None if isinstance(config, FrontendRole) else config.engine

    def local(path: Path, engine: EngineSettings | None) -> Path:
        if engine is None:
            return local_model(path, weights=False, any_family=True)
        return local_model(path, weights=engine.engine != "paced", any_family=engine.engine == "vllm")

    return _with_models(config, cluster, local)


def with_pinned_models(config: ServeConfig, local: ServeConfig) -> ServeConfig:
    """Return the configuration with the commit that was downloaded in each Hugging Face id: other hosts have their own
    caches, and must use the same weights. `local`: the result of `with_local_models`.
    """
    folders = {entry.name: entry.path for entry in local.served}
    paths = {entry.path: folders[entry.name] for entry in config.served}

    def pinned(path: Path, engine: EngineSettings | None) -> Path:
        model = hub_model_of(path)
        return path if model is None else Path(f"{model.id}@{paths[path].name}")

    return _with_models(config, config.engine, pinned)


def _with_models(config: C, cluster: EngineSettings | None, change: Callable[[Path, EngineSettings | None], Path]) -> C:
    given: ModelSettings = config.model
    path = change(given.path, cluster)
    changed = replace(given, model=path, served_model_name=(given.name, *given.aliases))
    model = given if path == given.path else changed
    if isinstance(config, WorkerRole):
        return replace(config, model=model)
    entries = tuple(
        replace(entry, path=change(entry.path, cluster and entry.engine(cluster))) for entry in config.further.models
    )
    return replace(config, model=model, further=replace(config.further, models=entries))


def local_model(path: Path, *, weights: bool = True, any_family: bool = False) -> Path:
    """Return the folder of a model, which is downloaded if `path` is its Hugging Face id and it is not in the cache.

    Reports the choice if `path` could be either. Raises ModelNotDownloaded, or ModelFolderError.
    """
    from engine import EngineError, HubError
    from engine.local_folder import local_folder

    try:
        return local_folder(path, weights=weights, any_family=any_family)
    except HubError as error:
        raise ModelNotDownloaded(str(error)) from error
    except EngineError as error:
        raise ModelFolderError(str(error)) from error


def check_model_folder(path: Path, engine: str = "transformer") -> None:
    """Raise ModelFolderError, with the engine's message, unless `path` is a Hugging Face folder of a supported model.

    Reads configuration and headers, never the weights, within milliseconds and without torch. The paced engine needs no
    weights, and which models vLLM supports, it says itself.
    """
    from engine import EngineError, check_folder, find_tokenizer
    from engine.config import read_config

    if path == BUNDLED_MODEL and not path.is_dir():
        raise ModelFolderError(f"the model folder {path} does not exist; the bundled model was not installed here")
    if not path.exists() and (why := why_no_id(path)):
        raise ModelFolderError(f"the model folder {path} does not exist; {why}")
    try:
        if engine == "paced":
            read_config(path)
        elif engine == "transformer":
            check_folder(path)
        find_tokenizer(path)
    except EngineError as error:
        raise ModelFolderError(str(error)) from error


def check_paced_profile(name: str) -> None:
    """Raise ConfigError unless there is such a cost profile."""
    from worker.errors import ProfileError
    from worker.paced.profiles import profile_of

    try:
        profile_of(name)
    except ProfileError as error:
        raise ConfigError(f"--paced-profile: {error}") from error


def cost_profiles_of(words: Sequence[str], models: Collection[str]) -> "dict[str, CostProfile]":
    """Parse texts [MODEL=]PROFILE to profiles by model. Raises ConfigError.

    `models`: the served models; empty if they are not known.
    """
    if not words:
        return {}
    from worker.errors import ProfileError
    from worker.paced.profiles import profile_of

    found: dict[str, CostProfile] = {}
    for word in words:
        named, equals, source = word.rpartition("=")
        try:
            profile = profile_of(source.strip())
        except ProfileError as error:
            raise ConfigError(f"--cost-profile {word!r}: {error}") from error
        model = named.strip() if equals else profile.model
        if models and model not in models:
            raise ConfigError(
                f"--cost-profile {word!r} is for model {model!r}, which is not served here ({', '.join(models)}): "
                "name the model, as MODEL=PROFILE"
            )
        if model in found:
            raise ConfigError(f"--cost-profile is given twice for model {model!r}: {found[model].name!r} and {word!r}")
        prefill, decode = profile.prefill, profile.decode
        if not (prefill.fixed_s + prefill.per_token_s + prefill.per_pair_s and decode.fixed_s + decode.per_sequence_s):
            raise ConfigError(f"--cost-profile {word!r}: all its costs are 0, which predicts nothing")
        found[model] = profile
    return found
