"""Receipts of a live cluster: each is confirmed by the decision log, whatever its KV's source, also after a kill -9."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from conductor.decision_log import find_records

Command = Callable[..., subprocess.CompletedProcess[str]]
BLOCK, LENGTH = 8, 200
FEW: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0, "return_receipt": True}


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, LENGTH).tolist()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "decisions"


@pytest.fixture(scope="module")
def cluster(start_paced: Callable[..., Any], log: Path) -> Any:
    """A cluster that has served requests and lost nodes; with the receipts of its answers."""
    flags = ["--prefill-nodes", "2", "--decode-nodes", "2", "--block-tokens", str(BLOCK), "--decision-log", str(log)]
    with start_paced(*flags) as running:
        running.receipts = asyncio.run(live(running, log))
        yield running


async def live(cluster: Any, log: Path) -> dict[str, Any]:
    receipts: dict[str, Any] = {}
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def receipt(ids: list[int]) -> dict[str, Any]:
            return dict((await cluster.complete(session, ids, **FEW)).moonpool["receipt"])

        receipts["new"] = await receipt(prompt(1))
        async with asyncio.timeout(60):  # until the conductor knows what the worker's memory has
            while "own memory" not in receipts:
                again = await receipt(prompt(1))
                if again["attempts"][-1]["kv"]["cached_own_tokens"]:
                    receipts["own memory"] = again
        await cluster.validate()  # the pool has what the workers stored
        killed = {node: cluster.kill(node) for node in ("prefill-0", "prefill-1")}  # forget what they hold themselves
        for node, pid in killed.items():
            await cluster.wait_restarted(node, pid)
        receipts["pool"] = await receipt([*prompt(1), 9])
        receipts["failover"] = await moved(cluster, session, log)
    for receipt in receipts.values():
        await until_ended(log, receipt["request_id"])
    return receipts


async def moved(cluster: Any, session: aiohttp.ClientSession, log: Path) -> dict[str, Any]:
    """The receipt, from a stream's last event, of a request whose decode node is killed."""
    body = {"model": cluster.ready["model"], "prompt": prompt(2), "max_tokens": 600, "ignore_eos": True, "stream": True}
    receipts, count = [], 0
    async with session.post(f"{cluster.url}/v1/completions", json=body | {"return_receipt": True}) as response:
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event, count = json.loads(line[6:]), count + 1
            assert "error" not in event, event
            if count == 10:
                cluster.kill(await decode_node(log, event["id"]))
            receipts += [event["moonpool"]["receipt"]] if "moonpool" in event else []
    (receipt,) = receipts
    return dict(receipt)


async def decode_node(log: Path, name: str) -> str:
    """The decode node of the request's first attempt, as soon as the log tells."""
    async with asyncio.timeout(60):
        while not (records := find_records(log, name).records):
            await asyncio.sleep(0.02)
    return str(records[0]["attempts"][0]["decision"]["decode"])


async def until_ended(log: Path, name: str) -> None:
    """Wait until the log holds the end of the request, which its writer records a moment after the answer."""
    async with asyncio.timeout(60):
        while any(record["outcome"] == "open" for record in find_records(log, name).records):
            await asyncio.sleep(0.02)


def test_receipts_tell_where_the_kv_came_from_and_every_attempt(cluster: Any) -> None:
    found = {name: [attempt["kv"] for attempt in each["attempts"]] for name, each in cluster.receipts.items()}
    tiers = [f"cached_{tier}_tokens" for tier in ("own", "dram", "ssd", "remote")]
    for name, sources in found.items():
        for kv in filter(None, sources):
            assert kv["computed_tokens"] + sum(kv[tier] for tier in tiers) >= LENGTH, name
            assert kv["recomputed_blocks"] == 0
    assert [found["new"][0][tier] for tier in tiers] == [0, 0, 0, 0]
    assert found["own memory"][-1]["cached_own_tokens"] >= LENGTH - BLOCK
    assert found["pool"][-1]["cached_dram_tokens"] == LENGTH
    assert found["pool"][-1]["computed_tokens"] == 1
    first, *_, last = cluster.receipts["failover"]["attempts"]
    assert (first["outcome"], last["outcome"], last["tokens_before"] > 0) == ("retry", "finished", True)
    assert last["decode_node"] != first["decode_node"]
    assert last["kv"]["computed_tokens"] < LENGTH


def test_every_receipt_is_confirmed_by_the_log_and_an_altered_one_is_not(
    cluster: Any, log: Path, moonpool: Command, tmp_path: Path
) -> None:
    receipts = cluster.receipts.values()
    (tmp_path / "all.json").write_text(json.dumps({"moonpool": [{"receipt": receipt} for receipt in receipts]}))
    done = moonpool("decisions", "verify", tmp_path / "all.json", "--log", log)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [f"Receipt of {receipt['request_id']}: true" in done.stdout for receipt in receipts] == [True] * 4
    assert done.stdout.count(" replayed: prefill on ") == sum(len(receipt["attempts"]) for receipt in receipts)
    altered = copy.deepcopy(cluster.receipts["failover"])
    altered["attempts"][1]["predicted_tbt_s"] = float(np.nextafter(altered["attempts"][1]["predicted_tbt_s"], 1))
    (tmp_path / "altered.json").write_text(json.dumps(altered))
    done = moonpool("decisions", "verify", tmp_path / "altered.json", "--log", log)
    print(json.dumps(altered, indent=1), done.stdout)
    assert done.returncode == 1
    assert "attempts[1].predicted_tbt_s: " in done.stdout


def test_without_a_folder_the_cluster_is_asked_where_its_log_is(
    cluster: Any, log: Path, moonpool: Command, tmp_path: Path
) -> None:
    path = tmp_path / "receipt.json"
    path.write_text(json.dumps(cluster.receipts["pool"]))
    done = moonpool("decisions", "verify", path, "--ready-file", cluster.ready_file, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads(done.stdout)["receipts"]
    assert (told["true"], Path(told["decisions"][0]["path"]).parent) == (True, log)
