"""A cluster whose workers run vLLM: tokens, sampling, grammars, failover, and what it releases."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from engine import Bias, LogitSteering, Penalties, steer

SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "seed": 1234}
VOCABULARY = 2048


def prompts(count: int, seed: int, longest: int = 400) -> list[list[int]]:
    """Token-id prompts of mixed lengths, those at the borders of blocks of 32 among them."""
    rng = np.random.default_rng(seed)
    lengths = [31, 32, 33, 63, 64, 65, 96, 97][:count]
    lengths += rng.integers(2, longest, max(0, count - len(lengths))).tolist()
    return [rng.integers(5, VOCABULARY, length).tolist() for length in lengths]


@pytest.mark.parametrize("mode", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "seeded"])
async def test_tokens_in_a_batch_are_the_models_and_those_of_the_request_alone(
    mode: dict[str, Any], cluster: Any, judge: Any, session: aiohttp.ClientSession
) -> None:
    asked = prompts(100, seed=3)
    options = {"max_tokens": 12, "ignore_eos": True, **mode}
    answers = await asyncio.gather(*(cluster.complete(session, prompt, **options) for prompt in asked))
    assert {answer.moonpool["decode_node"] for answer in answers} == {"aggregated-0", "aggregated-1"}
    for answer in answers[:8]:
        again = await cluster.complete(session, answer.prompt_ids, **options)
        assert again.token_ids == answer.token_ids
    await cluster.validate()
    for answer in answers:
        assert (len(answer.token_ids), answer.finish_reason) == (12, "length")
        assert judge.wrong_tokens(answer, **mode) == []


async def test_bias_penalties_and_minimum_length_act_as_on_the_native_engine(
    cluster: Any, judge: Any, session: aiohttp.ClientSession
) -> None:
    prompt = prompts(1, seed=4)[0]
    stop = (await cluster.complete(session, prompt, max_tokens=1, temperature=0.0)).token_ids[0]

    def changed(logits: NDArray[np.float32], answer: list[int]) -> NDArray[np.float32]:
        own, counts = np.unique(np.array(answer, np.int64), return_counts=True)
        seen = np.union1d(own, np.array(prompt, np.int64))
        times = np.zeros(len(seen), np.float32)
        times[np.searchsorted(seen, own)] = counts
        barred = np.array([stop]) if len(answer) < 6 else None
        bias = Bias(np.array([77]), np.array([2.5], np.float32))
        row = LogitSteering(None, barred, bias, Penalties(seen, times, 1.3, 0.7, 0.4))
        found: NDArray[np.float32] = steer(torch.from_numpy(np.ascontiguousarray(logits))[None], [row])[0].numpy()
        return found

    asked = {"logit_bias": {"77": 2.5}, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4}
    options = {"max_tokens": 24, "min_tokens": 6, "stop_token_ids": [stop], **asked, **SAMPLED}
    answer = await cluster.complete(session, prompt, **options)
    assert len(answer.token_ids) >= 6
    assert stop not in answer.token_ids[:6]
    assert judge.wrong_tokens(answer, changed, **SAMPLED) == []


async def test_a_stop_token_ends_the_answer_and_belongs_to_it(cluster: Any, session: aiohttp.ClientSession) -> None:
    prompt = prompts(1, seed=5)[0]
    whole = await cluster.complete(session, prompt, max_tokens=12, ignore_eos=True, **SAMPLED)
    stop = whole.token_ids[5]
    answer = await cluster.complete(session, prompt, max_tokens=12, ignore_eos=True, stop_token_ids=[stop], **SAMPLED)
    assert answer.finish_reason == "stop"
    assert whole.token_ids[: whole.token_ids.index(stop)] == [t for t in answer.token_ids if t != stop]


async def test_logprobs_are_those_of_the_models_own_distribution(
    cluster: Any, judge: Any, session: aiohttp.ClientSession
) -> None:
    prompt = prompts(1, seed=6)[0]
    options = {"max_tokens": 6, "ignore_eos": True, "logprobs": 3, "echo": True, "frequency_penalty": 1.0}
    answer = await cluster.complete(session, prompt, **options, **SAMPLED)
    ids = [*prompt, *answer.token_ids]
    expected = judge.logprobs(ids)
    found = answer.body["choices"][0]["logprobs"]["token_logprobs"]
    assert found[0] is None
    assert found[1:] == pytest.approx([expected[i][token] for i, token in enumerate(ids[1:])], abs=1e-3)
    for i, top in enumerate(answer.body["choices"][0]["logprobs"]["top_logprobs"][1:]):
        assert sorted(top.values(), reverse=True)[:3] == pytest.approx(sorted(expected[i], reverse=True)[:3], abs=1e-3)


GRAMMARS: list[tuple[dict[str, Any], Callable[[str], object]]] = [
    ({"regex": "[0-9]{3}-[a-z]{4}"}, lambda text: re.fullmatch("[0-9]{3}-[a-z]{4}", text)),
    ({"grammar": 'start: "yes" | "no"'}, lambda text: text in ("yes", "no")),
    (
        {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                  "additionalProperties": False}},
        lambda text: json.loads(text)["a"] in (1, 2),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "fits"), GRAMMARS, ids=["regex", "lark", "json"])
async def test_answers_fit_their_grammar(
    grammar: dict[str, Any], fits: Callable[[str], object], cluster: Any, session: aiohttp.ClientSession
) -> None:
    prompt = prompts(1, seed=7)[0]
    answer = await cluster.complete(session, prompt, max_tokens=60, structured_outputs=grammar, **SAMPLED)
    assert answer.finish_reason == "stop"
    assert fits(answer.body["choices"][0]["text"])


async def test_prefixes_are_reused_within_a_salt_only(cluster: Any, session: aiohttp.ClientSession) -> None:
    prompt = prompts(1, seed=8)[0] * 4
    options = {"max_tokens": 4, "ignore_eos": True, **SAMPLED}
    first = await cluster.complete(session, prompt, cache_salt="one", **options)
    others = await asyncio.gather(*(cluster.complete(session, prompt, cache_salt="two", **options) for _ in range(2)))
    assert first.cached_tokens == 0
    assert min(other.cached_tokens for other in others) == 0
    again = [await cluster.complete(session, prompt, cache_salt="one", **options) for _ in range(4)]
    assert max(answer.cached_tokens for answer in again) >= 96
    assert {tuple(answer.token_ids) for answer in (first, *others, *again)} == {tuple(first.token_ids)}


async def held_blocks(cluster: Any, session: aiohttp.ClientSession) -> dict[str, int]:
    """Number of blocks in each worker's own memory, as known to the conductor."""
    async with session.get(f"{cluster.url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'^moonpool:worker_directory_blocks{.*?node="(.*?)".*} (\S+)$', text, re.MULTILINE)
    return {node: int(float(value)) for node, value in found}


async def test_prompts_go_to_the_worker_whose_memory_holds_them(
    cluster: Any, session: aiohttp.ClientSession, moonpool: Callable[..., Any]
) -> None:
    options = {"max_tokens": 4, "ignore_eos": True, **SAMPLED}
    asked = [prompt * 4 for prompt in prompts(20, seed=13)[8:]]
    first = await asyncio.gather(*(cluster.complete(session, prompt, **options) for prompt in asked))
    await cluster.validate()
    flushed = await asyncio.to_thread(moonpool, "pool", "flush", "--yes", "--ready-file", cluster.ready_file)
    assert flushed.returncode == 0, flushed.stderr  # from now on only the workers have them
    again = []
    for prompt in asked:
        again.append(await cluster.complete(session, prompt, **options))
        await cluster.validate()  # both workers are idle when the next prompt is placed
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
    where = [answer.moonpool["decode_node"] for answer in first]
    assert set(where) == set(await held_blocks(cluster, session)) == {"aggregated-0", "aggregated-1"}
    assert [answer.moonpool["decode_node"] for answer in again] == where
    for answer in again:
        assert answer.cached_tokens >= (len(answer.prompt_ids) - 1) // 32 * 32


async def stream(
    cluster: Any, session: aiohttp.ClientSession, body: dict[str, Any], on_token: Callable[[int], None]
) -> tuple[list[int], dict[str, Any]]:
    """Token ids of a streamed completion, and its last event; `on_token(number)` is called after each event."""
    ids: list[int] = []
    last: dict[str, Any] = {}
    asked = {"model": cluster.ready["model"], **body, "stream": True, "return_token_ids": True}
    async with session.post(f"{cluster.url}/v1/completions", json=asked) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                last = json.loads(line[6:])
                assert "error" not in last, last
                for choice in last["choices"]:
                    ids += choice.get("token_ids") or []
                on_token(len(ids))
    return ids, last


def parts_of(pid: int) -> dict[str, psutil.Process]:
    """vLLM's processes below a worker, by name."""
    return {process.name(): process for process in psutil.Process(pid).children(recursive=True)}


LONG: list[dict[str, Any]] = [
    {"max_tokens": 300, "ignore_eos": True, "temperature": 0.8, "seed": 42, "presence_penalty": 0.5},
    {"max_tokens": 300, "ignore_eos": True, "temperature": 0.0},
    {"max_tokens": 300, "structured_outputs": {"regex": "[a-z ]{900}"}, **SAMPLED},
    {"max_tokens": 300, "structured_outputs": {"regex": "[0-9,]{900}"}, **SAMPLED},
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("victim", "how"),
    [("worker", signal.SIGKILL), ("VLLM::EngineCore", signal.SIGKILL), ("VLLM::EngineCore", signal.SIGSTOP)],
)
async def test_running_answers_go_on_with_the_same_tokens_after_the_end_of_a(
    victim: str, how: signal.Signals, cluster: Any, session: aiohttp.ClientSession
) -> None:
    asked = [{"prompt": prompt, **options} for prompt, options in zip(prompts(4, seed=9), LONG, strict=True)]
    expected = [(await stream(cluster, session, body, lambda _: None))[0] for body in asked]
    before = {name: cpu_s(cluster.pid(name)) for name in ("aggregated-0", "aggregated-1")}
    killed: dict[str, Any] = {}

    def kill(number: int) -> None:
        if number >= 20 and not killed:
            busy = max(before, key=lambda name: cpu_s(cluster.pid(name)) - before[name])
            pid = cluster.pid(busy)
            killed.update(node=busy, pid=pid, parts=list(parts_of(pid).values()))
            os.kill(pid if victim == "worker" else parts_of(pid)[victim].pid, how)

    streams = await asyncio.gather(*(stream(cluster, session, body, kill) for body in asked))
    assert [ids for ids, _ in streams] == expected
    assert max(last["moonpool"]["attempts"] for _, last in streams) == 2
    _, alive = psutil.wait_procs(killed["parts"], timeout=30)
    assert not alive, alive
    await cluster.wait_restarted(killed["node"], killed["pid"])
    async with asyncio.timeout(60):  # the conductor forgets what the dead worker's memory held
        while (await held_blocks(cluster, session)).get(killed["node"]) != 0:
            await asyncio.sleep(0.1)
    await cluster.validate()


def cpu_s(pid: int) -> float:
    """CPU time of vLLM's processes below a worker."""
    return sum(process.cpu_times().user for process in parts_of(pid).values())


async def test_cancelled_requests_leave_nothing_behind(cluster: Any, session: aiohttp.ClientSession) -> None:
    async def ask(prompt: list[int], seconds: float) -> None:
        body = {"model": cluster.ready["model"], "prompt": prompt, "max_tokens": 1000, "ignore_eos": True}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                await session.post(f"{cluster.url}/v1/completions", json=body)

    await asyncio.gather(*(ask(prompt, 0.05 + 0.02 * i) for i, prompt in enumerate(prompts(30, seed=10))))
    await cluster.validate()


def test_a_replayed_trace_is_verified(cluster: Any, tmp_path: Path, moonpool: Callable[..., Any]) -> None:
    trace = tmp_path / "trace.jsonl"
    rng = np.random.default_rng(11)
    with trace.open("w") as file:
        for i in range(20):
            ids = [int(rng.integers(0, 3)), 10 + i]
            entry = {"timestamp": 100 * i, "input_length": 600, "output_length": 8, "hash_ids": ids}
            file.write(json.dumps(entry) + "\n")
    done: subprocess.CompletedProcess[str] = moonpool("replay", trace, "--url", cluster.url, "--verify")
    assert done.returncode == 0, done.stdout + done.stderr
