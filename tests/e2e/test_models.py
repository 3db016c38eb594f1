"""Two models in one cluster, with one tokenizer and one KV layout: whatever is shared, no token of either is wrong."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from engine import load_model
from engine.random_model import RandomModelSpec, write_random_model

ASK: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
EVICTED = re.compile(r'^moonpool:pool_evicted_blocks_total{.*reason="room".*tier="dram".* ([0-9.]+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def twin_model(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random model with other weights: chains and layout of the KV are equal, its content is not."""
    return write_random_model(
        tmp_path_factory.mktemp("twin"),
        RandomModelSpec(layers=3, hidden=64, heads=4, kv_heads=2, vocab=2048, max_len=1024, scale=3.0, seed=11),
        tokenizer=random_model,
    )


@pytest.fixture(scope="module")
def cluster(random_model: Path, twin_model: Path, start_cluster: Callable[..., Any]) -> Iterator[Any]:
    names = ("--served-model-name", "first", "f")
    twin = f"org/second={twin_model},alias=s,aggregated=1,ttft_slo=100"
    with start_cluster(random_model, *names, "--add-model", twin, "--block-tokens", "8") as running:
        yield running


@pytest.fixture
def folders(random_model: Path, twin_model: Path) -> dict[str, Path]:
    return {"first": random_model, "org/second": twin_model}


async def metrics_of(cluster: Any, session: aiohttp.ClientSession) -> str:
    return (await get(session, f"{cluster.url}/metrics"))[1]


async def get(session: aiohttp.ClientSession, url: str) -> tuple[int, str]:
    async with session.get(url) as response:
        return response.status, await response.text()


