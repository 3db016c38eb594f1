"""Clients of the HTTP server who send what nobody means: others are served as before, and nothing stays behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security.conftest import carry_out
from tools.attacks import authorisation, bodies, raw_http, slow_clients
from tools.attacks.target import Attack, AttackedCluster


@pytest.mark.parametrize("attack", [raw_http.MALFORMED, bodies.HOSTILE], ids=lambda attack: attack.name)
async def test_malformed_requests_are_refused_one_by_one(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)


async def test_callers_get_what_their_keys_allow(target: AttackedCluster, second_tenant: Any) -> None:
    await carry_out(authorisation.DENIED, target)


@pytest.mark.parametrize("attack", [slow_clients.SLOW_HEADS, slow_clients.UNREAD], ids=lambda attack: attack.name)
async def test_slow_clients_delay_nobody(target: AttackedCluster, second_tenant: Any, attack: Attack) -> None:
    await carry_out(attack, target)
