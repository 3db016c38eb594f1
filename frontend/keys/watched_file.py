"""The file of keys as it changes: read again off the event loop, the last good content stays in force."""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from frontend.errors import ConfigError, KeysFileError
from frontend.keys.api_keys import ApiKeys
from frontend.keys.caller import Caller
from frontend.keys.entries import KeyEntry, callers_of, parse_keys
from telemetry import DoorMetrics

__all__ = ["KeysFile", "read_keys"]

_log = logging.getLogger(__name__)
_LOOK_EVERY_S: Final = 1.0
_LARGEST_NBYTES: Final = 16 << 20


class KeysFile:
    """Looks at the file once a second. Its content is compared, not its time: Kubernetes puts a new file in its place
    by swapping a link, and two writes may bear one time."""

    def __init__(
        self, path: Path, keys: ApiKeys, metrics: DoorMetrics, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Reads it for the first time. Raises ConfigError for a file that is of no use."""
        self._path = path
        self._keys = keys
        self._metrics = metrics
        self._on_change = on_change
        self._watching: asyncio.Task[None] | None = None
        try:
            raw = _content(path)
            keys.replace(read_keys(raw))
        except KeysFileError as error:
            raise ConfigError(f"--api-keys-file {path}: {error}") from error
        self._seen: bytes | None = _mark(raw)
        self._took()

    def start(self) -> None:
        """Look again from now on."""
        self._watching = asyncio.create_task(self._watch(), name="keys-file")

    async def close(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                found = await asyncio.to_thread(self._look)
                if found is None:
                    continue
                self._keys.replace(found)
            except KeysFileError as error:
                self._failed()
                _log.error("going on with the API keys from before: %s: %s", self._path, error)
            except Exception as error:  # whatever it is: the file is to be looked at again; its words may show content
                self._failed()
                _log.error("going on with the API keys from before: %s: %s", self._path, type(error).__name__)
            else:
                self._took()
                self._on_change()

    def _look(self) -> list[tuple[KeyEntry, Caller]] | None:
        """What it holds now; None while that is what it held before. Raises KeysFileError once for each content."""
        try:
            raw = _content(self._path)
        except KeysFileError:
            if self._seen is None:
                return None
            self._seen = None
            raise
        if _mark(raw) == self._seen:
            return None
        self._seen = _mark(raw)
        return read_keys(raw)

    def _failed(self) -> None:
        self._metrics.keys_bad.inc()
        self._metrics.keys_current.set(0)

    def _took(self) -> None:
        num_user, num_admin = self._keys.num_keys(admin=False), self._keys.num_keys(admin=True)
        self._metrics.keys_good.inc()
        self._metrics.keys_current.set(1)
        self._metrics.user_keys.set(num_user)
        self._metrics.admin_keys.set(num_admin)
        _log.info("API keys of %s: %d users', %d admins'", self._path, num_user, num_admin)
        if not num_user + num_admin:
            _log.warning("%s holds no API key: nobody is let in", self._path)


def read_keys(raw: bytes) -> list[tuple[KeyEntry, Caller]]:
    """The entries of a file's content, and whom each stands for. Raises KeysFileError."""
    try:
        return callers_of(parse_keys(raw.decode()))
    except UnicodeDecodeError as error:
        raise KeysFileError(f"it is no UTF-8 text: byte {error.start}") from None


def _content(path: Path) -> bytes:
    """Raises KeysFileError."""
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_NBYTES + 1)
    except OSError as error:
        raise KeysFileError(f"it cannot be read: {error.strerror}") from error
    if len(raw) > _LARGEST_NBYTES:
        raise KeysFileError(f"it has more than {_LARGEST_NBYTES} bytes")
    return raw


def _mark(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()