async def test_equal_prompts_reuse_their_own_models_kv_and_every_token_is_that_models(
    cluster: Any, folders: dict[str, Path], judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    rng = np.random.default_rng(5)
    shared = rng.integers(5, 2000, 96).tolist()
    for model in folders:
        first = await cluster.complete(session, shared, model=model, **ASK)
        assert first.cached_tokens == 0, "nothing of this model is there yet, whatever there is of the other"
        assert judge_of(folders[model]).wrong_tokens(first) == []
    asked = [(model, shared + rng.integers(5, 2000, 20 + n).tolist()) for n in range(4) for model in folders]
    answers = await asyncio.gather(*(cluster.complete(session, ids, model=model, **ASK) for model, ids in asked))
    for (model, _), answer in zip(asked, answers, strict=True):
        assert answer.cached_tokens >= 88, "the shared part is reused"
        assert judge_of(folders[model]).wrong_tokens(answer) == []
    for model in folders:
        turn = await cluster.complete(session, shared, model=model, **ASK)
        history = [*shared, *turn.token_ids, *rng.integers(5, 2000, 9).tolist()]
        reply = await cluster.complete(session, history, model=model, **ASK)
        assert reply.cached_tokens >= 96
        assert judge_of(folders[model]).wrong_tokens(reply) == []
    await cluster.validate()


async def test_a_model_is_found_by_alias_and_by_default_and_another_is_not(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    prompt = list(range(100, 140))
    by_name = {model: await cluster.complete(session, prompt, model=model, **ASK) for model in ("first", "org/second")}
    assert by_name["first"].token_ids != by_name["org/second"].token_ids
    for alias, model in (("f", "first"), ("s", "org/second"), (None, "first")):
        answer = await cluster.complete(session, prompt, model=alias, **ASK)
        assert answer.token_ids == by_name[model].token_ids
        assert answer.body["model"] == (alias or model)
    body = {"model": "gpt-4", "prompt": prompt, **ASK}
    async with session.post(f"{cluster.url}/v1/completions", json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"]) == (404, "model_not_found")
        assert all(repr(name) in error["message"] for name in ("gpt-4", "first", "f", "org/second", "s"))


async def test_each_model_is_described_where_operators_look(
    cluster: Any, folders: dict[str, Path], session: aiohttp.ClientSession
) -> None:
    _, text = await get(session, f"{cluster.url}/v1/models")
    cards = {card["id"]: card for card in json.loads(text)["data"]}
    assert {name: card["root"] for name, card in cards.items()} == {
        "first": "first",
        "f": "first",
        "org/second": "org/second",
        "s": "org/second",
    }
    assert (cards["first"]["max_model_len"], cards["s"]["max_model_len"]) == (2048, 1024)
    for model, folder in folders.items():
        facts = {"block_tokens": 8, "kv_scale_group": 0, "stand_ins": []}
        want = {"fingerprint": load_model(folder, threads=1).fingerprint, **facts}
        assert cards[model]["moonpool"] == want
    cluster.reload()
    assert cluster.ready["model"] == "first"
    assert [(model["name"], model["aliases"]) for model in cluster.ready["models"]] == [
        ("first", ["f"]),
        ("org/second", ["s"]),
    ]
    of_nodes = {node_id: node["model"] for node_id, node in cluster.ready["nodes"].items() if node["model"]}
    assert of_nodes == {"prefill-0": "first", "decode-0": "first", "org-second-aggregated-0": "org/second"}
    metrics = await metrics_of(cluster, session)
    for model in folders:
        assert f'vllm:generation_tokens_total{{model_name="{model}"}}' in metrics


def test_a_replay_does_not_verify_one_model_against_the_other(cluster: Any, folders: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "moonpool", "replay", "conversation", "--url", cluster.url, "--limit", "2"]
    command += ["--verify", "--model", "s", "--model-path", str(folders["first"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    said = " ".join(done.stderr.split())
    assert "cannot verify: the server's 's' has fingerprint" in said
    assert all(load_model(folder, threads=1).fingerprint in said for folder in folders.values())


async def test_a_model_that_lost_its_worker_is_named_while_the_other_is_served(
    cluster: Any, folders: dict[str, Path], judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> None:
    worker = "org-second-aggregated-0"
    old = cluster.kill(worker)
    async with asyncio.timeout(60):
        while (found := await get(session, f"{cluster.url}/ready"))[0] == 200:
            await asyncio.sleep(0.05)
    assert "'org/second'" in found[1]
    assert "'first'" not in found[1]
    prompt = list(range(200, 260))
    answer = await cluster.complete(session, prompt, model="first", **ASK)
    assert judge_of(folders["first"]).wrong_tokens(answer) == []
    await cluster.wait_restarted(worker, old)
    answer = await cluster.complete(session, prompt, model="s", **ASK)
    assert judge_of(folders["org/second"]).wrong_tokens(answer) == []
    await cluster.validate()


@pytest.mark.long
async def test_models_of_different_layouts_share_a_pool_that_is_too_small_for_both(
    random_model: Path,
    two_group_model: Path,
    start_cluster: Callable[..., Any],
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
) -> None:
    folders = {"first": random_model, "second": two_group_model}
    second = f"second={two_group_model},aggregated=1,capacity_tokens=4096"
    flags = ["--served-model-name", "first", "--aggregated", "1", "--capacity-tokens", "2048", "--add-model", second]
    rng = np.random.default_rng(1)
    heads = [rng.integers(5, 2000, 160).tolist() for _ in range(6)]
    reused = dict.fromkeys(folders, 0)
    with start_cluster(random_model, *flags, "--block-tokens", "8", "--pool-bytes", "1MiB") as cluster:
        for _ in range(3):
            asked = [(model, head + rng.integers(5, 2000, 12).tolist()) for head in heads for model in folders]
            answers = await asyncio.gather(*(cluster.complete(session, ids, model=m, **ASK) for m, ids in asked))
            for (model, _), answer in zip(asked, answers, strict=True):
                assert judge_of(folders[model]).wrong_tokens(answer) == []
                reused[model] += answer.cached_tokens > 0
        assert all(reused.values())
        async with asyncio.timeout(30):  # nodes report once a second
            while not any(float(number) for number in EVICTED.findall(await metrics_of(cluster, session))):
                await asyncio.sleep(0.2)
        await cluster.validate()
