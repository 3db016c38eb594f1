"""A live cluster's decision log, under rejections and a killed worker: it replays, explains, and is a trace."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from conductor.decision_log import find_records, recorded_runs, replay
from conductor.decision_log.files import numbered, read_lines
from traces import read_trace

Command = Callable[..., subprocess.CompletedProcess[str]]


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


async def ask(
    session: aiohttp.ClientSession, url: str, ids: list[int], on_token: Any = None, **more: Any
) -> tuple[int, str]:
    """A streamed completion: its status and its id. `on_token(id, count)` is called at each."""
    headers = more.pop("headers", {})
    body = {"prompt": ids, "stream": True, "ignore_eos": True, **more}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
        name, count = response.headers["x-request-id"], 0
        async for line in response.content:
            if line.startswith(b"data: {"):
                assert b'"error":' not in line, line
                count += 1
                if on_token is not None:
                    on_token(name, count)
        return response.status, name


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "decisions"


@pytest.fixture(scope="module")
def cluster(start_paced: Callable[..., Any], log: Path) -> Any:
    """One that has served, refused, lost a decode node and a conductor; with the ids of its requests by what they
    were."""
    flags = ["--prefill-nodes", "2", "--decode-nodes", "2", "--block-tokens", "8"]
    settings = ["--decision-log", str(log), "--decision-log-block-tokens", "64"]
    with start_paced(*flags, *settings) as running:
        running.names = asyncio.run(live(running, log))
        yield running


async def until_placed(log: Path, name: str) -> str:
    """The decode node of the request's first place, as soon as the log tells."""
    async with asyncio.timeout(60):
        while not (records := find_records(log, name).records):
            await asyncio.sleep(0.02)
    decode: str = records[0]["attempts"][0]["decision"]["decode"]
    return decode


async def until_ended(log: Path, name: str) -> None:
    """Wait until the log holds the end of the request, which its writer records a moment after the answer."""
    async with asyncio.timeout(60):
        while any(record["outcome"] == "open" for record in find_records(log, name).records):
            await asyncio.sleep(0.02)


async def live(cluster: Any, log: Path) -> dict[str, str]:
    url, model = cluster.url, cluster.ready["model"]
    shared, few = prompt(1, 256), {"model": model, "max_tokens": 8}
    names: dict[str, str] = {}
    begun = asyncio.Event()

    def begin(name: str, count: int) -> None:
        if count == 10:
            names["long"] = name
            begun.set()

    async def go(**more: Any) -> asyncio.Task[tuple[int, str]]:
        begun.clear()
        task = asyncio.create_task(ask(session, url, on_token=begin, model=model, **more))
        async with asyncio.timeout(60):
            await begun.wait()
        return task

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for turn in range(3):
            status, names[f"turn-{turn}"] = await ask(session, url, shared + prompt(turn, 40), **few)
            assert status == 200
        status, names["refused"] = await ask(session, url, shared, headers={"x-slo-ttft-ms": "0.001"}, **few)
        assert status == 429
        moved = await go(ids=prompt(9, 120), max_tokens=900)
        node_id = await until_placed(log, names["long"])
        await cluster.wait_restarted(node_id, cluster.kill(node_id))
        assert await moved == (200, names["long"])
        names["moved"] = names["long"]
        kept = await go(ids=prompt(5, 80), max_tokens=900)
        await until_placed(log, names["long"])
        await cluster.wait_restarted("conductor", cluster.kill("conductor"))
        assert await kept == (200, names["long"])
        names["over-a-restart"] = names.pop("long")
        status, names["afterwards"] = await ask(session, url, shared, **few)
        assert status == 200
    await cluster.validate()
    await until_ended(log, names["afterwards"])
    return names


