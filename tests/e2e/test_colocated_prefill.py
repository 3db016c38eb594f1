"""A request is prefilled where it decodes, among others that are handed over: right tokens, nothing held, told why."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


def run(*words: str) -> str:
    command = [sys.executable, "-m", "moonpool", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "decisions"


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any], log: Path) -> Any:
    nodes = "--prefill-nodes", "1", "--decode-nodes", "1", "--block-tokens", "8"
    with start_cluster(
        random_model, *nodes, "--colocated-prefill", "act", "--tbt-slo", "20", "--decision-log", str(log)
    ) as running:
        yield running


async def test_under_a_burst_some_prompts_are_computed_on_the_decode_node(
    cluster: Any, random_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession, log: Path
) -> None:
    asked = [prompt(seed, 150 + 10 * seed) for seed in range(20)]

    async def ask(ids: list[int]) -> Any:
        return await cluster.complete(session, ids, max_tokens=40, temperature=0.0, ignore_eos=True)

    answers = await asyncio.gather(*map(ask, asked))
    assert {answer.moonpool["prefill_node"] for answer in answers} == {"prefill-0", "decode-0"}
    assert {answer.moonpool["decode_node"] for answer in answers} == {"decode-0"}
    here = [answer for answer in answers if answer.moonpool["prefill_node"] == "decode-0"]
    await cluster.validate()  # its KV is stored when the answer is over
    # The next turn of one of them finds it.
    again = await ask(here[0].prompt_ids + here[0].token_ids + prompt(99, 20))
    assert again.cached_tokens >= len(here[0].prompt_ids) // 8 * 8
    judge = judge_of(random_model)
    assert [judge.wrong_tokens(answer) for answer in (*answers, again)] == [[]] * 21
    await cluster.validate()
    told = await asyncio.to_thread(run, "explain", here[0].body["id"], "--log", str(log))
    assert "and decode there" in " ".join(told.split())
    assert "It was chosen." in " ".join(told.split())
    replayed = await asyncio.to_thread(run, "replay-decisions", str(log))
    assert "the same decisions" in replayed
