"""A cluster with paced engines: no weights, no torch, and every token as it must be, whatever happens on the way."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine.config import read_config
from worker.paced.tokens import Draw, PacedTokens

DRAWN: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True, "temperature": 0.8, "seed": 42}


@pytest.fixture(scope="module")
def folder(
    two_group_model: Path, weightless: Callable[[Path, Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A model with two KV groups."""
    return weightless(two_group_model, tmp_path_factory.mktemp("weightless"))


@pytest.fixture(scope="module")
def cluster(folder: Path, start_paced: Callable[..., Any]) -> Any:
    flags = ["--block-tokens", "8", "--prefill-nodes", "2", "--decode-nodes", "2", "--pool-nodes", "2"]
    with start_paced(*flags, model=folder) as running:
        yield running


def expected(folder: Path, prompt: list[int], count: int, *, temperature: float = 0.8, seed: int = 42) -> list[int]:
    tokens = PacedTokens.of(folder, read_config(folder), 0)
    return tokens.answer(np.array(prompt, np.int32), Draw(seed, temperature, 0), count)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()  # type: ignore[no-any-return]


async def samples(session: aiohttp.ClientSession, url: str, name: str) -> list[float]:
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return [float(value) for value in re.findall(rf"^moonpool:{name}\{{.*\}} (.+)$", text, re.MULTILINE)]


async def test_it_says_everywhere_that_nothing_is_computed(cluster: Any, session: aiohttp.ClientSession) -> None:
    async with session.get(f"{cluster.url}/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert card["moonpool"]["stand_ins"] == ["paced:slow"]
    async with asyncio.timeout(60):
        while sum(await samples(session, cluster.url, "stand_in_engine")) != 4:
            await asyncio.sleep(0.2)
    command = [sys.executable, "-m", "moonpool", "status", "--ready-file", str(cluster.ready_file)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("(paced:slow)") >= 4
    assert "nothing is computed (paced:slow)" in done.stdout
    assert "paced engines, which compute nothing" in cluster.log.read_text()


async def test_answers_are_the_known_ones_through_reuse_and_hand_over(
    cluster: Any, folder: Path, session: aiohttp.ClientSession
) -> None:
    first = prompt(1, 200)
    one = await cluster.complete(session, first, **(DRAWN | {"max_tokens": 60}))
    assert one.token_ids == expected(folder, first, 60)
    async with asyncio.timeout(60):  # the answer's blocks are stored after its end, with the prompt's, on one host
        while max(await samples(session, cluster.url, "directory_blocks")) < 259 // 8:
            await asyncio.sleep(0.2)
    turn = [*first, *one.token_ids, *prompt(2, 30)]
    again = await cluster.complete(session, turn, **(DRAWN | {"max_tokens": 40}))
    assert again.token_ids == expected(folder, turn, 40)
    assert again.cached_tokens >= 250
    greedy = await cluster.complete(session, first, max_tokens=20, temperature=0.0, ignore_eos=True)
    assert greedy.token_ids == expected(folder, first, 20, temperature=0.0)
    assert greedy.cached_tokens > 0


async def test_answers_end_by_themselves_or_with_their_grammar_and_probabilities_are_refused(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    chat = {"model": cluster.ready["model"], "messages": [{"role": "user", "content": "Well?"}], "max_tokens": 1500}
    url = f"{cluster.url}/v1/chat/completions"
    async with session.post(url, json=chat) as response:
        choice = (await response.json())["choices"][0]
    assert choice["finish_reason"] == "length"  # this model has no token that ends an answer
    pattern = {"structured_outputs": {"regex": "(yes|no){3}"}}
    async with session.post(url, json=chat | pattern) as response:
        choice = (await response.json())["choices"][0]
    assert re.fullmatch("(yes|no){3}", choice["message"]["content"])
    async with session.post(url, json=chat | {"logprobs": True}) as response:
        refusal = await response.json()
    assert response.status == 400, refusal
    assert "not supported by the paced engine" in refusal["error"]["message"]


@pytest.mark.parametrize("victim", ["decode-0", pytest.param("prefill-1", marks=pytest.mark.nightly)])
async def test_a_request_that_moves_ends_with_the_tokens_that_it_would_have_had(
    victim: str, cluster: Any, folder: Path, session: aiohttp.ClientSession
) -> None:
    old = cluster.pid(victim)
    killed = asyncio.Event()
    prompts = [prompt(10 + n, 100 + 20 * n) for n in range(6)]

    async def ask(ids: list[int]) -> list[int]:
        body = {"model": cluster.ready["model"], "prompt": ids, "stream": True, "return_token_ids": True, **DRAWN}
        got: list[int] = []
        async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    got += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
                    if len(got) >= 20 and not killed.is_set():
                        killed.set()
                        cluster.kill(victim)
        return got

    for ids, got in zip(prompts, await asyncio.gather(*map(ask, prompts)), strict=True):
        assert got == expected(folder, ids, DRAWN["max_tokens"])
    assert killed.is_set()
    await cluster.wait_restarted(victim, old)
    await cluster.validate()


@pytest.mark.long
async def test_a_replayed_trace_is_served_with_no_wrong_token_and_its_report_says_by_what(
    cluster: Any, folder: Path, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "moonpool", "replay", "conversation", "--url", cluster.url, "--limit", "40"]
    command += ["--speed", "4", "--model-path", str(folder), "--no-unloaded", "--max-send-lag", "30", "--verify"]
    done = await asyncio.to_thread(
        subprocess.run, [*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["completed"], report["wrong_tokens"]) == (40, 0)
    assert report["verification"]["verified_tokens"] > 200
    assert report["settings"]["stand_ins"] == ["paced:slow"]
    assert any("it computes nothing" in notice for notice in report["notices"])
    assert "it computes nothing" in (tmp_path / "report.html").read_text()
    assert sum(await samples(session, cluster.url, "paced_checked_tokens_total")) > 0
    assert sum(await samples(session, cluster.url, "paced_wrong_blocks_total")) == 0
