"""Strangers at the sockets between the processes, and killed processes: no request of a tenant is lost or wrong."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.security.conftest import RELEASED_WITHIN_S, SecondTenant, carry_out, wrong_tokens
from tools.attacks import kills, strangers
from tools.attacks.target import Attack, AttackedCluster, unlimited_session
from tools.attacks.victim import Victim
from tools.attacks.watch import wait_released

RECONNECTED_WITHIN_S = 45.0
LOG_NBYTES = 256 << 10


@pytest.mark.parametrize(
    "attack", [strangers.GARBAGE, strangers.GUESSED, strangers.HOGS], ids=lambda attack: attack.name
)
async def test_strangers_get_nothing_and_delay_nobody(
    target: AttackedCluster, second_tenant: Any, attack: Attack
) -> None:
    await carry_out(attack, target)


async def test_forged_notifications_hang_no_hand_off(target: AttackedCluster, second_tenant: SecondTenant) -> None:
    logs = {Path(node["log"]) for node in target.ready["nodes"].values() if node.get("log")}
    before = sum(log.stat().st_size for log in logs)
    await carry_out(strangers.FORGED, target)
    assert sum(log.stat().st_size for log in logs) - before < LOG_NBYTES


async def test_a_restarted_worker_gets_in_while_strangers_hold_connections(target: AttackedCluster) -> None:
    async with strangers.hogs(target) as held:
        assert sum(held.found.values()) >= 2 * strangers.HOGS_EACH
        pid = target.pids()["prefill-0"]
        os.kill(pid, signal.SIGKILL)
        assert await kills.wait_restarted(target, "prefill-0", pid)
        async with unlimited_session() as session:
            served = await Victim(target, within_s=RECONNECTED_WITHIN_S).ask(session)
        assert served.error == ""
    await wait_released(target, within_s=RELEASED_WITHIN_S)


async def test_a_killed_frontend_costs_no_request_of_a_client_that_retries(
    target: AttackedCluster,
    random_model: Path,
    judge_of: Callable[[Path], Any],
) -> None:
    over = asyncio.Event()
    asking = asyncio.create_task(Victim(target, within_s=RECONNECTED_WITHIN_S).ask_until(over))
    await carry_out(kills.KILLED, target)
    await carry_out(kills.KILLED, target)
    over.set()
    answers = await asking
    assert [answer.error for answer in answers if answer.error] == []
    assert wrong_tokens(judge_of(random_model), answers) == []
    await wait_released(target, within_s=RELEASED_WITHIN_S)
