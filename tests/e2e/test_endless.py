"""Endless requests with a window on a cluster: brute force's tokens, beyond the model's positions, whatever dies."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from engine.rolling import RollingWindow
from tests.e2e.conftest import TOKENIZER, TOLERANCE, metric
from tests.e2e.damage import flip_bits
from tests.long_cases import others_long

BLOCK = 8
WINDOW = 64
ROLLING = RollingWindow(sinks=4, window=WINDOW, slide=8, block_tokens=BLOCK)
ENDLESS = {"sinks": 4, "window": WINDOW}
STOP = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("model"),
        RandomModelSpec(layers=3, hidden=64, heads=4, kv_heads=2, vocab=2048, max_len=128, scale=3.0, seed=7),
        tokenizer=TOKENIZER,
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, threads=1)


@pytest.fixture(scope="module")
def cluster(folder: Path, start_cluster: Callable[..., Any]) -> Any:
    flags = ["--prefill-nodes", "2", "--decode-nodes", "2", "--block-tokens", str(BLOCK), "--capacity-tokens", "1024"]
    with start_cluster(folder, *flags, "--max-model-len", "128") as running:
        yield running


async def first_tokens(
    session: aiohttp.ClientSession,
    cluster: Any,
    prompt: list[int],
    count: int,
    on_token: Callable[[int], None] = lambda count: None,
) -> list[int]:
    """The first tokens of an endless answer, whose client then leaves."""
    ids: list[int] = []
    body = {"model": cluster.ready["model"], "prompt": prompt, "endless": ENDLESS, "temperature": 0.0}
    body |= {"stream": True, "return_token_ids": True, "ignore_eos": True}
    async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
            on_token(len(ids))
            if len(ids) >= count:
                return ids[:count]
    raise AssertionError(f"the answer ended after {len(ids)} tokens")


def wrong_tokens(model: Model, prompt: list[int], answer: list[int]) -> list[int]:
    """Indices of tokens that lie more than the tolerance below the best that brute force finds."""
    logits = model.score(np.array(prompt + answer, np.int32), ROLLING)
    rows = logits[len(prompt) - 1 : -1]
    return [i for i, token in enumerate(answer) if rows[i][token] < rows[i].max() - TOLERANCE]


@pytest.mark.parametrize("length", [20, 300])
async def test_an_answer_goes_on_beyond_the_models_positions(
    cluster: Any, model: Model, session: aiohttp.ClientSession, length: int
) -> None:
    prompt = np.random.default_rng(1).integers(5, 2000, length).tolist()
    answer = await first_tokens(session, cluster, prompt, 500)
    assert wrong_tokens(model, prompt, answer) == []
    await cluster.validate()


async def turn(
    session: aiohttp.ClientSession, cluster: Any, chat: list[dict[str, str]], length: int
) -> tuple[list[int], list[int], str]:
    """A chat's endless turn, which ends at its client's stop token after `length` others: prompt, answer and text."""
    body = {"model": cluster.ready["model"], "messages": chat, "endless": ENDLESS, "temperature": 0.0}
    body |= {"stream": True, "return_token_ids": True, "ignore_eos": True}
    body |= {"stop_token_ids": [STOP], "logit_bias": {str(STOP): 100}, "min_tokens": length}
    prompt: list[int] = []
    answer: list[int] = []
    text = ""
    async with session.post(f"{cluster.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: ") or b"[DONE]" in line:
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            prompt += event.get("prompt_token_ids") or []
            for choice in event["choices"]:
                answer += choice.get("token_ids") or []
                text += choice["delta"].get("content") or ""
    assert (len(answer), answer[-1]) == (length + 1, STOP)
    return prompt, answer[:-1], text


async def test_the_turns_of_a_chat_go_on_beyond_the_window(
    cluster: Any, model: Model, session: aiohttp.ClientSession
) -> None:
    chat: list[dict[str, str]] = []
    lengths: list[int] = []
    for number in range(5):
        chat.append({"role": "user", "content": f"And then, in the year {number}?"})
        prompt, answer, text = await turn(session, cluster, chat, 30 + 20 * number)
        assert wrong_tokens(model, prompt, answer) == []
        lengths.append(len(prompt))
        chat.append({"role": "assistant", "content": text})
    assert lengths[0] < WINDOW
    assert lengths[-1] > 128  # the model's positions
    await cluster.validate()


@pytest.mark.parametrize("victim", others_long(["decode-0", "conductor", "pool-0"], ["decode-0"]))
async def test_it_survives_the_death_of(
    cluster: Any, model: Model, session: aiohttp.ClientSession, victim: str
) -> None:
    prompt = np.random.default_rng(2).integers(5, 2000, 40).tolist()
    olds: dict[str, int] = {}

    def kill(count: int) -> None:
        if count >= 150 and not olds:
            olds[victim] = cluster.kill(victim)

    answers = await asyncio.gather(*(first_tokens(session, cluster, prompt, 400, kill) for _ in range(2)))
    assert olds
    for answer in answers:
        assert wrong_tokens(model, prompt, answer) == []
    for name, old in olds.items():
        await cluster.wait_restarted(name, old)
    await cluster.validate()


async def test_a_prompt_in_which_the_window_slides_survives_its_prefill_node(
    cluster: Any, model: Model, session: aiohttp.ClientSession
) -> None:
    prompts = [np.random.default_rng(seed).integers(5, 2000, 16_000).tolist() for seed in range(3, 7)]
    asked = [asyncio.create_task(first_tokens(session, cluster, prompt, 100)) for prompt in prompts]
    await prefilling(session, cluster, "prefill-0")
    old = cluster.kill("prefill-0")
    assert not any(task.done() for task in asked)
    for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
        assert wrong_tokens(model, prompt, answer) == []
    await cluster.wait_restarted("prefill-0", old)
    await cluster.validate()


async def test_flipped_bits_in_the_pool_are_caught(cluster: Any, model: Model, session: aiohttp.ClientSession) -> None:
    prompt = np.random.default_rng(6).integers(5, 2000, 60).tolist()
    asked = {"max_tokens": 4, "temperature": 0.0}
    await cluster.complete(session, prompt, **asked)
    await cluster.validate()
    for node in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        old = cluster.kill(node)  # forgets what it holds itself
        await cluster.wait_restarted(node, old)
    flip_bits(cluster.pid("pool-0"))
    answer = await first_tokens(session, cluster, prompt, 300)
    assert wrong_tokens(model, prompt, answer) == []
    async with asyncio.timeout(20):  # nodes report about once a second
        while not await metric(session, cluster.url, "moonpool:digest_mismatches_total"):
            await asyncio.sleep(0.1)
    await cluster.validate()


async def prefilling(session: aiohttp.ClientSession, cluster: Any, node_id: str) -> None:
    """Return once the node reports a request."""
    async with asyncio.timeout(60):
        while True:
            async with session.get(f"{cluster.url}/metrics") as response:
                text = await response.text()
            if re.search(rf'^vllm:num_requests_running{{.*"{node_id}".*}} [1-9]', text, re.MULTILINE):
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("endless", "param", "words"),
    [
        ({"window": 8}, "endless.window", "16 to 120 tokens"),
        ({"window": 128}, "endless.window", "16 to 120 tokens"),
        ({"sinks": 5, "window": 64}, "endless.sinks", "sinks must be at most 4, half of a block, got 5"),
        ({"sinks": 4}, "endless", "window"),
        ({"window": "64"}, "endless", "window"),
        (3, "endless", "must be true, or an object with `window` and `sinks`"),
    ],
)
async def test_bad_windows_are_refused_by_the_field(
    cluster: Any, session: aiohttp.ClientSession, endless: Any, param: str, words: str
) -> None:
    body = {"model": cluster.ready["model"], "prompt": [5, 6, 7], "stream": True, "endless": endless}
    async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
        answer = await response.json()
    assert response.status == 400, answer
    assert answer["error"]["param"].startswith(param), answer
    assert words in answer["error"]["message"], answer
