"""Two stock vLLM servers with `MoonpoolConnector`, started as docs/vllm.md says, and one pool node."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest

from moonpool.cluster_view.collector import validate_cluster
from moonpool.cluster_view.locate import Located
from moonpool.errors import ClusterNotFound
from settings.worker import BUNDLED_MODEL
from tests.e2e.bare_roles import START_S, Role
from tests.vllm_worker.test_cluster import prompts

pytestmark = pytest.mark.nightly  # two more servers, each of which takes about a minute of CPU to start

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
ARGUMENTS = ["--dtype", "float32", "--block-size", "32", "--enforce-eager", "--enable-prompt-tokens-details"]


class Server:
    """A process of vLLM's own API server."""

    def __init__(self, pool: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        transfer = {
            "kv_connector": "MoonpoolConnector",
            "kv_connector_module_path": "vllm_worker.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"pool": pool, "capacity_tokens": 16384},
        }
        served = ["--model", str(BUNDLED_MODEL), "--served-model-name", "m", "--num-gpu-blocks-override", "257"]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *served, *ARGUMENTS]
        command += ["--port", str(self.port), "--kv-transfer-config", json.dumps(transfer)]
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=file, stderr=file)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def until_ready(self, session: aiohttp.ClientSession) -> None:
        async with asyncio.timeout(START_S):
            while True:
                assert self.process.poll() is None, self.log.read_text()[-4000:]
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(0.2)

    async def ask(self, session: aiohttp.ClientSession, prompt: list[int], **options: Any) -> tuple[list[int], int]:
        """The answer's ids, and the number of prompt tokens that were reused."""
        body = {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        async with session.post(f"{self.url}/v1/completions", json={**body, "max_tokens": 8, **options}) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    @property
    def agent(self) -> psutil.Process:
        found = [
            child
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if "kv-agent" in child.cmdline()
        ]
        assert len(found) == 1, found
        return found[0]

    def end(self) -> list[psutil.Process]:
        """Processes that are still there after it has ended."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        alive: list[psutil.Process] = psutil.wait_procs(children, timeout=30)[1]
        return alive


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Targets of a conductor and a pool node."""
    folder = Path(os.path.realpath(tmp_path_factory.mktemp("p")))
    common = ["--socket-dir", str(folder / "s")]
    conductor = Role("conductor", ["conductor", "--listen", f"unix:{folder}/c.sock", *common], folder / "c.log")
    listen = ["--conductor", f"unix:{folder}/c.sock", "--listen", f"unix:{folder}/p.sock", "--pool-bytes", "256MiB"]
    node = Role("pool", ["pool-node", *listen, *common], folder / "p.log")
    try:
        for role in (conductor, node):
            role.start()
            role.wait_ready()
        yield conductor.target, node.target
    finally:
        for role in (node, conductor):
            role.kill()


@pytest.fixture(scope="module")
def servers(pool: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("v")
    started = [Server(pool[1], folder / f"{name}.log") for name in ("one", "other")]
    try:
        yield started
    finally:
        left = [process for server in started for process in server.end()]
        assert left == []


@pytest.fixture
async def both(servers: list[Server], session: aiohttp.ClientSession) -> list[Server]:
    for server in servers:
        await server.until_ready(session)
    return servers


async def at_rest(pool: tuple[str, str]) -> None:
    """Nothing is leased or written at the pool."""
    deadline_s = time.monotonic() + 60
    held: list[Any] = ["unknown"]
    while held:
        assert time.monotonic() < deadline_s, held
        with contextlib.suppress(ClusterNotFound):  # on cores that others use too
            held = [found for found in await validate_cluster(Located(pool[0], (), None)) if not found.ok]
        await asyncio.sleep(0.1)


async def test_the_next_turn_begins_where_another_server_ended(
    both: list[Server], pool: tuple[str, str], judge: Any, session: aiohttp.ClientSession
) -> None:
    one, other = both
    asked = prompts(40, seed=31, longest=900)
    turns = asyncio.Semaphore(8)

    async def ask(server: Server, prompt: list[int], **options: Any) -> tuple[list[int], int]:
        async with turns:
            return await server.ask(session, prompt, **options)

    answers = await asyncio.gather(*(ask(one, prompt, max_tokens=70) for prompt in asked))
    await at_rest(pool)
    following = [[*prompt, *ids, 7, 8] for prompt, (ids, _) in zip(asked, answers, strict=True)]
    found = await asyncio.gather(*(ask(other, prompt) for prompt in following))
    complete = 0
    for prompt, turn, (_, cached) in zip(asked, following, found, strict=True):
        complete += cached == len(turn) - 3  # all that one server computed, partial blocks included
        assert cached >= len(prompt) // 32 * 32
    # On busy cores an answer may end before the agent has sent the slots for its last block, which is then not stored.
    assert complete >= 35, complete
    alone = [await one.ask(session, turn) for turn in following]
    assert [ids for ids, _ in found] == [ids for ids, _ in alone]
    await at_rest(pool)


async def test_prefixes_are_reused_within_a_salt_only(both: list[Server], session: aiohttp.ClientSession) -> None:
    one, other = both
    prompt = np.random.default_rng(32).integers(5, 2048, 300).tolist()
    first, _ = await one.ask(session, prompt, cache_salt="a")
    async with asyncio.timeout(20):
        cached = 0
        while cached < 288:  # until it is stored
            prompt[-1] = prompt[-1] % 2000 + 6
            _, cached = await other.ask(session, prompt, cache_salt="a")
    for salt in ("b", None):
        assert (await other.ask(session, prompt, **({"cache_salt": salt} if salt else {})))[1] == 0
    assert first


async def test_aborted_requests_leave_nothing_behind(
    both: list[Server], pool: tuple[str, str], session: aiohttp.ClientSession
) -> None:
    async def ask(prompt: list[int], seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await both[1].ask(session, prompt, max_tokens=600)

    known = prompts(10, seed=31, longest=900)
    for start in range(0, 100, 20):
        await asyncio.gather(*(ask([*known[i % 10], 5 + i], 0.01 * (i % 20)) for i in range(start, start + 20)))
    await at_rest(pool)
    # All of vLLM's blocks and all of the agent's slots can be had again.
    rng = np.random.default_rng(33)
    full = [rng.integers(5, 2048, 1800).tolist() for _ in range(4)]
    await asyncio.gather(*(both[1].ask(session, prompt, max_tokens=30) for prompt in full))
    await at_rest(pool)
    _, cached = await both[0].ask(session, [*full[0], 9])
    assert cached == 1792  # the block after that has tokens of the answer


async def test_without_its_agent_a_server_goes_on(
    both: list[Server], pool: tuple[str, str], session: aiohttp.ClientSession
) -> None:
    one, other = both
    prompt = np.random.default_rng(34).integers(5, 2048, 500).tolist()
    expected, _ = await one.ask(session, prompt, max_tokens=100)
    running = asyncio.ensure_future(other.ask(session, prompt, max_tokens=100))
    agent = other.agent
    agent.kill()
    assert (await running)[0] == expected
    assert (await other.ask(session, [*prompt, 5]))[0] == (await one.ask(session, [*prompt, 5]))[0]
    assert "Moonpool's KV agent has ended" in other.log.read_text()
