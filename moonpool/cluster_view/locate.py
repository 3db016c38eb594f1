"""Locates a running cluster: by an API server's URL, a conductor's address, or the ready file of `serve`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from moonpool.config.sources import URL_VARIABLE
from moonpool.errors import ClusterNotFound, ConfigError
from moonpool.supervision.ready_file import READY_NAME, ReadyFile
from moonpool.supervision.run_dir import default_run_dir
from moonpool.transport_security import secure_from_environment
from rpc.private_folder import open_trusted

if TYPE_CHECKING:
    from moonpool_proto.v1 import conductor_pb2

DEFAULT_URL = "http://127.0.0.1:8000"
CONDUCTOR_VARIABLE = "MOONPOOL_CONDUCTOR"  # as for roles, it may hold several addresses, separated by commas


@dataclass(frozen=True)
class Located:
    """Addresses of a cluster. `ready` is None for a cluster that `serve` on this machine did not start.

    `gateway` is the URL of the API server that forwards all calls to the cluster, "" if they are direct.
    """

    conductor: str  # gRPC address, or the URL at which calls to it are forwarded
    urls: tuple[str, ...]  # of the known API servers
    ready: ReadyFile | None
    others: tuple[str, ...] = ()  # further conductors that were given
    gateway: str = ""

    def target_of(self, node: "conductor_pb2.Node") -> str:
        """Return the target at which the node is called."""
        from rpc.gateway import node_url

        return node_url(self.gateway, node.node_id) if self.gateway else node.target


def locate(
    *,
    conductor: str | Sequence[str] = "",
    url: str = "",
    ready_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Located:
    """Return the requested cluster: behind the API server at `url`, or with direct access to its processes.

    Without arguments, it is the one that MOONPOOL_CONDUCTOR or MOONPOOL_URL names, otherwise this user's cluster on
    this machine at port 8000, otherwise the newest one. Applies the environment's TLS settings. Raises ClusterNotFound
    if there is none, ConfigError for two arguments, an invalid URL and unusable key material.
    """
    conductors = [conductor] if isinstance(conductor, str) else list(conductor)
    conductors = [each for each in conductors if each]
    given = [
        flag for flag, value in (("--url", url), ("--conductor", conductors), ("--ready-file", ready_file)) if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} name one cluster each: give only one of them")
    if not given:
        conductors = [each.strip() for each in environ.get(CONDUCTOR_VARIABLE, "").split(",") if each.strip()]
        url = "" if conductors else environ.get(URL_VARIABLE, "")
    if url:
        from rpc.gateway import conductor_url

        base = _base(url)
        return Located(conductor_url(base), (base,), None, gateway=base)
    secure_from_environment()
    if conductors:
        return Located(conductors[0], (), None, tuple(conductors[1:]))
    if ready_file is not None:
        try:
            return _started(ReadyFile.read(ready_file))
        except ClusterNotFound as error:
            raise ClusterNotFound(f"no cluster is known for {ready_file} ({error})") from error
    found = _usual_ready_file()
    if found is None:
        raise ClusterNotFound(
            "no cluster of this user runs on this machine; start one with `moonpool serve`, or give --url URL (or "
            f"{URL_VARIABLE}) for the API server of a cluster elsewhere, or --conductor ADDRESS for direct access"
        )
    return _started(found)


def api_url(url: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the API server's URL without a trailing slash or /v1: `url`, by default MOONPOOL_URL, otherwise that of a
    cluster of this user.

    The last is the cluster at port 8000, or the newest one if none runs there. Raises ConfigError for an invalid URL.
    """
    if url := url or environ.get(URL_VARIABLE, ""):
        return _base(url)
    found = _usual_ready_file(needs_url=True)
    return found.url if found is not None else DEFAULT_URL


def _started(ready: ReadyFile) -> Located:
    return Located(ready.conductor, (ready.url,) if ready.url else (), ready)


def _usual_ready_file(*, needs_url: bool = False) -> ReadyFile | None:
    """Return this user's running cluster at the default port, otherwise the one that started last."""
    usual = default_run_dir(str(urlsplit(DEFAULT_URL).port)) / READY_NAME
    found = []
    _check_own(usual.parent.parent)
    for path in default_run_dir(READY_NAME).parent.glob(f"*/{READY_NAME}"):
        try:
            ready = ReadyFile.read(path)
            os.kill(ready.supervisor_pid, 0)
            if ready.url or not needs_url:
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


def _base(url: str) -> str:
    """Return the URL of an API server without a trailing slash or /v1. Raises ConfigError for an invalid one."""
    return _parsed(url).geturl().rstrip("/").removesuffix("/v1").rstrip("/")


def _parsed(url: str) -> SplitResult:
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ConfigError(f"--url must be a URL, got {url!r}: {error}") from error
    if not usable:
        raise ConfigError(f"--url must be http://HOST:PORT, got {url!r}")
    return parts
