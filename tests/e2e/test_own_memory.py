"""Prefixes that only one worker's own memory holds: requests go there, until the worker has lost them."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

BLOCK, LENGTH = 8, 200
OPTIONS: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


def run(*words: str) -> str:
    command = [sys.executable, "-m", "moonpool", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def gauge(cluster: Any, session: aiohttp.ClientSession, name: str) -> dict[str, float]:
    """Values of a metric by node, over its other labels."""
    async with session.get(f"{cluster.url}/metrics") as response:
        text = await response.text()
    found: dict[str, float] = {}
    for labels, value in re.findall(rf"^moonpool:{name}{{(.*?)}} (\S+)$", text, re.MULTILINE):
        node = re.search(r'node="([^"]+)"', labels)
        assert node is not None
        found[node[1]] = found.get(node[1], 0) + float(value)
    return found


async def until(
    cluster: Any, session: aiohttp.ClientSession, name: str, is_so: Callable[[dict[str, float]], bool]
) -> None:
    async with asyncio.timeout(60):
        while not is_so(await gauge(cluster, session, name)):
            await asyncio.sleep(0.1)


async def flush(cluster: Any, session: aiohttp.ClientSession) -> None:
    await asyncio.to_thread(run, "pool", "flush", "--yes", "--ready-file", str(cluster.ready_file))
    await until(cluster, session, "directory_blocks", lambda blocks: blocks == {"pool-0": 0})


async def test_requests_go_to_the_worker_whose_memory_holds_their_prefix(
    random_model: Path,
    start_cluster: Callable[..., Any],
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    log, rng = tmp_path / "decisions", np.random.default_rng(1)
    prompts = [rng.integers(5, 2000, LENGTH).tolist() for _ in range(6)]
    flags = "--aggregated", "2", "--block-tokens", str(BLOCK), "--decision-log", str(log)
    with start_cluster(random_model, *flags) as cluster:

        async def ask(ids: list[int]) -> Any:
            return await cluster.complete(session, ids, **OPTIONS)

        answers = await asyncio.gather(*map(ask, prompts))
        places = [answer.moonpool["decode_node"] for answer in answers]
        assert set(places) == {"aggregated-0", "aggregated-1"}
        await cluster.validate()
        held = {node: places.count(node) * (LENGTH // BLOCK) for node in places}
        await until(cluster, session, "worker_directory_blocks", lambda blocks: blocks == held)
        await flush(cluster, session)
        again = [
            await ask([*prompt, *answer.token_ids[:2], 7]) for prompt, answer in zip(prompts, answers, strict=True)
        ]
        assert [answer.moonpool["decode_node"] for answer in again] == places
        assert {answer.cached_tokens for answer in again} == {LENGTH}
        judge = judge_of(random_model)
        assert [judge.wrong_tokens(answer) for answer in (*answers, *again)] == [[]] * 12
        told = await asyncio.to_thread(run, "explain", again[0].body["id"], "--log", str(log))
        assert f"{LENGTH // BLOCK} in {places[0]}'s own memory" in " ".join(told.split())

        victim, pid = places[0], cluster.kill(places[0])
        await cluster.wait_restarted(victim, pid)
        await until(cluster, session, "worker_directory_blocks", lambda blocks: blocks.get(victim) == 0)
        await until(cluster, session, "worker_directory_exact", lambda exact: exact == dict.fromkeys(places, 1))
        await cluster.validate()
        await flush(cluster, session)
        lost, kept = places.index(victim), next(i for i, place in enumerate(places) if place != victim)
        assert (await ask(prompts[lost])).cached_tokens == 0
        found = await ask([*prompts[kept], 9])
        assert (found.moonpool["decode_node"], found.cached_tokens) == (places[kept], LENGTH)
        await cluster.validate()
    replayed = await asyncio.to_thread(run, "replay-decisions", str(log))
    assert "the same decisions" in replayed
