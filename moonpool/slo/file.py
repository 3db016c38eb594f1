"""Objectives in a YAML file, as text for people and as what the conductor takes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from moonpool.config.sources import read_yaml
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from conductor.policy.objectives import SloRecord

_LARGEST_NBYTES = 1 << 20


def read_objectives(path: Path) -> Any:
    """What the file says, of whatever form. Raises ConfigError for one that cannot be read or is no YAML."""
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read the objectives in {path}: {error.strerror}") from error
    if nbytes > _LARGEST_NBYTES:
        raise ConfigError(f"{path} has {nbytes} bytes: objectives have at most {_LARGEST_NBYTES}")
    return read_yaml(path, "file of objectives")


def checked_objectives(path: Path) -> "SloRecord":
    """The record that the file holds. Raises ConfigError."""
    from conductor.errors import ObjectivesError
    from conductor.policy.objectives import parse_record

    try:
        return parse_record(read_objectives(path))
    except ObjectivesError as error:
        raise ConfigError(f"{path}: {error}") from error


def objectives_yaml(content: Any) -> str:
    """A record's plain form as YAML, which `read_objectives` reads back."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True) if content else "{}  # no objectives\n"
