"""Locates a running cluster: by the conductor's address, or by the ready file of `serve` on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from moonpool.errors import ClusterNotFound, ConfigError
from moonpool.supervision.ready_file import READY_NAME, ReadyFile
from moonpool.supervision.run_dir import default_run_dir
from moonpool.transport_security import secure_from_environment
from rpc.private_folder import open_trusted

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Located:
    """Addresses of a cluster. `ready` is None for a cluster that `serve` on this machine did not start."""

    conductor: str  # gRPC address
    urls: tuple[str, ...]  # of the known API servers
    ready: ReadyFile | None


def locate(*, conductor: str, url: str, ready_file: Path | None) -> Located:
    """Return the requested cluster; `conductor` and `ready_file` override `url`, whose port identifies a local cluster.

    Applies the environment's TLS settings. Raises ClusterNotFound if there is no ready file, ConfigError for unusable
    key material.
    """
    secure_from_environment()
    if conductor:
        return Located(conductor, (), None)
    path = ready_file or _default_ready_file(url)
    if ready_file is None:
        _check_own(path.parent)
    try:
        ready = ReadyFile.read(path)
    except ClusterNotFound as error:
        raise ClusterNotFound(
            f"no cluster of this user and machine is known for {ready_file or url} ({error}); "
            "give --conductor ADDRESS for a cluster elsewhere"
        ) from error
    return Located(ready.conductor, (ready.url,) if ready.url else (), ready)


def chat_url(url: str) -> str:
    """Return the server's URL: `url` without a trailing slash or /v1, or a cluster of this user if it is empty.

    The default is the cluster at port 8000, or the newest one if none runs there. Raises ConfigError for an invalid
    URL.
    """
    if not url:
        found = _usual_ready_file()
        return found.url if found is not None else DEFAULT_URL
    return _parsed(url).geturl().rstrip("/").removesuffix("/v1").rstrip("/")


def _usual_ready_file() -> ReadyFile | None:
    """Return this user's running cluster at the default port, otherwise the one that started last."""
    usual = _default_ready_file(DEFAULT_URL)
    found = []
    _check_own(usual.parent.parent)
    for path in default_run_dir(READY_NAME).parent.glob(f"*/{READY_NAME}"):
        try:
            ready = ReadyFile.read(path)
            os.kill(ready.supervisor_pid, 0)
            if ready.url:
                found.append((path == usual, path.stat().st_mtime, ready))
        except (ClusterNotFound, OSError):
            continue  # it has stopped, or was killed and left its file
    return max(found, key=lambda entry: entry[:2])[2] if found else None


def _check_own(folder: Path) -> None:
    """Raise ConfigError if another user could have put files into the folder. A folder that is missing has none."""
    try:
        os.close(open_trusted(folder))
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(
            f"no ready file is read in {folder}: {error}; or give --url, --conductor or --ready-file"
        ) from error


def _default_ready_file(url: str) -> Path:
    parts = _parsed(url)
    return default_run_dir(str(parts.port or (443 if parts.scheme == "https" else 80))) / READY_NAME


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"--url must be a URL, got {url!r}: {error}") from error
    if not usable:
        raise ConfigError(f"--url must be http://HOST:PORT, got {url!r}")
    return parts
