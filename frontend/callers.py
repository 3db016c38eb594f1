"""Callers of the API, their tenants' quotas, and the salt that separates tenants' KV.

`TokenBucket` and `TenantQuota` are pure: time is an argument, in seconds of a monotonic clock.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final, Literal

from blake3 import blake3

from frontend.errors import ApiError, ClientGone, Overloaded, QuotaExceeded
from frontend.request import GenerationRequest

_SALT_CONTEXT: Final = "moonpool v1 2026 tenant salt"
_KEYED: Final = "\0"  # prefix that only tenants' salts have


@dataclass(frozen=True)
class Quota:
    """Limits of one tenant at one frontend; None means unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


UNBOUNDED: Final = Quota()


@dataclass(frozen=True)
class ApiCaller:
    """Identity of an API key. `key_name` appears in logs; the key itself never does."""

    tenant: str
    key_name: str = ""
    is_admin: bool = False
    cache_salt: str = field(default="", repr=False)
    """Configured salt of the tenant; "" derives it from the tenant's name."""
    quota: Quota = UNBOUNDED
    slo_classes: tuple[str, ...] = ()
    """Classes of objectives that the tenant may use; (): all."""

    def block_salt(self, requested: str) -> str:
        """Return the salt of the request's KV blocks: a request reuses only KV that was computed under the same salt.

        The salt combines the tenant and the request's own `requested` salt. Two tenants never share a salt, whatever
        their requests contain, unless both are configured with the same `cache_salt`. Without API keys only the
        request's salt counts.
        """
        if not self.tenant:
            return _KEYED * 2 + requested if requested.startswith(_KEYED) else requested
        own = ("configured", self.cache_salt) if self.cache_salt else ("tenant", self.tenant)
        parts = [part.encode("utf-8", "surrogatepass") for part in (*own, requested)]
        data = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return _KEYED + blake3(data, derive_key_context=_SALT_CONTEXT).hexdigest()


ANYBODY: Final = ApiCaller("")


QuotaReason = Literal["quota_requests", "quota_tokens", "quota_concurrent"]
QUOTA_REASONS: Final[tuple[QuotaReason, ...]] = ("quota_requests", "quota_tokens", "quota_concurrent")
_MINUTE_S: Final = 60.0
_CONCURRENT_RETRY_S: Final = 1.0  # Retry-After of the concurrency limit: the end of a running request is unknown
_ROUNDING: Final = 1e-6  # tolerance for rounding errors, in requests or tokens


@dataclass(frozen=True)
class QuotaRefusal:
    """Reason for a rejection, the limit, and the seconds after which the request may be repeated."""

    reason: QuotaReason
    limit: int
    retry_after_s: float


