"""API keys: who may ask. Keys are kept and compared as hashes, in constant time."""

import hashlib
import hmac
from collections.abc import Sequence

from frontend.errors import Unauthorized


class ApiKeys:
    """The keys accepted; none means that everybody is."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._hashes = [_hash(key.encode()) for key in keys]

    @property
    def are_asked_for(self) -> bool:
        """Whether anybody needs one."""
        return bool(self._hashes)

    @property
    def tenants(self) -> tuple[str, ...]:
        """All there are: what `check` may return."""
        return tuple(tenant_of(known) for known in self._hashes) or ("",)

    def check(self, authorization: str | None) -> str:
        """The tenant that an Authorization header stands for, "" for everybody. Raises Unauthorized."""
        if not self._hashes:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
        given = _hash(key.strip().encode("latin-1"))  # as HTTP headers are decoded
        # Every key is compared, so that the time taken does not tell which one was near.
        matches = [hmac.compare_digest(given, known) for known in self._hashes]
        if not any(matches):
            raise Unauthorized("this API key is not known here")
        return tenant_of(given)


def tenant_of(key_hash: bytes) -> str:
    """The tenant's name, from which nobody can tell the key."""
    return key_hash.hex()[:16]


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