def test_every_request_has_one_record_with_its_end(cluster: Any, log: Path) -> None:
    found = {what: find_records(log, name).records for what, name in cluster.names.items()}
    outcomes = {what: [record["outcome"] for record in records] for what, records in found.items()}
    assert outcomes == {what: ["rejected" if what == "refused" else "finished"] for what in outcomes}
    (moved,) = found["moved"]
    assert moved["output_length"] == 900
    assert [attempt["outcome"] for attempt in moved["attempts"]][:1] == ["retry"]
    assert len(moved["attempts"]) >= 2
    (again,) = found["turn-1"]
    assert again["cached_tokens"] >= 248
    assert 0 < again["ttft_s"] < 100
    assert 0 < again["attempts"][0]["decision"]["predicted_ttft_s"] < 100


def test_both_lives_of_the_conductor_replay_to_the_same_decisions(cluster: Any, log: Path, moonpool: Command) -> None:
    found = recorded_runs(log)
    assert len(found) == 2
    for life in found:
        steps = list(replay(life))
        assert [step for step in steps if step.logged != step.made] == []
        assert {type(step.event).__name__ for step in steps} >= {"NodeJoined", "NodeReported", "RequestArrived", "Tick"}
    assert "NodeLost" in {type(step.event).__name__ for step in replay(found[0])}
    done = moonpool("replay-decisions", log)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same decisions") == 2
    other = moonpool("replay-decisions", log, "--set", "ttft_objective_s=1e-6", "--json")
    told = json.loads(other.stdout)
    assert (other.returncode, told["open_loop"]) == (0, True)
    assert told["lives"][0]["kinds"]["rejected instead of placed"] >= 4


def test_a_changed_log_is_found_out_and_the_difference_named(
    cluster: Any, log: Path, moonpool: Command, tmp_path: Path
) -> None:
    (path, *_) = numbered(log, "events").values()
    lines = [line for _, line in read_lines(path)]
    at = next(i for i, line in enumerate(lines) if f'"{cluster.names["turn-0"]}"'.encode() in line)
    lines[at] = lines[at].replace(b'"prompt_tokens":296', b'"prompt_tokens":196')
    (tmp_path / "events-000001.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    done = moonpool("replay-decisions", tmp_path)
    assert done.returncode == 1
    assert f"line {at + 1}, RequestArrived of request {cluster.names['turn-0']}" in done.stdout
    assert "predicted_ttft_s" in done.stdout


def test_the_log_is_a_trace(cluster: Any, log: Path) -> None:
    # Files of conductors that ended are compressed by the next one.
    rows = [row for path in numbered(log, "decisions").values() for row in read_trace(path, block_tokens=64)]
    lengths = [(row.input_length, row.output_length) for row in rows]
    assert lengths[:3] == [(296, 8)] * 3
    assert rows[0].hash_ids[:4] == rows[1].hash_ids[:4] == rows[2].hash_ids[:4]
    assert len({row.hash_ids[4] for row in rows[:3]}) == 3
    assert len(rows) == 7


def test_explain_tells_a_person_why(cluster: Any, log: Path, moonpool: Command) -> None:
    live, names = ["--ready-file", cluster.ready_file], cluster.names
    moved = moonpool("explain", names["moved"], *live, COLUMNS="80")
    assert moved.returncode == 0, moved.stderr
    print(moved.stdout)
    assert max(map(len, moved.stdout.splitlines())) <= 80
    for words in (
        "Attempt 1, at once: prefill on ",
        "Attempt 2, ",
        "placed again",
        "prefill, best 2 of 2",
        "Finished: 900",
    ):
        assert words in moved.stdout
    refused = moonpool("explain", names["refused"], "--log", log, COLUMNS="80")
    print(refused.stdout)
    assert "rejected (ttft)" in refused.stdout
    assert "(the request)" in refused.stdout
    print(moonpool("explain", names["turn-1"], *live, COLUMNS="80").stdout)
    told = json.loads(moonpool("explain", names["turn-1"], *live, "--json").stdout)
    assert told["records"][0]["request_id"] == names["turn-1"]
    unknown = moonpool("explain", "nobody", *live)
    print(unknown.stdout)
    assert unknown.returncode == 1
    assert "No record of request 'nobody'" in unknown.stdout
    assert "starts with requests of 20" in unknown.stdout
    nowhere = moonpool("explain", "x", "--log", log.parent)
    assert nowhere.returncode == 1
    assert "is not a decision log" in nowhere.stderr
