"""The negative controls: a flipped bit is caught and recomputed; KV swapped behind the verification makes it fail."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from engine import load_model


def map_memory(pid: int, name: str) -> mmap.mmap:
    """The memfd called `name` of a running process, mapped for writing."""
    folder = Path(f"/proc/{pid}/fd")
    for entry in folder.iterdir():
        if f"memfd:{name}" in os.readlink(entry):
            fd = os.open(entry, os.O_RDWR)
            try:
                return mmap.mmap(fd, 0)
            finally:
                os.close(fd)
    raise AssertionError(f"process {pid} has no memory called {name}")


def prompt(length: int) -> list[int]:
    return np.random.default_rng(21).integers(5, 2000, length).tolist()


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a metric over all its labels."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def test_a_flipped_bit_in_the_pool_is_caught_and_recomputed(
    random_model: Path,
    start_cluster: Callable[..., Any],
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    with start_cluster(random_model, "--block-tokens", "8") as cluster:
        judge = judge_of(random_model)
        first = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        await cluster.validate()
        for node in ("prefill-0", "decode-0"):
            old = cluster.kill(node)  # forgets what it holds itself
            await cluster.wait_restarted(node, old)
        with map_memory(cluster.pid("pool-0"), "moonpool-arena") as arena:
            data = np.frombuffer(arena, dtype=np.uint8)
            data[np.flatnonzero(data)[0]] ^= 1
            del data
        again = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        assert again.token_ids == first.token_ids
        assert judge.wrong_tokens(again) == []
        assert again.cached_tokens < 96  # the damaged block, and what follows it, was computed
        async with asyncio.timeout(20):  # nodes report about once a second
            while not await metric(session, cluster.url, "moonpool:digest_mismatches_total"):
                await asyncio.sleep(0.1)
        third = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        assert third.token_ids == first.token_ids
        assert third.cached_tokens >= 88


async def replay(cluster: Any, out: Path) -> tuple[int, dict[str, Any]]:
    """`moonpool replay --verify` of a few requests: its exit code and report."""
    command = [sys.executable, "-m", "moonpool", "replay", "conversation", "--url", cluster.url, "--out", str(out)]
    command += ["--model-path", str(cluster.model), "--sample-families", "0.1", "--limit", "12", "--speed", "20"]
    command += ["--tokens-per-block", "8", "--verify", "--reuse-earlier", "--no-unloaded", "--max-send-lag", "60"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=False, timeout=200)
    return done.returncode, json.loads((out / "report.json").read_text())


async def test_blocks_swapped_behind_the_verification_make_verify_fail(
    random_model: Path, start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    with start_cluster(random_model, "--block-tokens", "8", "--aggregated", "1") as cluster:
        code, report = await replay(cluster, tmp_path / "sound")
        assert (code, report["wrong_tokens"], report["verified_requests"]) == (0, 0, 12)
        slot = load_model(random_model, threads=1).new_cache((1,), 8).slot_nbytes(0)
        with map_memory(cluster.pid("aggregated-0"), "moonpool-kv") as memory:
            data = np.frombuffer(memory, dtype=np.uint8)
            data[:] = np.roll(data, slot)  # each slot now holds its neighbour's block
            del data
        code, report = await replay(cluster, tmp_path / "swapped")
        assert report["prefix_hit_rate"] > 0
        assert report["wrong_tokens"] > 0
        assert code == 1
