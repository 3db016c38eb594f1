"""One prefill and one decode worker with vLLM: the KV of every prompt moves, and the tokens are one vLLM's alone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import numpy as np
import pytest

from settings.worker import BUNDLED_MODEL
from tests.e2e.conftest import START_S, metric
from tests.e2e.damage import flip_a_bit_per
from tests.e2e.test_tracing import spans_of
from tests.vllm_worker.test_cluster import SAMPLED, prompts, stream

GREEDY: dict[str, Any] = {"temperature": 0.0}
CAPACITY = 8192


@pytest.fixture(scope="module")
def pair(start_cluster: Callable[..., Any], otlp_receiver: Any) -> Iterator[Any]:
    flags = ["--engine", "vllm", "--prefill-nodes", "1", "--decode-nodes", "1", "--block-tokens", "32"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.url)
        with start_cluster(BUNDLED_MODEL, *flags, "--capacity-tokens", str(CAPACITY)) as running:
            yield running


async def nodes_metric(session: aiohttp.ClientSession, cluster: Any, name: str, least: float) -> float:
    """The metric once it is at least `least`: nodes report about once a second."""
    async with asyncio.timeout(20):
        while (value := await metric(session, cluster.url, name)) < least:
            await asyncio.sleep(0.1)
    return value


async def complete_all(
    cluster: Any, session: aiohttp.ClientSession, asked: list[list[int]], **options: Any
) -> list[Any]:
    """Return the answers to all prompts, of which at most eight run at once."""
    turns = asyncio.Semaphore(8)

    async def ask(prompt: list[int]) -> Any:
        async with turns:
            return await cluster.complete(session, prompt, **options)

    return await asyncio.gather(*(ask(prompt) for prompt in asked))


@pytest.mark.parametrize(
    "mode", [pytest.param(GREEDY, id="greedy"), pytest.param(SAMPLED, id="seeded", marks=pytest.mark.nightly)]
)
async def test_tokens_are_those_of_one_vllm_alone_and_nothing_is_computed_twice(
    mode: dict[str, Any], cluster: Any, pair: Any, judge: Any, session: aiohttp.ClientSession
) -> None:
    asked = prompts(150, seed=21)
    asked += [prompt * 2 for prompt in asked[8:58]]  # reuse from the pool
    options = {"max_tokens": 8, "ignore_eos": True, **mode}
    alone, handed = [await complete_all(where, session, asked, **options) for where in (cluster, pair)]
    assert {(a.moonpool["prefill_node"], a.moonpool["decode_node"]) for a in handed} == {("prefill-0", "decode-0")}
    for one, other in zip(alone, handed, strict=True):
        assert judge.wrong_tokens(other, **mode) == []
        if other.token_ids != one.token_ids:  # only where two tokens are as good as equal
            assert judge.wrong_tokens(one, **mode) == []
    assert sum(one.token_ids == other.token_ids for one, other in zip(alone, handed, strict=True)) >= len(asked) - 2
    assert max(answer.cached_tokens for answer in handed) > 0
    await pair.validate()
    assert await metric(session, pair.url, "moonpool:recomputed_blocks_total") == 0


async def test_the_first_layer_is_pushed_before_the_last_one_is_computed(
    pair: Any, session: aiohttp.ClientSession, otlp_receiver: Any
) -> None:
    trace = "c0ffee" + 26 * "1"
    body = {"model": pair.ready["model"], "prompt": np.random.default_rng(22).integers(5, 2048, 500).tolist()}
    headers = {"traceparent": f"00-{trace}-{16 * '2'}-01"}
    async with session.post(f"{pair.url}/v1/completions", json={**body, "max_tokens": 2}, headers=headers) as response:
        assert response.status == 200, await response.text()
    found = await spans_of(otlp_receiver, trace, "compute", "messenger push", is_whole=False)
    spans = {span["name"]: span for span in found}
    assert spans["messenger push"]["start_ns"] < spans["compute"]["end_ns"]
    assert spans["messenger push"]["node"] == "prefill-0"


async def flush(cluster: Any, session: aiohttp.ClientSession, seed: int) -> None:
    """Fill the slots and vLLM's blocks of all workers with other prompts."""
    rng = np.random.default_rng(seed)
    for _ in range(2 * CAPACITY // 1800):
        await cluster.complete(session, rng.integers(5, 2048, 1800).tolist(), max_tokens=2, ignore_eos=True)


async def test_aborted_requests_leave_vllms_blocks_free(pair: Any, session: aiohttp.ClientSession) -> None:
    known = prompts(10, seed=23, longest=900)
    for prompt in known:
        await pair.complete(session, prompt, max_tokens=2)
    await flush(pair, session, seed=24)  # the prompts are to be loaded again

    async def ask(prompt: list[int], seconds: float) -> None:
        body = {"model": pair.ready["model"], "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
        try:
            async with asyncio.timeout(seconds):
                await session.post(f"{pair.url}/v1/completions", json=body)
        except TimeoutError:
            pass

    for start in range(0, 200, 20):
        await asyncio.gather(*(ask([*known[i % 10], 5 + i], 0.01 * (i % 20)) for i in range(start, start + 20)))
    await pair.validate()
    # All of vLLM's blocks can be had again: these prompts need nine tenths of them at once.
    rng = np.random.default_rng(25)
    full = [rng.integers(5, 2048, 1800).tolist() for _ in range(CAPACITY * 9 // 10 // 1840)]
    answers = await asyncio.gather(*(pair.complete(session, ids, max_tokens=30, ignore_eos=True) for ids in full))
    assert all(len(answer.token_ids) == 30 for answer in answers)
    await pair.validate()


async def test_flipped_bits_in_the_pool_are_found_recomputed_and_counted(
    pair: Any, judge: Any, session: aiohttp.ClientSession
) -> None:
    prompt = prompts(9, seed=26, longest=700)[-1]
    first = await pair.complete(session, prompt, max_tokens=8, ignore_eos=True, **GREEDY)
    await pair.validate()
    await flush(pair, session, seed=27)
    before = await metric(session, pair.url, "moonpool:digest_mismatches_total")
    flip_a_bit_per(4096, pair.pid("pool-0"))  # less than a layer of a block: each one is hit
    again = await pair.complete(session, prompt, max_tokens=8, ignore_eos=True, **GREEDY)
    assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)
    assert judge.wrong_tokens(again) == []
    assert await nodes_metric(session, pair, "moonpool:digest_mismatches_total", before + 1) > before


async def change_nodes(cluster: Any, *command: str) -> None:
    """Run `moonpool node` and wait for its end, for as long as vLLM may take to start."""
    words = [sys.executable, "-m", "moonpool", "node", *command, "--ready-file", str(cluster.ready_file)]
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("victim", ["decode-0", "prefill-0"])
async def test_after_the_death_of_a_worker_answers_go_on_and_prefixes_come_from_the_pool(
    victim: str, pair: Any, session: aiohttp.ClientSession
) -> None:
    role = victim.partition("-")[0]
    for command in (["scale", "decode=2"], *([["switch", "decode-1", role]] if role == "prefill" else [])):
        await change_nodes(pair, *command)
    bodies = [{"prompt": ids, "max_tokens": 150, "ignore_eos": True, **SAMPLED} for ids in prompts(6, seed=28)[:2]]
    rng = np.random.default_rng(29)
    bodies += [{**bodies[0], "prompt": rng.integers(5, 2048, 1600).tolist()} for _ in range(4)]
    known = prompts(12, seed=28, longest=900)[-1]
    first = await pair.complete(session, known, max_tokens=8, ignore_eos=True, **GREEDY)
    expected = [(await stream(pair, session, body, lambda _: None))[0] for body in bodies]
    await pair.validate()
    await flush(pair, session, seed=30)
    killed: list[int] = []

    def kill(number: int) -> None:
        # With the first token of the first answer, later prompts are being computed.
        if not killed and number >= (1 if role == "prefill" else 10):
            killed.append(pair.kill(victim))

    streams = await asyncio.gather(*(stream(pair, session, body, kill) for body in bodies))
    assert [ids for ids, _ in streams] == expected
    assert max(last["moonpool"]["attempts"] for _, last in streams) >= 2
    await pair.wait_restarted(victim, killed[0])
    again = await pair.complete(session, known, max_tokens=8, ignore_eos=True, **GREEDY)
    assert again.token_ids == first.token_ids
    assert again.moonpool["cached_dram_tokens"] >= len(known) - 32
    await pair.validate()
