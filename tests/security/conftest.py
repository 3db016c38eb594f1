"""A real cluster under attack, judged by what a second tenant experiences meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.conftest import Answer, Cluster, judge_of, random_model, running_cluster  # noqa: F401  (fixtures)
from tools.attacks.target import Attack, AttackedCluster, write_keys_file
from tools.attacks.victim import Victim, VictimAnswer
from tools.attacks.watch import MemoryWatch, over_limit, wait_released

# Loose on purpose: a request takes some 50 ms alone, tests share their cores with others, and the defects that these
# tests are about held other tenants for 20 s to minutes, or for ever.
ANSWERED_WITHIN_S = 15.0
LIVE_WITHIN_S = 10.0
RELEASED_WITHIN_S = 30.0
JUDGED = 20  # answers whose tokens are computed again


@pytest.fixture(scope="session")
def attacked(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:  # noqa: F811
    """Two pool nodes stand for two hosts: KV goes over TCP between them and over shared memory within each."""
    tmp = tmp_path_factory.mktemp("attacked")
    flags = (
        "--pool-nodes",
        "2",
        "--frontends",
        "2",
        "--threads",
        "1",
        "--api-keys-file",
        str(write_keys_file(tmp / "keys.yaml")),
    )
    with running_cluster(tmp, random_model, *flags) as cluster:
        yield cluster


@pytest.fixture
def target(attacked: Cluster) -> AttackedCluster:
    attacked.reload()
    return AttackedCluster(attacked.url, attacked.ready_file)


@dataclass
class SecondTenant:
    """The second tenant's requests during one test; `served` is complete after it."""

    target: AttackedCluster
    over: asyncio.Event
    served: list[VictimAnswer]
    live_s: list[float]

    async def watch_live(self) -> None:
        """Ask for /live ten times a second until the test is over."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            while not self.over.is_set():
                began = time.monotonic()
                async with session.get(f"{self.target.url}/live") as response:
                    assert response.status == 200
                self.live_s.append(time.monotonic() - began)
                await asyncio.sleep(0.1)


@pytest.fixture
async def second_tenant(
    target: AttackedCluster,
    random_model: Path,  # noqa: F811
    judge_of: Callable[[Path], Any],  # noqa: F811
) -> AsyncIterator[SecondTenant]:
    """Let the second tenant send requests during the test, plain and structured ones, and judge in the end.

    None may fail or wait long, tokens must be right, /live must answer, no process may restart or grow over the chart's
    limit, and nothing may be held afterwards.
    """
    before = {name: (node["pid"], node["restarts"]) for name, node in target.ready["nodes"].items()}
    tenant = SecondTenant(target, asyncio.Event(), [], [])
    with MemoryWatch(target) as memory:
        asking = asyncio.create_task(Victim(target, within_s=ANSWERED_WITHIN_S).ask_until(tenant.over))
        living = asyncio.create_task(tenant.watch_live())
        yield tenant
        tenant.over.set()
        tenant.served += await asking
        await living
    assert [served.error for served in tenant.served if served.error] == []
    assert [served for served in tenant.served if served.retries] == []
    assert max(tenant.live_s) < LIVE_WITHIN_S
    assert wrong_tokens(judge_of(random_model), tenant.served) == []
    await wait_released(target, within_s=RELEASED_WITHIN_S)
    nodes = target.ready["nodes"]
    assert {name: (nodes[name]["pid"], nodes[name]["restarts"]) for name in before} == before
    assert over_limit(memory.peak_bytes) == {}


def wrong_tokens(judge: Any, served: list[VictimAnswer]) -> list[list[int]]:
    """Return the places of wrong tokens in the last plain answers, where there are any."""
    plain = [each for each in served if not each.is_structured][-JUDGED:]
    answers = [Answer(each.token_ids, each.prompt_ids, 0, "length", {}, {}) for each in plain]
    return [wrong for wrong in (judge.wrong_tokens(answer) for answer in answers) if wrong]


async def carry_out(attack: Attack, target: AttackedCluster) -> dict[str, int]:
    """Run an attack, check that its attacker saw what it may see of a defended cluster, and return what it saw."""
    async with asyncio.timeout(attack.within_s):
        found = await attack.run(target)
    assert attack.unexpected(found) == {}
    return found
