"""The negative controls: a flipped bit is caught and recomputed; KV swapped behind the verification makes it fail."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine import load_model
from tests.e2e.conftest import metric
from tests.e2e.damage import flip_bits, memory_of

pytestmark = pytest.mark.long


def prompt(length: int) -> list[int]:
    return np.random.default_rng(21).integers(5, 2000, length).tolist()


@pytest.mark.parametrize("of", ["random_model", "small_kv_model"])
async def test_flipped_bits_in_the_pool_are_caught_and_recomputed(
    of: str,
    request: pytest.FixtureRequest,
    start_cluster: Callable[..., Any],
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    model: Path = request.getfixturevalue(of)
    flags = ["--prefill-nodes", "2", "--decode-nodes", "2", "--block-tokens", "8"]
    with start_cluster(model, *flags) as cluster:
        judge = judge_of(model)
        first = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        await cluster.validate()
        for node in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            old = cluster.kill(node)  # forgets what it holds itself
            await cluster.wait_restarted(node, old)
        flip_bits(cluster.pid("pool-0"))
        again = await cluster.complete(session, prompt(100), max_tokens=4, temperature=0.0)
        assert again.token_ids == first.token_ids
        assert judge.wrong_tokens(again) == []
        assert again.cached_tokens == 0  # the damaged block, and what follows it, was computed
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


@pytest.mark.nightly
async def test_blocks_swapped_behind_the_verification_make_verify_fail(
    random_model: Path, start_cluster: Callable[..., Any], tmp_path: Path
) -> None:
    with start_cluster(random_model, "--block-tokens", "8", "--aggregated", "1") as cluster:
        code, report = await replay(cluster, tmp_path / "sound")
        assert (code, report["wrong_tokens"], report["verified_requests"]) == (0, 0, 12)
        slot = load_model(random_model, threads=1).new_cache((1,), 8).slot_nbytes(0)
        with memory_of(cluster.pid("aggregated-0"), "moonpool-kv") as (memory, slots):
            memory.seek(slots.start)
            data = np.frombuffer(memory.read(len(slots)), dtype=np.uint8)
            assert len(data) == len(slots)
            memory.seek(slots.start)
            memory.write(np.roll(data, slot).tobytes())  # each slot now holds its neighbour's block
        code, report = await replay(cluster, tmp_path / "swapped")
        assert report["prefix_hit_rate"] > 0
        assert report["wrong_tokens"] > 0
        assert code == 1
