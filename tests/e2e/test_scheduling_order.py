"""Scheduling order in a live cluster: a flood starves no tenant, urgent requests overtake, and none waits for ever."""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

AGING_S = 4
KEYS = {"flooding": "key-of-the-one-that-floods", "modest": "key-of-the-modest-one"}
TENANT = {name: hashlib.sha256(key.encode()).hexdigest()[:16] for name, key in KEYS.items()}
SLO = {"classes": {"urgent": {"priority": -1}, "batch": {"priority": 1}}}


class Client:
    """Sends requests of ever new prompts, and notes in which order their first tokens come."""

    def __init__(self, cluster: Any, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.session = session
        self.began: list[str] = []
        self._rng = np.random.default_rng(5)

    async def ask(self, name: str, tenant: str = "modest", prompt_tokens: int = 1200, **fields: Any) -> None:
        prompt = self._rng.integers(4, 2000, prompt_tokens).tolist()
        body = {"model": self.cluster.ready["model"], "prompt": prompt, "max_tokens": 2, "stream": True, **fields}
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        url = f"{self.cluster.url}/v1/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                assert b'"error":' not in line, line
                if line.startswith(b"data: {") and name not in self.began:
                    self.began.append(name)

    async def metric(self, name: str, tenant: str) -> float:
        async with self.session.get(f"{self.cluster.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line for line in lines if line.startswith(f"moonpool:{name}{{") and TENANT[tenant] in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    async def has_begun(self) -> int:
        """Once something has: what was asked together with it waits. How much has begun by now."""
        async with asyncio.timeout(100):
            while not self.began:
                await asyncio.sleep(0.01)
        return len(self.began)


@pytest.fixture(scope="module")
def cluster(
    start_cluster: Callable[..., AbstractContextManager[Any]],
    random_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Any]:
    slo = tmp_path_factory.mktemp("slo") / "slo.yaml"
    slo.write_text(json.dumps(SLO))
    flags = ["--slo-file", str(slo), "--aging", str(AGING_S), "--prefill-chunk-tokens", "64", "--max-endless", "1"]
    flags += [
        "--metrics-show-tenants",
        "--endless-idle",
        "60",
        *(flag for key in KEYS.values() for flag in ("--api-key", key)),
    ]
    with start_cluster(random_model, *flags) as running:
        yield running


@pytest.fixture
def client(cluster: Any, session: aiohttp.ClientSession) -> Client:
    return Client(cluster, session)


async def test_one_that_floods_keeps_another_waiting_for_a_few_of_its_requests_only(client: Client) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(24):
            tasks.create_task(client.ask(f"flood-{number}", "flooding"))
        before = await client.has_begun()
        await client.ask("modest")
        waited_for = client.began.index("modest") - before
    # Of the flood: what its places on the node were already given to, and one per ticket that was no larger.
    assert waited_for <= 10
    assert len(client.began) == 25
    await client.cluster.validate()
    async with asyncio.timeout(60):  # the frontend asks for the conductor's numbers once a second
        while await client.metric("tenant_uncached_tokens_total", "flooding") < 24 * 1200:
            await asyncio.sleep(0.1)
    assert await client.metric("tenant_uncached_tokens_total", "flooding") == 24 * 1200
    assert await client.metric("tenant_generated_tokens_total", "flooding") == 24 * 2
    assert await client.metric("tenant_kv_block_seconds_total", "flooding") > 0


async def test_the_urgent_overtake_what_waits_and_nobody_waits_for_ever(client: Client) -> None:
    over = asyncio.Event()

    async def urgent(number: int) -> None:
        for round_number in range(1000):
            if over.is_set():
                return
            await client.ask(f"urgent-{number}-{round_number}", slo_class="urgent", prompt_tokens=300)

    async with asyncio.TaskGroup() as tasks:
        for number in range(10):
            tasks.create_task(client.ask(f"batch-{number}", slo_class="batch", prompt_tokens=900))
        before = await client.has_begun()
        await client.ask("first urgent", slo_class="urgent")
        assert client.began.index("first urgent") - before <= 6
        # From now on something more urgent waits at any time.
        for number in range(8):
            tasks.create_task(urgent(number))
        async with asyncio.timeout(300):
            while sum(name.startswith("batch") for name in client.began) < 10:
                await asyncio.sleep(0.05)
        over.set()


async def test_an_endless_request_goes_on_until_its_client_leaves_and_a_second_one_is_refused(client: Client) -> None:
    headers = {"authorization": f"Bearer {KEYS['modest']}"}
    body = {"model": client.cluster.ready["model"], "prompt": [5, 6, 7], "stream": True, "endless": True}
    body |= {"ignore_eos": True}
    url = f"{client.cluster.url}/v1/completions"
    async with client.session.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        for _ in range(20):
            assert b'"error":' not in await response.content.readline()
        async with client.session.post(url, json=body, headers=headers) as second:
            error = (await second.json())["error"]
            assert (second.status, error["code"]) == (429, "endless")
            assert second.headers["retry-after"] == "1"
    await client.cluster.validate()
