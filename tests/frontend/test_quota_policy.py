"""Quotas as pure policy: never more than a minute's worth beside what time brings, and nothing lost in between."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from frontend.callers import Quota, TenantQuota, TokenBucket

GAPS = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@given(st.integers(1, 600), GAPS)
def test_in_no_time_more_requests_enter_than_a_minutes_worth_and_what_the_time_brought(per: int, gaps: Any) -> None:
    quota, now_s, entered = TenantQuota(Quota(requests_per_minute=per), 0.0), 0.0, 0
    for gap_s in gaps:
        now_s += gap_s
        while quota.enter(now_s) is None:
            entered += 1
    assert per <= entered <= per + now_s * per / 60 + 1e-3


@given(st.integers(1, 100_000), st.integers(1, 200_000), st.floats(0, 100))
def test_whoever_waits_as_long_as_told_is_let_in(per: int, tokens: int, now_s: float) -> None:
    quota = TenantQuota(Quota(tokens_per_minute=per), 0.0)
    assert quota.enter(now_s) is None
    assert quota.reserve(tokens, now_s) is None  # however large: the bucket is full
    refusal = quota.reserve(tokens, now_s)
    if refusal is not None:
        assert refusal.reason == "quota_tokens"
        assert quota.reserve(tokens, now_s + refusal.retry_after_s * (1 + 1e-9) + 1e-6) is None


@given(st.integers(1, 1000), st.integers(1, 1000), st.floats(0, 1000), st.floats(0, 100))
def test_a_change_takes_nothing_back_that_was_taken(old: int, new: int, amount: float, now_s: float) -> None:
    bucket = TokenBucket(old, 0.0)
    bucket.take(amount, now_s)
    bucket.change(new, now_s)
    assert abs((new - bucket.level(now_s)) - amount) < 1e-6


def test_who_was_not_served_gives_back_all_it_took() -> None:
    quota = TenantQuota(Quota(requests_per_minute=1, tokens_per_minute=50, max_concurrent=1), 0.0)
    for _ in range(3):
        assert quota.enter(0.0) is None
        assert quota.reserve(50, 0.0) is None
        refusal = quota.enter(0.0)
        assert refusal is not None
        assert refusal.reason == "quota_concurrent"
        quota.leave(reserved=50, used=0, counts=False, now_s=0.0)
    assert quota.enter(0.0) is None
    quota.leave(reserved=0, used=0, counts=True, now_s=0.0)
    refusal = quota.enter(0.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("quota_requests", 60.0)


def test_a_request_refused_for_its_tokens_is_told_when_its_next_place_is_there() -> None:
    quota = TenantQuota(Quota(requests_per_minute=1, tokens_per_minute=600), 0.0)
    assert quota.enter(0.0) is None
    quota.leave(reserved=0, used=10, counts=False, now_s=0.0)
    assert quota.enter(0.0) is None
    refusal = quota.reserve(600, 0.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == ("quota_tokens", 60.0)
    quota.leave(reserved=0, used=0, counts=True, now_s=0.0)
    assert quota.enter(refusal.retry_after_s) is None
    assert quota.reserve(600, refusal.retry_after_s) is None


class Tenant(RuleBasedStateMachine):
    """Requests that come, reserve, and leave in any order, under a quota that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.most = 0.0, 2
        self.quota = TenantQuota(Quota(6, 100, self.most), 0.0)
        self.inside: list[int] = []

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(tokens=st.integers(0, 150))
    def comes(self, tokens: int) -> None:
        if self.quota.enter(self.now_s) is None:
            if self.quota.reserve(tokens, self.now_s) is None:
                self.inside.append(tokens)
            else:
                self.quota.leave(reserved=0, used=0, counts=False, now_s=self.now_s)

    @precondition(lambda self: self.inside)
    @rule(share=st.floats(0, 1), served=st.booleans())
    def leaves(self, share: float, served: bool) -> None:
        reserved = self.inside.pop()
        used = int(share * reserved) if served else 0
        self.quota.leave(reserved=reserved, used=used, counts=served, now_s=self.now_s)

    @rule(requests=st.integers(1, 10), tokens=st.integers(1, 200), most=st.integers(1, 4))
    def is_changed(self, requests: int, tokens: int, most: int) -> None:
        self.most = most
        self.quota.change(Quota(requests, tokens, most), self.now_s)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.quota.num_running == len(self.inside)
        for bucket in (self.quota.requests, self.quota.tokens):
            assert bucket is not None
            assert bucket.level(self.now_s) <= bucket.per_minute

    def teardown(self) -> None:
        for reserved in self.inside:
            self.quota.leave(reserved=reserved, used=0, counts=False, now_s=self.now_s)
        self.now_s += 10_000
        for bucket in (self.quota.requests, self.quota.tokens):
            assert bucket is not None
            assert bucket.level(self.now_s) == bucket.per_minute


TestTenant = Tenant.TestCase
