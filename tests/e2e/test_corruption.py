"""The negative controls: a flipped bit is caught and recomputed; KV swapped behind the verification makes it fail."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np


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


async def test_a_flipped_bit_in_the_pool_is_caught_and_recomputed(
    random_model: Path,
    start_cluster: Callable[..., Any],
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    # The second prefill node has none of the blocks in its own slots: what it reuses comes from the pool.
    with start_cluster(random_model, "--block-tokens", "8", "--prefill-nodes", "1") as cluster:
        judge = judge_of(random_model)
        first = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        await cluster.validate()
        for node in ("prefill-0", "decode-0"):
            old = cluster.kill(node)  # forgets what it holds itself
            await cluster.wait_restarted(node, old)
        with map_memory(cluster.pid("pool-0"), "moonpool-arena") as arena:
            data = np.frombuffer(arena, dtype=np.uint8)
            used = np.flatnonzero(data)
            data[used] ^= 1
            del data
        again = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        assert again.token_ids == first.token_ids
        assert judge.wrong_tokens(again) == []
        assert again.cached_tokens == 0
        async with session.get(f"{cluster.url}/metrics") as response:
            text = await response.text()
        caught = [line for line in text.splitlines() if line.startswith("moonpool:digest_mismatches")]
        assert sum(float(line.rsplit(" ", 1)[1]) for line in caught) > 0
        third = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        assert third.token_ids == first.token_ids
        assert third.cached_tokens >= 88


async def test_kv_swapped_behind_the_verification_shows_as_wrong_tokens(
    random_model: Path,
    start_cluster: Callable[..., Any],
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    with start_cluster(random_model, "--block-tokens", "8", "--aggregated", "1") as cluster:
        judge = judge_of(random_model)
        first = await cluster.complete(session, prompt(100), max_tokens=16, temperature=0.0, ignore_eos=True)
        assert judge.wrong_tokens(first) == []
        with map_memory(cluster.pid("aggregated-0"), "moonpool-kv") as memory:
            values = np.frombuffer(memory, dtype=np.float32)
            values[:] = np.roll(values, 1024)  # every slot now holds a neighbour's numbers
            del values
        again = await cluster.complete(session, prompt(100), max_tokens=16, temperature=0.0, ignore_eos=True)
        assert again.cached_tokens > 0
        assert judge.wrong_tokens(again) != []
