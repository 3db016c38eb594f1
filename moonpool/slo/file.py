"""Objectives in a YAML file: reading, validation, and printing."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from moonpool.config.sources import read_yaml
from moonpool.errors import ConfigError

if TYPE_CHECKING:
    from conductor.policy.objectives import SloRecord

_LARGEST_NBYTES = 1 << 20


def read_objectives(path: Path) -> Any:
    """Return the file's content, unvalidated. Raises ConfigError if it cannot be read or is not YAML."""
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise ConfigError(f"cannot read the objectives in {path}: {error.strerror}") from error
    if nbytes > _LARGEST_NBYTES:
        raise ConfigError(f"a file of objectives must have at most {_LARGEST_NBYTES} bytes, got {nbytes} in {path}")
    return read_yaml(path, "file of objectives")


def checked_objectives(path: Path) -> "SloRecord":
    """Return the validated objectives of the file. Raises ConfigError."""
    from conductor.errors import ObjectivesError
    from conductor.policy.objectives import parse_record

    try:
        return parse_record(read_objectives(path))
    except ObjectivesError as error:
        raise ConfigError(f"{path}: {error}") from error


def objectives_yaml(content: Any) -> str:
    """Return a record's plain form as YAML, which `read_objectives` can read."""
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True) if content else "{}  # no objectives\n"
