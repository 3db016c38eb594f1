"""The keys in force, and whom each stands for. Keys are known by their hashes alone."""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from frontend.errors import Forbidden, Unauthorized
from frontend.keys.caller import ANYBODY, Caller
from frontend.keys.entries import KeyEntry

__all__ = ["ApiKeys", "digest_of"]

_HOW: Final = "draw one with `moonpool keys new --admin` and put its entry into the file of --api-keys-file"


@dataclass(frozen=True)
class _Known:
    digest: bytes
    caller: Caller
    expires_s: float | None


class ApiKeys:
    """Plain keys, which are known from the start, and those of a file, which `replace` may change at any time.

    Thread-safe: what is in force is changed at once.
    """

    def __init__(self, keys: Sequence[str] = (), *, asks: bool = False, now_s: Callable[[], float] = time.time) -> None:
        """`keys`: each is a tenant of its own, none is an admin's. `asks`: a key is needed even while there is none."""
        digests = [digest_of(key.encode()) for key in keys]
        self._fixed = {each: _Known(each, Caller(tenant_of(each)), None) for each in digests}
        self._known = self._fixed
        self._asks = asks or bool(keys)
        self._now_s = now_s

    @property
    def are_asked_for(self) -> bool:
        """Whether anybody needs one."""
        return self._asks

    @property
    def has_admin(self) -> bool:
        """Whether anybody can be an admin; expired keys count, who has one is told that it is."""
        return any(known.caller.is_admin for known in self._known.values())

    @property
    def tenants(self) -> tuple[str, ...]:
        """All that `caller` may return, sorted."""
        return tuple(sorted({known.caller.tenant for known in self._known.values()})) or ("",)

    def num_keys(self, *, admin: bool) -> int:
        """Of one scope, the expired ones too."""
        return sum(known.caller.is_admin is admin for known in self._known.values())

    def replace(self, keys: Iterable[tuple[KeyEntry, Caller]]) -> None:
        """From now on these are the file's."""
        of_file = {entry.digest: _Known(entry.digest, caller, entry.expires_s) for entry, caller in keys}
        self._known = {**self._fixed, **of_file}

    def caller(self, authorization: str | None) -> Caller:
        """Whom an Authorization header stands for. Raises Unauthorized."""
        return self._caller(authorization) if self._asks else ANYBODY

    def admin(self, authorization: str | None) -> Caller:
        """The same for an operator's action. Raises Unauthorized, and Forbidden for a key that is no admin's.

        Where no key is an admin's, nobody may: such actions are never open.
        """
        if not self.has_admin:
            raise Forbidden(f"this needs an admin's API key, and none is configured: {_HOW}", code="no_admin_key")
        caller = self._caller(authorization)
        if not caller.is_admin:
            raise Forbidden("this needs an admin's API key; the given one is a user's")
        return caller

    def _caller(self, authorization: str | None) -> Caller:
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
        # Found by its hash: how long that takes tells of the hash at most, from which no key can be made.
        given = digest_of(key.strip().encode("latin-1", "replace"))  # as HTTP headers are decoded
        known = self._known.get(given)
        if known is None or not hmac.compare_digest(known.digest, given):
            raise Unauthorized("this API key is not known here")
        if known.expires_s is not None and self._now_s() >= known.expires_s:
            raise Unauthorized("this API key has expired", code="expired_api_key")
        return known.caller


def tenant_of(digest: bytes) -> str:
    """The tenant of a plain key, by a name from which nobody can tell the key."""
    return digest.hex()[:16]


def digest_of(key: bytes) -> bytes:
    """What is kept of a key. Keys are long and random: a hash that is slow on purpose would protect no better."""
    return hashlib.sha256(key).digest()
