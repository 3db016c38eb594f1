"""Finds a running cluster: by the conductor's address, or by what `serve` wrote on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from moonpool.errors import ClusterNotFound, ConfigError
from moonpool.supervision.ready_file import READY_NAME, ReadyFile
from moonpool.supervision.run_dir import default_run_dir
from moonpool.transport_security import secure_as_environment_says

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Located:
    """Whom to ask. `ready` is None for a cluster that `serve` of this machine did not start."""

    conductor: str  # gRPC address
    urls: tuple[str, ...]  # of the front doors known
    ready: ReadyFile | None


def locate(*, conductor: str, url: str, ready_file: Path | None) -> Located:
    """The cluster that is meant; `conductor` or `ready_file` go before `url`, whose port names a local cluster.

    It is asked with the encryption that the environment names. Raises ClusterNotFound when `serve` left nothing there,
    ConfigError for key material that is of no use.
    """
    secure_as_environment_says()
    if conductor:
        return Located(conductor, (), None)
    path = ready_file or _default_ready_file(url)
    try:
        ready = ReadyFile.read(path)
    except ClusterNotFound as error:
        raise ClusterNotFound(
            f"no cluster of this user and machine is known for {ready_file or url} ({error}); "
            "give --conductor ADDRESS for one that runs elsewhere"
        ) from error
    return Located(ready.conductor, (ready.url,) if ready.url else (), ready)


def chat_url(url: str) -> str:
    """Where to ask: `url` as given, without a trailing slash or /v1; else port 8000, as the other commands do, unless
    no cluster of this user lives there and one does elsewhere: then the newest.

    Raises ConfigError for what is no http URL.
    """
    if not url:
        found = _usual_ready_file()
        return found.url if found is not None else DEFAULT_URL
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"--url {url!r} is no URL: {error}") from error
    if not usable:
        raise ConfigError(f"--url {url!r}: expected http://HOST:PORT")
    return parts.geturl().rstrip("/").removesuffix("/v1").rstrip("/")


def _usual_ready_file() -> ReadyFile | None:
    """Of this user's clusters that live, the one at the default port, else the one that came up last."""
    usual = _default_ready_file(DEFAULT_URL)
    found = []
    for path in default_run_dir(READY_NAME).parent.glob(f"*/{READY_NAME}"):
        try:
            ready = ReadyFile.read(path)
            os.kill(ready.supervisor_pid, 0)
            if ready.url:
                found.append((path == usual, path.stat().st_mtime, ready))
        except (ClusterNotFound, OSError):
            continue  # gone, or left behind by one that was killed
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def _default_ready_file(url: str) -> Path:
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ConfigError(f"--url {url!r} is no URL: {error}") from error
    if parts.scheme not in ("", "http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url!r}: expected http://HOST:PORT")
    return default_run_dir(str(port)) / READY_NAME
