"""Checks of model folders and cost profiles before any process starts."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.errors import ConfigError, ModelFolderError
from settings.worker import BUNDLED_MODEL

if TYPE_CHECKING:
    from worker.policy.cost_profile import CostProfile


def check_model_folder(path: Path, engine: str = "transformer") -> None:
    """Raise ModelFolderError, with the engine's message, unless `path` is a Hugging Face folder of a supported model.

    Reads configuration and headers, never the weights, within milliseconds and without torch. The paced engine needs no
    weights, and which models vLLM supports, it says itself.
    """
    from engine import EngineError, check_folder, find_tokenizer
    from engine.config import read_config

    if path == BUNDLED_MODEL and not path.is_dir():
        raise ModelFolderError(f"the model folder {path} does not exist; the bundled model was not installed here")
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
