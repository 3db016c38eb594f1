"""API keys in force, the callers they identify, and the watcher that reloads the keys file.

Only hashes of keys are stored. If the file becomes invalid, its last valid content stays in force.
"""

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from frontend.callers import ANYBODY, ApiCaller
from frontend.errors import Forbidden, FrontendConfigError, KeysFileError, Unauthorized
from frontend.keys_file import KeyEntry, callers_of, parse_keys
from telemetry import FrontendMetrics

_log = logging.getLogger(__name__)


_HOW: Final = "create one with `moonpool keys new --admin` and add its entry to the --api-keys-file"


@dataclass(frozen=True)
class _Known:
    digest: bytes
    caller: ApiCaller
    expires_s: float | None


class ApiKeys:
    """API keys in force: fixed keys, given at the start, and the keys file's, which `replace` may change at any time.

    Thread-safe: `replace` swaps the whole table in one assignment.
    """

    def __init__(
        self, keys: Sequence[str] = (), *, required: bool = False, now_s: Callable[[], float] = time.time
    ) -> None:
        """`keys` are fixed keys, each a tenant of its own, none with admin scope.

        With `required`, requests need a key even while no key is configured.
        """
        digests = [digest_of(key.encode()) for key in keys]
        self._fixed = {each: _Known(each, ApiCaller(tenant_of(each)), None) for each in digests}
        self._known = self._fixed
        self._required = required or bool(keys)
        self._now_s = now_s

    @property
    def are_required(self) -> bool:
        """True if requests need a key."""
        return self._required

    @property
    def has_admin(self) -> bool:
        """True if any admin key exists, expired or not; holders of expired keys get a specific error."""
        return any(known.caller.is_admin for known in self._known.values())

    @property
    def tenants(self) -> tuple[str, ...]:
        """Tenants of all keys, sorted."""
        return tuple(sorted({known.caller.tenant for known in self._known.values()})) or ("",)

    def num_keys(self, *, admin: bool) -> int:
        """Return the number of keys of one scope, including expired ones."""
        return sum(known.caller.is_admin is admin for known in self._known.values())

    def replace(self, keys: Iterable[tuple[KeyEntry, ApiCaller]]) -> None:
        """Replace the keys file's keys."""
        of_file = {entry.digest: _Known(entry.digest, caller, entry.expires_s) for entry, caller in keys}
        self._known = {**self._fixed, **of_file}

    def caller(self, authorization: str | None) -> ApiCaller:
        """Return the caller of an Authorization header. Raises Unauthorized."""
        return self._caller(authorization) if self._required else ANYBODY

    def of_headers(self, headers: Mapping[str, str]) -> ApiCaller:
        """Return the caller of a request with these headers. Raises Unauthorized."""
        authorization, key = headers.get("authorization"), headers.get("x-api-key")
        if authorization is None and key is not None:  # as Anthropic's clients send it
            authorization = f"Bearer {key}"
        return self.caller(authorization)

    def admin(self, authorization: str | None) -> ApiCaller:
        """Return the caller of an admin's action.

        Raises Unauthorized, and Forbidden for a key without admin scope. Without any admin key, such actions are
        forbidden for all callers.
        """
        if not self.has_admin:
            raise Forbidden(
                f"this action requires an API key with admin scope, and none is configured: {_HOW}", code="no_admin_key"
            )
        caller = self._caller(authorization)
        if not caller.is_admin:
            raise Forbidden("this action requires an API key with admin scope, got a key with user scope")
        return caller

    @property
    def guard_views(self) -> bool:
        """True if viewing the cluster requires an admin key: tenants must not see each other's requests."""
        return self.are_required or self.has_admin

    def viewer(self, authorization: str | None) -> None:
        """Check the key of a caller who views the cluster. Raises Unauthorized, Forbidden."""
        if self.guard_views:
            self.admin(authorization)

    def is_admin(self, authorization: str | None) -> bool:
        """Return True if the Authorization header holds a key with admin scope."""
        try:
            return self._caller(authorization).is_admin
        except Unauthorized:
            return False

    def _caller(self, authorization: str | None) -> ApiCaller:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is required: send the header 'Authorization: Bearer KEY'")
        # The look-up is by hash, so its duration reveals at most the hash, from which the key cannot be derived.
        given = digest_of(key.strip().encode("latin-1", "replace"))  # as HTTP headers are decoded
        known = self._known.get(given)
        if known is None or not hmac.compare_digest(known.digest, given):
            raise Unauthorized("unknown API key")
        if known.expires_s is not None and self._now_s() >= known.expires_s:
            raise Unauthorized("this API key has expired", code="expired_api_key")
        return known.caller


