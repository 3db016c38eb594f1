"""Who asks, as the rest of the front door sees it, and the salt that keeps tenants' KV apart. Pure."""

from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

__all__ = ["ANYBODY", "UNBOUNDED", "Caller", "Quota"]

_SALT_CONTEXT: Final = "moonpool v1 2026 tenant salt"
_KEYED: Final = "\0"  # begins the salts of tenants, and of nobody else


@dataclass(frozen=True)
class Quota:
    """What one tenant may ask of one front door; None: as much as it likes."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


UNBOUNDED: Final = Quota()


@dataclass(frozen=True)
class Caller:
    """Whom a key stands for. `key_name` is told in logs, the key itself nowhere."""

    tenant: str
    key_name: str = ""
    is_admin: bool = False
    cache_salt: str = field(default="", repr=False)
    """The tenant's own, as configured; "": the one that follows from its name."""
    quota: Quota = UNBOUNDED

    def block_salt(self, requested: str) -> str:
        """Which of the cluster's KV a request of this caller may reuse: the tenant's, or of that only what was computed
        under the salt that the request itself names.

        No two tenants have a salt in common, whatever their requests say, unless both are configured with one
        `cache_salt`. Where no key is asked for, the request's salt is all there is.
        """
        if not self.tenant:
            return _KEYED * 2 + requested if requested.startswith(_KEYED) else requested
        own = ("configured", self.cache_salt) if self.cache_salt else ("tenant", self.tenant)
        parts = [part.encode("utf-8", "surrogatepass") for part in (*own, requested)]
        data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return _KEYED + blake3(data, derive_key_context=_SALT_CONTEXT).hexdigest()


ANYBODY: Final = Caller("")
