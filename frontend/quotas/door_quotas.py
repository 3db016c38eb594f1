"""The quotas of all tenants of this front door, and a request's stay under its tenant's."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from frontend.errors import QuotaExceeded
from frontend.keys import Caller, Quota
from frontend.quotas.policy import Bucket, Refusal, TenantQuota, whole
from frontend.request import GenerationRequest

__all__ = ["UNCOUNTED", "DoorQuotas", "Stay"]

_UNBOUNDED: Final = Quota()
_WORDS: Final = {
    "quota_requests": "requests per minute",
    "quota_tokens": "tokens per minute, those of the prompt and those asked for together",
    "quota_concurrent": "requests at a time",
}


class Stay:
    """One request, from its headers until its end. `leave` must be called in any case; only the first time counts."""

    def __init__(self, quotas: "DoorQuotas | None", tenant: str = "", quota: TenantQuota | None = None) -> None:
        self._quotas = quotas
        self._tenant = tenant
        self._quota = quota
        self._reserved = 0

    def reserve(self, requests: Sequence[GenerationRequest]) -> None:
        """Take what they may use. An endless answer's tokens are taken at its end. Raises QuotaExceeded."""
        if self._quotas is not None and self._quota is not None:
            tokens = sum([_prompt_tokens(each) + (0 if each.idle_s else each.sampling.max_tokens) for each in requests])
            if refusal := self._quota.reserve(tokens, self._quotas.now_s()):
                raise self._quotas.refused(self._tenant, self._quota, refusal)
            self._reserved = tokens

    def leave(self, *, used_tokens: int, served: bool) -> None:
        """Settle by what was used; a request that was not served costs nothing."""
        quotas, quota, self._quota = self._quotas, self._quota, None
        if quotas is not None and quota is not None:
            quota.leave(reserved=self._reserved, used=used_tokens, served=served, now_s=quotas.now_s())

    def headers(self) -> dict[str, str]:
        """OpenAI's x-ratelimit-*, of what bounds the tenant."""
        if self._quotas is None or self._quota is None:
            return {}
        return _told(self._quota, self._quotas.now_s())


UNCOUNTED: Final = Stay(None)


class DoorQuotas:
    """Each front door counts for itself. What the file of keys says now holds for each request that comes."""

    def __init__(self, count: Callable[[str, str], None], now_s: Callable[[], float] = monotonic) -> None:
        """`count` is called with tenant and reason of each refusal."""
        self.now_s = now_s
        self._count = count
        self._tenants: dict[str, TenantQuota] = {}

    def enter(self, caller: Caller) -> Stay:
        """Take one request of the caller's tenant. Raises QuotaExceeded."""
        if caller.quota is _UNBOUNDED or caller.quota == _UNBOUNDED:
            return UNCOUNTED
        now_s = self.now_s()
        quota = self._tenants.get(caller.tenant)
        if quota is None:
            quota = self._tenants[caller.tenant] = TenantQuota(caller.quota, now_s)
        else:
            quota.change(caller.quota, now_s)
        if refusal := quota.enter(now_s):
            raise self.refused(caller.tenant, quota, refusal)
        return Stay(self, caller.tenant, quota)

    def refused(self, tenant: str, quota: TenantQuota, refusal: Refusal) -> QuotaExceeded:
        """Count it, and what the client is told."""
        self._count(tenant, refusal.reason)
        return QuotaExceeded(
            f"the quota of tenant {tenant!r} is {refusal.limit} {_WORDS[refusal.reason]}, at this front door",
            code=refusal.reason,
            retry_after_s=refusal.retry_after_s,
            quota_headers=_told(quota, self.now_s()),
        )


def _prompt_tokens(request: GenerationRequest) -> int:
    """Further answers to one prompt cost it once."""
    return 0 if request.sampling.choice else len(request.prompt_ids)


def _told(quota: TenantQuota, now_s: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    buckets: dict[str, Bucket | None] = {"requests": quota.requests, "tokens": quota.tokens}
    for name, bucket in buckets.items():
        if bucket is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(0, int(bucket.level(now_s))))
            headers[f"x-ratelimit-reset-{name}"] = f"{whole(bucket.full_s(now_s))}s"
    return headers
