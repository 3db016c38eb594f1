"""Secrets read from files, so that they do not appear in the list of processes."""

from pathlib import Path


def read_secret(path: Path) -> str:
    """Return the file's only line. Raises ValueError, whose message does not contain the secret."""
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the secret in {path}: {error.__class__.__name__}") from error
    if not secret or not secret.isprintable() or " " in secret:
        raise ValueError(f"{path} must contain one line of printable characters without spaces")
    return secret