def tenant_of(digest: bytes) -> str:
    """Return the tenant name of a fixed key; the key cannot be derived from it."""
    return digest.hex()[:16]


def digest_of(key: bytes) -> bytes:
    """Return the hash of a key, the only form in which a key is stored.

    Keys are long and random, so a deliberately slow hash would not protect them better.
    """
    return hashlib.sha256(key).digest()


_LOOK_EVERY_S: Final = 1.0
_LARGEST_NBYTES: Final = 16 << 20


class KeysFileWatcher:
    """Watcher that checks the keys file once a second and loads changed content.

    It compares the content, not the modification time: Kubernetes replaces the file by swapping a symbolic link, and
    two writes may have the same time.
    """

    def __init__(
        self, path: Path, keys: ApiKeys, metrics: FrontendMetrics, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Load the file. Raises FrontendConfigError if it is invalid."""
        self._path = path
        self._keys = keys
        self._metrics = metrics
        self._on_change = on_change
        self._watching: asyncio.Task[None] | None = None
        try:
            raw = _content(path)
            keys.replace(read_keys(raw))
        except KeysFileError as error:
            raise FrontendConfigError(f"--api-keys-file {path}: {error}") from error
        self._seen: bytes | None = _mark(raw)
        self._report_loaded()

    def start(self) -> None:
        """Start watching."""
        self._watching = asyncio.create_task(self._watch(), name="keys-file")

    async def close(self) -> None:
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                found = await asyncio.to_thread(self._read_if_changed)
                if found is None:
                    continue
                self._keys.replace(found)
            except KeysFileError as error:
                self._failed()
                _log.error("keeping the previous API keys: %s: %s", self._path, error)
            # Keep watching after any error; its message may contain a key, so it is not logged
            except Exception as error:
                self._failed()
                _log.error("keeping the previous API keys: %s: %s", self._path, type(error).__name__)
            else:
                self._report_loaded()
                self._on_change()

    def _read_if_changed(self) -> list[tuple[KeyEntry, ApiCaller]] | None:
        """Return the file's keys if its content has changed, else None.

        Raises KeysFileError once per invalid content.
        """
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

    def _report_loaded(self) -> None:
        num_user, num_admin = self._keys.num_keys(admin=False), self._keys.num_keys(admin=True)
        self._metrics.keys_good.inc()
        self._metrics.keys_current.set(1)
        self._metrics.user_keys.set(num_user)
        self._metrics.admin_keys.set(num_admin)
        _log.info("API keys of %s: %d with user scope, %d with admin scope", self._path, num_user, num_admin)
        if not num_user + num_admin:
            _log.warning("%s contains no API key: all requests are rejected", self._path)


def read_keys(raw: bytes) -> list[tuple[KeyEntry, ApiCaller]]:
    """Return the entries of a file's content, each with its caller. Raises KeysFileError."""
    try:
        return callers_of(parse_keys(raw.decode()))
    except UnicodeDecodeError as error:
        raise KeysFileError(f"not valid UTF-8 at byte {error.start}") from None


def _content(path: Path) -> bytes:
    # Raises KeysFileError.
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST_NBYTES + 1)
    except OSError as error:
        raise KeysFileError(f"cannot be read: {error.strerror}") from error
    if len(raw) > _LARGEST_NBYTES:
        raise KeysFileError(f"must have at most {_LARGEST_NBYTES} bytes")
    return raw


def _mark(raw: bytes) -> bytes:
    return hashlib.sha256(raw).digest()
