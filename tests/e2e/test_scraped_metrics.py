"""Scraping as documented counts everything once, with one frontend and with two, and survives the loss of either.

Prometheus scrapes every process: the sum over all of them of a series is the cluster's number, whoever exports it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.supervision.http_port import claim_port
from tests.e2e.bare_roles import Role

TOKENS = 8
REQUESTS = 6  # of each frontend
Scrape = Counter[tuple[str, frozenset[tuple[str, str]]]]


class ScrapedCluster:
    """Two conductors, a pool node, two workers and two frontends, each with an endpoint that Prometheus can scrape."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        sockets = {name: f"unix:{folder}/{name}.sock" for name in ("c0", "c1", "pool", "p0", "d0")}
        self.ports = {name: claim_port("127.0.0.1", 0) for name in (*sockets, "f0", "f1")}
        join = ["--conductor", sockets["c0"], sockets["c1"]]
        worker = [*join, "--pool", sockets["pool"], "--model", str(model), *flags]
        words = {
            "c0": ["conductor"],
            "c1": ["conductor"],
            "pool": ["pool-node", *join, "--pool-bytes", "64MiB"],
            "p0": ["prefill-node", *worker],
            "d0": ["decode-node", *worker],
            **{name: ["frontend", *join, "--model", str(model), "--block-tokens", "8"] for name in ("f0", "f1")},
        }
        self.model_name = model.name
        self.roles: dict[str, Role] = {}
        for name, arguments in words.items():
            own = ["--port", str(self.ports[name])]
            if name in sockets:
                own = ["--listen", sockets[name], "--health", f"127.0.0.1:{self.ports[name]}"]
            own += ["--node-id", name, "--socket-dir", str(folder / "s")]
            self.roles[name] = Role(name, [*arguments, *own], folder / f"{name}.log")

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    async def ready(self, session: aiohttp.ClientSession, *names: str) -> None:
        async with asyncio.timeout(120):
            for name in names:
                while True:
                    try:
                        async with session.get(f"{self.url(name)}/ready") as response:
                            if response.status == 200:
                                break
                    except aiohttp.ClientError:
                        pass
                    await asyncio.sleep(0.1)

    async def scrape(self, session: aiohttp.ClientSession, *names: str, path: str = "/metrics") -> Scrape:
        """Sum the series over these processes; labels are kept, the process is not: it is Prometheus' `instance`."""
        total: Scrape = Counter()
        for name in names or tuple(self.roles):
            async with session.get(f"{self.url(name)}{path}") as response:
                assert response.status == 200, await response.text()
                text = await response.text()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    total[sample.name, frozenset(sample.labels.items())] += sample.value
        return total

    async def send(self, session: aiohttp.ClientSession, name: str, count: int = REQUESTS) -> None:
        for number in range(count):
            prompt = [5 + (number * 7 + place) % 900 for place in range(40)]
            body = {"model": self.model_name, "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
            async with session.post(f"{self.url(name)}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()


def sums(scrape: Scrape, name: str, **labels: str) -> float:
    return sum(
        value for (each, found), value in scrape.items() if each == name and labels.items() <= dict(found).items()
    )


@pytest.fixture(scope="module")
def cluster(paced_model: Path) -> Iterator[ScrapedCluster]:
    flags = ("--block-tokens", "8", "--engine", "paced", "--paced-profile", str(paced_model / "slow.json"))
    folder = Path(tempfile.mkdtemp(prefix="mp-"))
    found = ScrapedCluster(folder, paced_model, *flags)
    try:
        for role in found.roles.values():
            role.start()
        for role in found.roles.values():
            role.wait_ready()
        yield found
    finally:
        for role in found.roles.values():
            role.kill()
        shutil.rmtree(folder)


async def settled(cluster: ScrapedCluster, session: aiohttp.ClientSession, wanted: float) -> Scrape:
    """Scrape until the nodes' own counts are complete: the last token is counted after it was sent."""
    async with asyncio.timeout(30):
        while True:
            scrape = await cluster.scrape(session)
            if sums(scrape, "moonpool:prompt_tokens_total") >= wanted:
                return scrape
            await asyncio.sleep(0.1)


async def test_sums_over_all_processes_count_each_request_and_node_once(
    cluster: ScrapedCluster, session: aiohttp.ClientSession
) -> None:
    await cluster.ready(session, *cluster.roles)
    await cluster.send(session, "f0")
    await cluster.send(session, "f1")
    scrape = await settled(cluster, session, 2 * REQUESTS * 40)
    assert sums(scrape, "vllm:request_success_total", finished_reason="length") == 2 * REQUESTS
    assert sums(scrape, "vllm:prompt_tokens_total") == 2 * REQUESTS * 40
    assert sums(scrape, "vllm:generation_tokens_total") == 2 * REQUESTS * TOKENS
    assert sums(scrape, "moonpool:prompt_tokens_total") == 2 * REQUESTS * 40  # the prefill node's
    series = [key for key in scrape if key[0] == "vllm:num_requests_running"]
    assert sorted(dict(labels)["node"] for _, labels in series) == ["d0", "p0", "pool"]
    # Counted by the conductor that placed the request: the frontends prefer different ones or the same.
    assert sums(scrape, "moonpool:tenant_generated_tokens_total") == 0  # names no tenants
    assert sums(scrape, "moonpool:directory_blocks", node="pool", tier="dram") > 0


async def test_running_requests_are_counted_once(cluster: ScrapedCluster, session: aiohttp.ClientSession) -> None:
    async def long(name: str) -> None:
        body = {"model": cluster.model_name, "prompt": [9] * 24, "max_tokens": 400, "ignore_eos": True}
        async with session.post(f"{cluster.url(name)}/v1/completions", json=body) as response:
            assert response.status == 200

    running = [asyncio.create_task(long(name)) for name in ("f0", "f1", "f0", "f1")]
    highest = 0.0
    while not all(task.done() for task in running) and highest < 4:
        highest = max(highest, sums(await cluster.scrape(session), "vllm:num_requests_running", role="decode"))
        await asyncio.sleep(0.02)
    await asyncio.gather(*running)
    assert highest == 4


async def test_one_owner_exports_each_series_of_the_cluster(
    cluster: ScrapedCluster, session: aiohttp.ClientSession
) -> None:
    """No two processes export a series with the same labels, but those that are about each process."""
    exporters: dict[tuple[str, frozenset[tuple[str, str]]], list[str]] = {}
    for name in cluster.roles:
        for key in await cluster.scrape(session, name):
            exporters.setdefault(key, []).append(name)
    about_each = re.compile(r"process_.*|python_.*|moonpool:(event_loop|trace_spans|http|api_keys).*")
    shared = {key: names for key, names in exporters.items() if len(names) > 1 and not about_each.match(key[0])}
    frontends, conductors = {"f0", "f1"}, {"c0", "c1"}
    for key, names in shared.items():
        # Several of one role: each counts its own requests; conductors each judge all nodes.
        assert set(names) <= frontends or set(names) <= conductors, (key, names)
    assert not [key for key, names in shared.items() if set(names) <= frontends and "node" in dict(key[1])]


async def test_a_killed_frontend_takes_no_node_series_along(
    cluster: ScrapedCluster, session: aiohttp.ClientSession
) -> None:
    before = await cluster.scrape(session)
    cluster.roles["f0"].kill()
    left = [name for name in cluster.roles if name != "f0"]
    after = await cluster.scrape(session, *left)
    nodes = {key for key in before if "node" in dict(key[1])}
    assert len(nodes) > 20
    assert nodes <= after.keys()
    assert sums(after, "moonpool:node_up") == 2 * 3  # by each conductor
    cluster.roles["f0"].start()
    cluster.roles["f0"].wait_ready()


async def test_a_conductor_reports_a_killed_node_as_down(
    cluster: ScrapedCluster, session: aiohttp.ClientSession
) -> None:
    cluster.roles["d0"].signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(40):
            while sums(await cluster.scrape(session, "c0"), "moonpool:node_up", node="d0") != 0:
                await asyncio.sleep(0.2)
    finally:
        cluster.roles["d0"].signal(signal.SIGCONT)
    async with asyncio.timeout(40):
        while sums(await cluster.scrape(session, "c0"), "moonpool:node_up", node="d0") != 1:
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("name", ["c0", "f1"])
async def test_one_process_gives_the_whole_cluster_at_a_path_of_its_own(
    cluster: ScrapedCluster, session: aiohttp.ClientSession, name: str
) -> None:
    each = await cluster.scrape(session, "p0", "d0", "pool")
    nodes = {key for key in each if "node" in dict(key[1])}
    assert len(nodes) > 20
    async with asyncio.timeout(30):  # nodes report once a second, and a series appears with its first event
        while True:
            whole = await cluster.scrape(session, name, path="/metrics/cluster")
            if nodes <= whole.keys() and sums(whole, "moonpool:node_up") == 3:
                break
            await asyncio.sleep(0.2)


async def test_a_node_has_no_metrics_of_others(cluster: ScrapedCluster, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{cluster.url('p0')}/metrics/cluster") as response:
        assert response.status == 404
        assert "only conductors" in await response.text()
    found = await cluster.scrape(session, "p0")
    assert {dict(labels)["node"] for _, labels in found if "node" in dict(labels)} == {"p0"}
