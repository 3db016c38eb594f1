"""The parts of TTFT over a live cluster whose engines take a known time: they sum, and each is what it says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import aiohttp
import numpy as np
import pytest

from worker.paced.profiles import profile_of
from worker.policy.cost_profile import save_profile

ASKED = {"x-moonpool-timing": "1"}
PREFILL_S = 0.002  # for a token
STEP_S = 0.08
TOLERANCE = 0.02  # of the whole


@pytest.fixture(scope="module")
def cluster(
    random_model: Path,
    weightless: Callable[[Path, Path], Path],
    tmp_path_factory: pytest.TempPathFactory,
    start_cluster: Callable[..., Any],
) -> Any:
    folder = weightless(random_model, tmp_path_factory.mktemp("weightless"))
    instant = profile_of("instant")
    timed = replace(
        instant,
        name="timed",
        prefill=replace(instant.prefill, per_token_s=PREFILL_S),
        decode=replace(instant.decode, fixed_s=STEP_S),
    )
    save_profile(timed, folder / "timed.json")
    flags = ["--engine", "paced", "--paced-profile", str(folder / "timed.json"), "--block-tokens", "8"]
    with start_cluster(folder, *flags, "--prefill-nodes", "2", "--verbose") as running:
        yield running


async def ask(cluster: Any, session: aiohttp.ClientSession, seed: int, length: int) -> tuple[dict[str, Any], float]:
    """Return (the answer's timing, seconds until its first event arrived)"""
    prompt = np.random.default_rng(seed).integers(5, 2000, length).tolist()
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    began = monotonic()
    async with session.post(f"{cluster.url}/v1/completions", json=body, headers=ASKED) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readline()
        seconds = monotonic() - began
        text = (first + await response.read()).decode()
    found = re.findall(r"^data: (\{.*\})$", text, re.MULTILINE)[-1]
    told: dict[str, Any] = json.loads(found)["moonpool"]
    return told, seconds


def check(told: dict[str, Any], seconds: float) -> dict[str, float]:
    """The parts: none is negative, all sum to TTFT, which is no more than the client saw."""
    ttft: dict[str, float] = told["timing"]["ttft"]
    parts = {name: value for name, value in ttft.items() if name != "whole_s"}
    assert sum(parts.values()) == pytest.approx(told["ttft_s"], rel=TOLERANCE)
    assert min(parts.values()) > -0.001
    assert sum(value for name, value in parts.items() if name != "delivery_s") <= seconds
    return ttft


async def test_parts_sum_to_ttft_and_are_what_took_the_time(cluster: Any, session: aiohttp.ClientSession) -> None:
    told, seconds = await ask(cluster, session, 1, 300)
    ttft, handoff = check(told, seconds), told["timing"]["handoff"]
    assert ttft["prefill_s"] >= 0.99 * 300 * PREFILL_S  # on its own clock, from step to token
    assert ttft["lost_s"] == 0.0
    assert handoff["step_s"] >= 0.99 * STEP_S
    assert min(handoff["tail_s"], handoff["join_s"]) > 0
    told_s = sum(value for name, value in handoff.items() if name != "whole_s")
    assert told_s == pytest.approx(handoff["whole_s"], rel=TOLERANCE)


async def test_who_waits_for_another_prompt_is_told_so(cluster: Any, session: aiohttp.ClientSession) -> None:
    told = await asyncio.gather(*(ask(cluster, session, seed, 700) for seed in (2, 3, 4)))  # on two nodes
    ttfts = [check(*each) for each in told]
    assert max(ttft["queue_s"] for ttft in ttfts) >= 0.5 * 700 * PREFILL_S
    assert min(ttft["prefill_s"] for ttft in ttfts) >= 0.99 * 700 * PREFILL_S


async def test_the_time_of_a_node_that_died_is_lost(cluster: Any, session: aiohttp.ClientSession) -> None:
    asking = [asyncio.create_task(ask(cluster, session, seed, 1900)) for seed in (5, 6)]
    async with asyncio.timeout(60):
        while await prefilling(cluster, session) < 2:
            await asyncio.sleep(0.05)
    old = cluster.kill("prefill-0")
    told = [await each for each in asking]
    moved = [(each, seconds) for each, seconds in told if each["attempts"] == 2]
    assert moved
    for each, seconds in told:
        ttft = check(each, seconds)
        assert (ttft["lost_s"] > 0) == (each["attempts"] == 2)
    await cluster.wait_restarted("prefill-0", old)


async def prefilling(cluster: Any, session: aiohttp.ClientSession) -> float:
    async with session.get(f"{cluster.url}/metrics") as response:
        text = await response.text()
    return sum(
        float(value)
        for value in re.findall(r'^vllm:num_requests_running\{.*role="prefill".*\} (.+)$', text, re.MULTILINE)
    )


async def test_histograms_sum_to_ttft(cluster: Any, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{cluster.url}/metrics") as response:
        text = await response.text()

    def total(name: str) -> float:
        return sum(float(value) for value in re.findall(rf"^{name}_sum\{{.*\}} (.+)$", text, re.MULTILINE))

    assert total("moonpool:ttft_part_seconds") == pytest.approx(total("vllm:time_to_first_token_seconds"), rel=0.02)
    assert total("moonpool:handoff_part_seconds") >= total("moonpool:handoff_seconds") * 0.98
