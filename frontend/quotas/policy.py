"""What one tenant may ask, decided. Pure: time is an argument, in seconds of a clock that never goes back."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from frontend.keys import Quota

__all__ = ["REASONS", "Bucket", "Reason", "Refusal", "TenantQuota"]

Reason = Literal["quota_requests", "quota_tokens", "quota_concurrent"]
REASONS: Final[tuple[Reason, ...]] = ("quota_requests", "quota_tokens", "quota_concurrent")
_MINUTE_S: Final = 60.0
_SOMEBODY_ENDS_S: Final = 1.0  # nobody knows when
_ROUNDING: Final = 1e-6  # of a request or token


@dataclass(frozen=True)
class Refusal:
    """Why not now, and after how long it is worth while to ask again."""

    reason: Reason
    limit: int
    retry_after_s: float


class Bucket:
    """Fills evenly, up to a minute's worth. It may be overdrawn: then it fills up to nothing first."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What may be taken now; negative while it is overdrawn."""
        filled = self._level + max(0.0, now_s - self._at_s) * self.per_minute / _MINUTE_S
        self._level, self._at_s = min(float(self.per_minute), filled), max(now_s, self._at_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until `amount` may be taken; 0: now. What no minute gives waits for a full bucket."""
        lacking = min(amount, self.per_minute) - self.level(now_s)
        return lacking * _MINUTE_S / self.per_minute if lacking > _ROUNDING else 0.0

    def full_s(self, now_s: float) -> float:
        """Until it is full."""
        return (self.per_minute - self.level(now_s)) * _MINUTE_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Negative: it is given back."""
        self._level = min(float(self.per_minute), self.level(now_s) - amount)

    def change(self, per_minute: int, now_s: float) -> None:
        """What was taken stays taken."""
        taken = self.per_minute - self.level(now_s)
        self.per_minute, self._level = per_minute, per_minute - taken


class TenantQuota:
    """One tenant's. A request enters, then reserves its tokens once these are known, and leaves; each of it once."""

    def __init__(self, quota: Quota, now_s: float) -> None:
        self.num_running = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self._quota = Quota()
        self.change(quota, now_s)

    def change(self, quota: Quota, now_s: float) -> None:
        """From now on this one holds; who has entered stays."""
        if quota is not self._quota and quota != self._quota:
            self._quota = quota
            self.requests = _changed(self.requests, quota.requests_per_minute, now_s)
            self.tokens = _changed(self.tokens, quota.tokens_per_minute, now_s)

    def enter(self, now_s: float) -> Refusal | None:
        """None: it has entered, and one request is taken."""
        most = self._quota.max_concurrent
        if most is not None and self.num_running >= most:
            return Refusal("quota_concurrent", most, _SOMEBODY_ENDS_S)
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now_s)):
            return Refusal("quota_requests", self.requests.per_minute, wait_s)
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now_s)):
            return Refusal("quota_tokens", self.tokens.per_minute, wait_s)
        if self.requests is not None:
            self.requests.take(1, now_s)
        self.num_running += 1
        return None

    def reserve(self, tokens: int, now_s: float) -> Refusal | None:
        """None: the tokens are taken. A request of more than a minute gives passes when the bucket is full."""
        if self.tokens is None:
            return None
        if wait_s := self.tokens.wait_s(tokens, now_s):
            return Refusal("quota_tokens", self.tokens.per_minute, wait_s)
        self.tokens.take(tokens, now_s)
        return None

    def leave(self, *, reserved: int, used: int, served: bool, now_s: float) -> None:
        """What was reserved and not used comes back; if it was not served, the request, too."""
        self.num_running -= 1
        if self.tokens is not None:
            self.tokens.take(used - reserved, now_s)
        if self.requests is not None and not served:
            self.requests.take(-1, now_s)


def _changed(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    bucket.change(per_minute, now_s)
    return bucket


def whole(seconds: float) -> int:
    """Rounded up: whoever waits that long has waited long enough."""
    return math.ceil(seconds)