class TokenBucket:
    """Token bucket that holds at most one minute's amount. It may be overdrawn, to a negative level."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the amount available at `now_s`; negative while the bucket is overdrawn."""
        filled = self._level + max(0.0, now_s - self._at_s) * self.per_minute / _MINUTE_S
        self._level, self._at_s = min(float(self.per_minute), filled), max(now_s, self._at_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until `amount` is available. An amount above the capacity waits for a full bucket."""
        lacking = min(amount, self.per_minute) - self.level(now_s)
        return lacking * _MINUTE_S / self.per_minute if lacking > _ROUNDING else 0.0

    def full_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is full."""
        return (self.per_minute - self.level(now_s)) * _MINUTE_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Take `amount`; a negative amount is returned to the bucket."""
        self._level = min(float(self.per_minute), self.level(now_s) - amount)

    def change(self, per_minute: int, now_s: float) -> None:
        """Change the rate; amounts already taken stay taken."""
        taken = self.per_minute - self.level(now_s)
        self.per_minute, self._level = per_minute, per_minute - taken


class TenantQuota:
    """Quota of one tenant.

    Each request calls `enter`, then `reserve` once its tokens are known, then `leave`, once each.
    """

    def __init__(self, quota: Quota, now_s: float) -> None:
        self.num_running = 0
        self.requests: TokenBucket | None = None
        self.tokens: TokenBucket | None = None
        self._quota = Quota()
        self.change(quota, now_s)

    def change(self, quota: Quota, now_s: float) -> None:
        """Replace the limits; running requests stay admitted."""
        if quota is not self._quota and quota != self._quota:
            self._quota = quota
            self.requests = _changed(self.requests, quota.requests_per_minute, now_s)
            self.tokens = _changed(self.tokens, quota.tokens_per_minute, now_s)

    def enter(self, now_s: float) -> QuotaRefusal | None:
        """Admit a request and take it from the request bucket; return the refusal if it is over the quota."""
        most = self._quota.max_concurrent
        if most is not None and self.num_running >= most:
            return QuotaRefusal("quota_concurrent", most, _CONCURRENT_RETRY_S)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            return QuotaRefusal("quota_requests", self.requests.per_minute, wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now_s)):
            return QuotaRefusal("quota_tokens", self.tokens.per_minute, wait_s)
        if self.requests is not None:
            self.requests.take(1, now_s)
        self.num_running += 1
        return None

    def reserve(self, tokens: int, now_s: float) -> QuotaRefusal | None:
        """Take tokens; return the refusal if there are too few. A full bucket admits a request of any size."""
        if self.tokens is None:
            return None
        if wait_s := self.tokens.wait_s(tokens, now_s):
            # The refused request counts, since its prompt was tokenised: another may have to wait for its place, too.
            place_s = 0.0 if self.requests is None else self.requests.wait_s(1, now_s)
            return QuotaRefusal("quota_tokens", self.tokens.per_minute, max(wait_s, place_s))
        self.tokens.take(tokens, now_s)
        return None

    def leave(self, *, reserved: int, used: int, counts: bool, now_s: float) -> None:
        """Return unused tokens to the bucket, and the request itself unless it counts."""
        self.num_running -= 1
        if self.tokens is not None:
            self.tokens.take(used - reserved, now_s)
        if self.requests is not None and not counts:
            self.requests.take(-1, now_s)


def _changed(bucket: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now_s)
    bucket.change(per_minute, now_s)
    return bucket


def whole(seconds: float) -> int:
    """Return the seconds rounded up to an integer, so that the wait is long enough."""
    return math.ceil(seconds)


_UNBOUNDED: Final = Quota()
_LIMIT_NAMES: Final = {
    "quota_requests": "requests per minute",
    "quota_tokens": "tokens per minute (prompt and requested tokens together)",
    "quota_concurrent": "concurrent requests",
}


class QuotaReservation:
    """Quota taken by one request, from its headers to its end. Always call `leave`; only the first call counts."""

    def __init__(self, quotas: "TenantQuotas | None", tenant: str = "", quota: TenantQuota | None = None) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._quota = quota
        self._reserved = 0
        self._has_left = False

    def reserve(self, requests: Sequence[GenerationRequest]) -> None:
        """Reserve the tokens that the requests may use; those of an endless answer are taken at its end.

        Raises QuotaExceeded.
        """
        if self._quotas is not None and self._quota is not None:
            tokens = sum([_prompt_tokens(each) + (0 if each.idle_s else each.sampling.max_tokens) for each in requests])
            if refusal := self._quota.reserve(tokens, self._quotas.now_s()):
                raise self._quotas.refused(self._tenant, self._quota, refusal)
            self._reserved = tokens

    def leave(self, *, used_tokens: int, counts: bool) -> None:
        """Return unused tokens to the quota, and the request itself unless it counts. Tokens may be overdrawn."""
        if self._quotas is None or self._quota is None or self._has_left:
            return
        self._has_left = True
        self._quota.leave(reserved=self._reserved, used=used_tokens, counts=counts, now_s=self._quotas.now_s())

    def headers(self) -> dict[str, str]:
        """Return OpenAI's x-ratelimit-* headers for the tenant's limits."""
        if self._quotas is None or self._quota is None:
            return {}
        return _rate_limit_headers(self._quota, self._quotas.now_s())


UNMETERED: Final = QuotaReservation(None)


def counts_in_quota(error: BaseException, *, has_own_objectives: bool = False) -> bool:
    """Return True if a request that ended with `error` before its first token counts in its tenant's request quota.

    Errors of the client count, and a disconnect. Errors of the cluster and rejections for load do not, unless the
    request had objectives of its own, by which a client can have any request rejected.
    """
    if isinstance(error, Overloaded):
        return has_own_objectives
    return isinstance(error, ClientGone) or (isinstance(error, ApiError) and error.status < 500)


class TenantQuotas:
    """Quotas of all tenants at this frontend; each frontend counts separately.

    Each new request uses the limits that are now in the keys file.
    """

    def __init__(self, count: Callable[[str, str], None], now_s: Callable[[], float] = monotonic) -> None:
        """`count(tenant, reason)` is called for each refusal."""
        self.now_s = now_s
        self._count = count
        self._tenants: dict[str, TenantQuota] = {}

    def enter(self, caller: ApiCaller) -> QuotaReservation:
        """Admit one request of the caller's tenant. Raises QuotaExceeded."""
        if caller.quota is _UNBOUNDED or caller.quota == _UNBOUNDED:
            return UNMETERED
        now_s = self.now_s()
        quota = self._tenants.get(caller.tenant)
        if quota is None:
            quota = self._tenants[caller.tenant] = TenantQuota(caller.quota, now_s)
        else:
            quota.change(caller.quota, now_s)
        if refusal := quota.enter(now_s):
            raise self.refused(caller.tenant, quota, refusal)
        return QuotaReservation(self, caller.tenant, quota)

    def refused(self, tenant: str, quota: TenantQuota, refusal: QuotaRefusal) -> QuotaExceeded:
        """Count the refusal and return the client's error."""
        self._count(tenant, refusal.reason)
        return QuotaExceeded(
            f"the quota of tenant {tenant!r} is {refusal.limit} {_LIMIT_NAMES[refusal.reason]} at this frontend",
            code=refusal.reason,
            retry_after_s=refusal.retry_after_s,
            quota_headers=_rate_limit_headers(quota, self.now_s()),
        )


def _prompt_tokens(request: GenerationRequest) -> int:
    # The prompt is charged once, with the first choice.
    return 0 if request.sampling.choice else len(request.prompt_ids)


def _rate_limit_headers(quota: TenantQuota, now_s: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    buckets: dict[str, TokenBucket | None] = {"requests": quota.requests, "tokens": quota.tokens}
    for name, bucket in buckets.items():
        if bucket is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now_s))))
            headers[f"x-ratelimit-reset-{name}"] = f"{whole(bucket.full_s(now_s))}s"
    return headers
