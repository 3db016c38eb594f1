"""A prefill worker whose vLLM has two tensor-parallel ranks, and a decode worker with one, on another host.

Each rank moves its own heads: a head that is missing, or in another's place, changes the tokens. KV goes from host to
host by TCP, through a proxy that damages bytes.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from moonpool.cluster_view.collector import validate_cluster
from moonpool.cluster_view.locate import Located
from settings.worker import BUNDLED_MODEL
from tests.e2e.bare_roles import Role
from tests.e2e.conftest import REST_S, START_S, Cluster, metric
from tests.vllm_worker.test_cluster import SAMPLED, prompts
from tests.vllm_worker.test_handover import GREEDY, complete_all, nodes_metric
from tools.soak.proxy import UP, FaultProxy

pytestmark = pytest.mark.nightly  # three engines start

CAPACITY = 4096
HERE, PROXY = "127.0.0.1", "127.0.0.2"


def free_port() -> int:
    """A port that is free on both addresses."""
    with socket.socket() as one, socket.socket() as other:
        one.bind((HERE, 0))
        port: int = one.getsockname()[1]
        other.bind((PROXY, port))
    return port


class SplitCluster:
    """Roles started one by one: all on one host but the decode worker, to which peers connect through `proxy`."""

    complete = Cluster.complete

    def __init__(self, folder: Path, proxy: FaultProxy, data_port: int) -> None:
        self.proxy = proxy
        sockets = {name: f"unix:{folder}/{name}.sock" for name in ("conductor", "pool", "prefill", "decode")}
        join = ["--conductor", sockets["conductor"]]
        model = ["--model", str(BUNDLED_MODEL), "--block-tokens", "32"]
        vllm = [*model, "--engine", "vllm", "--capacity-tokens", str(CAPACITY), "--pool", sockets["pool"]]
        ranks = ["--vllm-args", "--tensor-parallel-size 2 --enforce-eager"]
        far = ["--host-id", "far", "--data-port", str(data_port), "--data-advertise", PROXY]
        arguments = {
            "conductor": ["conductor"],
            "pool": ["pool-node", *join, "--pool-bytes", "256MiB"],
            "prefill": ["prefill-node", *join, *vllm, *ranks],
            "decode": ["decode-node", *join, *vllm, "--vllm-args", "--enforce-eager", *far],
            "frontend": ["frontend", *join, *model, "--metrics-scope", "cluster"],
        }
        self.roles: dict[str, Role] = {}
        for name, words in arguments.items():
            listen = ["--listen", sockets[name]] if name in sockets else ["--port", "0"]
            own = [*words, *listen, "--node-id", name, "--socket-dir", str(folder / "s")]
            self.roles[name] = Role(name, own, folder / f"{name}.log")
        self._conductor = sockets["conductor"]
        self.ready = {"model": "moonpool"}

    def start(self) -> None:
        """Start all roles, and wait until requests can be placed."""
        for role in self.roles.values():
            role.start()
        for role in self.roles.values():
            role.wait_ready()
        self.url = self.roles["frontend"].target

    async def until_ready(self, session: aiohttp.ClientSession) -> None:
        """Wait until requests can be placed."""
        async with asyncio.timeout(START_S):
            while True:
                async with session.get(f"{self.url}/ready") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.1)

    async def validate(self) -> None:
        """Require that at rest nothing is held anywhere."""
        deadline_s = time.monotonic() + REST_S
        located = Located(self._conductor, (self.url,), None)
        while held := [answer for answer in await validate_cluster(located) if not answer.ok]:
            assert time.monotonic() < deadline_s, held
            await asyncio.sleep(0.1)

    def close(self) -> None:
        for role in self.roles.values():
            role.kill()


@pytest.fixture(scope="module")
def split() -> Iterator[SplitCluster]:
    folder = Path(tempfile.mkdtemp(prefix="mp-"))
    port = free_port()
    with FaultProxy((HERE, port), PROXY, port) as proxy:
        cluster = SplitCluster(folder, proxy, port)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder)


@pytest.fixture
async def hosts(split: SplitCluster, session: aiohttp.ClientSession) -> SplitCluster:
    await split.until_ready(session)
    return split


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "seeded"])
async def test_two_ranks_hand_their_heads_over_to_one(
    mode: dict[str, Any], hosts: SplitCluster, judge: Any, session: aiohttp.ClientSession
) -> None:
    answers = await complete_all(hosts, session, prompts(20, seed=51), max_tokens=8, ignore_eos=True, **mode)
    for answer in answers:
        assert (answer.moonpool["prefill_node"], answer.moonpool["decode_node"]) == ("prefill", "decode")
        assert judge.wrong_tokens(answer, **mode) == []
    await hosts.validate()
    assert await metric(session, hosts.url, "moonpool:recomputed_blocks_total") == 0
    assert await metric(session, hosts.url, "moonpool:digest_mismatches_total") == 0


async def test_two_ranks_load_the_heads_of_dialogues_from_the_pool(
    hosts: SplitCluster, judge: Any, session: aiohttp.ClientSession
) -> None:
    first = await complete_all(hosts, session, prompts(12, seed=52)[8:], max_tokens=40, ignore_eos=True, **GREEDY)
    await hosts.validate()
    rng = np.random.default_rng(53)
    others = [rng.integers(5, 2048, 1800).tolist() for _ in range(2 * CAPACITY // 1800)]
    await complete_all(
        hosts, session, others, max_tokens=2
    )  # neither slots nor vLLM's blocks have the dialogues any more
    turns = [[*answer.prompt_ids, *answer.token_ids, 7, 8, 9] for answer in first]
    for answer, again in zip(first, await complete_all(hosts, session, turns, max_tokens=8, **GREEDY), strict=True):
        assert again.moonpool["cached_dram_tokens"] >= (len(answer.prompt_ids) + 39) // 32 * 32
        assert judge.wrong_tokens(again) == []
    await hosts.validate()


async def test_bytes_that_are_damaged_on_their_way_are_found_pushed_again_and_counted(
    hosts: SplitCluster, judge: Any, session: aiohttp.ClientSession
) -> None:
    names = ("moonpool:digest_mismatches_total", "moonpool:repushed_blocks_total")
    before = [await metric(session, hosts.url, name) for name in names]
    rng = np.random.default_rng(54)
    for kib in (224, 928, 2208):  # of about six MiB: inside blocks, not in the few bytes of the frames around them
        passed = hosts.proxy.passed[UP]
        hosts.proxy.flip_after(kib << 10, UP)
        answer = await hosts.complete(
            session, rng.integers(5, 2048, 1500).tolist(), max_tokens=8, ignore_eos=True, **GREEDY
        )
        assert hosts.proxy.passed[UP] - passed > 3 << 20
        assert judge.wrong_tokens(answer) == []
        assert (answer.moonpool["attempts"], answer.moonpool["decode_node"]) == (1, "decode")
    assert hosts.proxy.flipped == 3
    for name, count in zip(names, before, strict=True):
        assert await nodes_metric(session, hosts, name, count + 3) == count + 3
    await hosts.validate()
