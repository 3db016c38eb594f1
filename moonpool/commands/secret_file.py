"""A secret that a file holds, so that no list of processes shows it."""

from pathlib import Path

from moonpool.errors import ConfigError


def read_secret(path: Path) -> str:
    """The file's one line. Raises ConfigError, which does not show it."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the secret in {path}: {error.__class__.__name__}") from error
    if not secret or not secret.isprintable() or " " in secret:
        raise ConfigError(f"{path}: expected one line of printable characters without spaces")
    return secret
