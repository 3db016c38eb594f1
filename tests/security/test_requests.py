"""Clients of the HTTP server who send what nobody means: others are served as before, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.long_cases import others_long
from tests.security.conftest import carry_out
from tools.attacks import authorisation, bodies, floods, raw_http, slow_clients
from tools.attacks.target import REQUESTS_PER_MINUTE, Attack, AttackedCluster


@pytest.mark.parametrize("attack", [raw_http.MALFORMED, bodies.HOSTILE], ids=lambda attack: attack.name)
async def test_malformed_requests_are_refused_one_by_one(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)


async def test_callers_get_what_their_keys_allow(target: AttackedCluster, second_tenant: Any) -> None:
    await carry_out(authorisation.DENIED, target)


@pytest.mark.parametrize(
    "attack", others_long(slow_clients.ATTACKS, [slow_clients.SLOW_HEADS]), ids=lambda attack: attack.name
)
async def test_slow_clients_delay_nobody(target: AttackedCluster, second_tenant: Any, attack: Attack) -> None:
    await carry_out(attack, target)


async def test_failed_requests_are_counted_by_the_quota(target: AttackedCluster, second_tenant: Any) -> None:
    found = await carry_out(floods.FAILED, target)
    assert found["429"] > 30


async def test_tokenising_is_counted_by_the_quota(target: AttackedCluster, second_tenant: Any) -> None:
    found = await carry_out(floods.TOKENIZE_QUOTA, target)
    assert found.get("200", 0) <= REQUESTS_PER_MINUTE + 1  # one is refilled every 12 s
