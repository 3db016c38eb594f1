"""kill -9 of any process in mid-request: the request goes on with no wrong token, or ends with a named error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from moonpool.cluster_view.collector import validate_cluster
from moonpool.cluster_view.locate import locate
from tests.long_cases import others_long

RELEASED_S = 15.0  # two seconds, and the next report of each worker, on cores that others use too
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 42}


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


async def stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], on_token: Callable[[int], None]
) -> tuple[list[int], dict[str, Any] | None]:
    """Token ids of a streamed completion, and the error event that ended it, if one did."""
    ids: list[int] = []
    async with session.post(
        f"{url}/v1/completions", json={**body, "stream": True, "return_token_ids": True}
    ) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return ids, event["error"]
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
            on_token(len(ids))
    return ids, None


@pytest.fixture(scope="module")
def cluster(small_kv_model: Path, start_cluster: Callable[..., Any]) -> Any:
    flags = ["--prefill-nodes", "2", "--decode-nodes", "2", "--pool-nodes", "2", "--block-tokens", "8"]
    with start_cluster(small_kv_model, *flags) as running:
        yield running


@pytest.mark.parametrize(
    "victim",
    [
        *others_long(["decode-0", "conductor", "pool-0", "prefill-0"], ["decode-0", "prefill-0"]),
        pytest.param("decode-1", marks=pytest.mark.nightly),
    ],
)
async def test_a_running_request_survives_the_death_of(
    victim: str,
    cluster: Any,
    small_kv_model: Path,
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    old = cluster.pid(victim)
    killed = asyncio.Event()

    def kill_at_twenty(count: int) -> None:
        if count >= 20 and not killed.is_set():
            cluster.kill(victim)
            killed.set()

    asked = [prompt(seed, 120 + 8 * seed) for seed in range(4)]
    bodies = [{"model": cluster.ready["model"], "prompt": p, **LONG} for p in asked]
    answers = await asyncio.gather(*(stream(session, cluster.url, body, kill_at_twenty) for body in bodies))
    assert killed.is_set()
    judge = judge_of(small_kv_model)
    for ids, (got, error) in zip(asked, answers, strict=True):
        assert error is None
        assert len(got) == LONG["max_tokens"]
        answer = type("A", (), {"prompt_ids": ids, "token_ids": got})
        assert judge.wrong_tokens(answer, temperature=0.8, seed=42) == []
    await cluster.wait_restarted(victim, old)
    await cluster.validate()
    after = await cluster.complete(session, asked[0], max_tokens=8, temperature=0.0)
    assert judge.wrong_tokens(after) == []


@pytest.mark.long
async def test_a_waiting_prompt_survives_the_death_of_its_prefill_node(
    cluster: Any, small_kv_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    asked = [prompt(100 + seed, 1500) for seed in range(8)]
    work = [asyncio.create_task(cluster.complete(session, p, max_tokens=4, temperature=0.0)) for p in asked]
    await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
    old = cluster.kill("prefill-1")
    judge = judge_of(small_kv_model)
    for answer in await asyncio.gather(*work):
        assert judge.wrong_tokens(answer) == []
    await cluster.wait_restarted("prefill-1", old)
    await cluster.validate()


async def test_the_death_of_the_frontend_cancels_its_requests(cluster: Any, session: aiohttp.ClientSession) -> None:
    old = cluster.pid("frontend")
    body = {"model": cluster.ready["model"], "prompt": prompt(7, 50), **LONG, "max_tokens": 1500}

    def kill_from_ten_on(count: int) -> None:
        if count >= 10 and not killed:
            cluster.kill("frontend")
            killed.append(count)

    killed = list[int]()
    with pytest.raises(aiohttp.ClientError):
        await stream(session, cluster.url, body, kill_from_ten_on)
    await cluster.wait_restarted("frontend", old)
    await cluster.validate()


async def test_conductor_and_workers_release_the_requests_of_a_killed_frontend_within_seconds(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    old, is_first = cluster.pid("frontend"), asyncio.Event()

    async def cut_off(seed: int) -> None:
        body = {"model": cluster.ready["model"], "prompt": prompt(300 + seed, 400), **LONG}
        with contextlib.suppress(aiohttp.ClientError):
            await stream(session, cluster.url, body, lambda _: is_first.set())

    asked = [asyncio.create_task(cut_off(seed)) for seed in range(24)]  # some wait, some prefill, some decode
    await is_first.wait()
    cluster.kill("frontend")
    killed_s = time.monotonic()
    await asyncio.gather(*asked)
    located = locate(conductor="", url="", ready_file=cluster.ready_file)
    while held := [one for one in await validate_cluster(located) if one.role != "frontend" and not one.ok]:
        assert time.monotonic() < killed_s + RELEASED_S, held
        await asyncio.sleep(0.1)
    await cluster.wait_restarted("frontend", old)


@pytest.mark.long
async def test_without_another_node_the_request_ends_with_a_named_error_or_goes_on(
    cluster: Any, small_kv_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    nodes = ("decode-0", "decode-1")
    old = {node: cluster.pid(node) for node in nodes}
    body = {"model": cluster.ready["model"], "prompt": prompt(3, 60), **LONG}
    killed = False

    def kill_all_at_twenty(count: int) -> None:
        nonlocal killed
        if count >= 20 and not killed:
            killed = True
            for node in nodes:
                cluster.kill(node)

    ids, error = await stream(session, cluster.url, body, kill_all_at_twenty)
    assert killed
    if error is None:  # a node came back before the attempts ran out
        answer = type("A", (), {"prompt_ids": body["prompt"], "token_ids": ids})
        assert judge_of(small_kv_model).wrong_tokens(answer, temperature=0.8, seed=42) == []
        assert len(ids) == LONG["max_tokens"]
    else:
        assert error["message"]
        assert error["code"]
    for node in nodes:
        await cluster.wait_restarted(node, old[node])
    await cluster.validate()
