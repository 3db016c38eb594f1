"""One trace for one request, through every process that serves it, as a collector gets it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from worker.paced.profiles import profile_of
from worker.policy.cost_profile import save_profile

PARENT = "b7ad6b7169203331"
ROOT = "POST /v1/completions"


@pytest.fixture(scope="module")
def cluster(
    random_model: Path,
    weightless: Callable[[Path, Path], Path],
    tmp_path_factory: pytest.TempPathFactory,
    start_paced: Callable[..., Any],
    otlp_receiver: Any,
) -> Iterator[Any]:
    folder = weightless(random_model, tmp_path_factory.mktemp("weightless"))
    instant = profile_of("instant")
    save_profile(replace(instant, name="slow", decode=replace(instant.decode, fixed_s=0.01)), folder / "slow.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        flags = ["--block-tokens", "8", "--decode-nodes", "2", "--transport", "tcp"]
        with start_paced(*flags, model=folder) as running:
            yield running


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()  # type: ignore[no-any-return]


async def ask(
    cluster: Any,
    session: aiohttp.ClientSession,
    trace: str,
    ids: list[int],
    *,
    sampled: bool = True,
    headers: dict[str, str] | None = None,
    **options: Any,
) -> tuple[int, dict[str, Any], Any]:
    body = {"prompt": ids, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, **options}
    given = {"traceparent": f"00-{trace}-{PARENT}-{'01' if sampled else '00'}", **(headers or {})}
    async with session.post(f"{cluster.url}/v1/completions", json=body, headers=given) as response:
        return response.status, await response.json(), response.headers


async def spans_of(receiver: Any, trace: str, *names: str, is_whole: bool = True) -> list[dict[str, Any]]:
    """Once there are spans of all these names, as often as they are named, and the parent of each, if `is_whole`: who
    ends last tells last."""
    async with asyncio.timeout(60):
        while True:
            spans = receiver.trace(trace)
            told = [span["name"] for span in spans]
            ids = {span["id"] for span in spans} | {PARENT}
            if all(told.count(name) >= names.count(name) for name in names) and (
                not is_whole or all(span["parent"] in ids for span in spans)
            ):
                return spans
            await asyncio.sleep(0.05)


def tree(spans: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    """(name, name of its parent, role of its process)"""
    names = {span["id"]: span["name"] for span in spans} | {PARENT: "client"}
    return {(span["name"], names[span["parent"]], span["service"].removeprefix("moonpool-")) for span in spans}


async def test_one_request_is_one_trace_through_all_roles(
    cluster: Any, session: aiohttp.ClientSession, otlp_receiver: Any
) -> None:
    trace, ids = secrets.token_hex(16), prompt(1, 100)
    status, answer, headers = await ask(cluster, session, trace, ids)
    assert status == 200, answer
    spans = await spans_of(otlp_receiver, trace, ROOT, "prefill", "decode", "generate", "messenger push")
    assert tree(spans) == {
        (ROOT, "client", "frontend"),
        ("tokenize", ROOT, "frontend"),
        ("attempt", ROOT, "frontend"),
        ("schedule", "attempt", "frontend"),
        ("place", "schedule", "conductor"),
        ("prefill", "attempt", "prefill-node"),
        ("queue", "prefill", "prefill-node"),
        ("load", "prefill", "prefill-node"),
        ("compute", "prefill", "prefill-node"),
        ("messenger push", "prefill", "prefill-node"),
        ("reserve", "prefill", "prefill-node"),
        ("commit", "prefill", "prefill-node"),
        ("decode", "reserve", "decode-node"),
        ("slots", "decode", "decode-node"),
        ("receive", "decode", "decode-node"),
        ("join", "decode", "decode-node"),
        ("generate", "decode", "decode-node"),
    }
    by_name = {span["name"]: span for span in spans}
    root, placed = by_name[ROOT], by_name["place"]["about"]
    assert headers["traceparent"].split("-")[1:3] == [trace, root["id"]]
    assert root["about"]["http.response.status_code"] == 200
    assert root["about"]["gen_ai.usage.output_tokens"] == 4
    assert root["about"]["moonpool.request_id"] == answer["moonpool"]["request_id"]
    assert root["events"] == ["first token"]
    assert placed["moonpool.prefill_node"] == by_name["prefill"]["node"] == answer["moonpool"]["prefill_node"]
    assert placed["moonpool.decode_node"] == by_name["decode"]["node"] == answer["moonpool"]["decode_node"]
    assert by_name["messenger push"]["about"]["moonpool.bytes"] > 0
    assert by_name["generate"]["about"]["moonpool.tokens"] == 4
    assert not any(span["is_error"] for span in spans)
    # One machine, one clock: what is done for another span is done while that lasts.
    for inner, outer in (("schedule", "attempt"), ("place", "schedule"), ("compute", "prefill"), ("attempt", ROOT)):
        assert by_name[outer]["start_ns"] <= by_name[inner]["start_ns"] + 1e6
        assert by_name[inner]["end_ns"] <= by_name[outer]["end_ns"] + 1e6


async def test_reused_kv_shows_as_the_messengers_reads(
    cluster: Any, session: aiohttp.ClientSession, otlp_receiver: Any
) -> None:
    ids = prompt(2, 400)
    first = (await ask(cluster, session, secrets.token_hex(16), ids))[1]["moonpool"]["decode_node"]
    async with asyncio.timeout(100):
        for seed in range(3, 100):  # until the other decode node, which has nothing of it, gets the same prompt
            trace = secrets.token_hex(16)
            asking = [ask(cluster, session, secrets.token_hex(16), prompt(100 * seed + n, 50)) for n in range(3)]
            at = seed % 4  # placed after so many others
            asking.insert(at, ask(cluster, session, trace, [*ids, *prompt(seed, 10)]))
            if (await asyncio.gather(*asking))[at][1]["moonpool"]["decode_node"] != first:
                break
    spans = await spans_of(otlp_receiver, trace, ROOT, "messenger pull")
    pull = next(span for span in spans if span["name"] == "messenger pull")
    assert pull["about"]["moonpool.blocks"] >= 40
    assert {("messenger pull", "receive", "decode-node")} <= tree(spans)


async def test_a_rejected_request_says_who_rejected_it_and_why(
    cluster: Any, session: aiohttp.ClientSession, otlp_receiver: Any
) -> None:
    trace = secrets.token_hex(16)
    status, body, _ = await ask(cluster, session, trace, prompt(4, 50), headers={"x-slo-ttft-ms": "0.001"})
    assert status == 429, body
    spans = await spans_of(otlp_receiver, trace, ROOT, "place")
    assert {span["name"] for span in spans} == {ROOT, "tokenize", "attempt", "schedule", "place"}
    by_name = {span["name"]: span for span in spans}
    assert by_name["place"]["about"]["moonpool.rejected"] == "ttft"
    assert by_name[ROOT]["about"]["http.response.status_code"] == 429
    assert by_name["attempt"]["is_error"]
    assert not by_name[ROOT]["is_error"]  # as conventions have it: the client may ask again


@pytest.mark.long
async def test_a_request_that_moves_stays_in_its_trace(
    cluster: Any, session: aiohttp.ClientSession, otlp_receiver: Any
) -> None:
    trace = secrets.token_hex(16)
    asking = asyncio.create_task(ask(cluster, session, trace, prompt(5, 60), max_tokens=1500))
    placed = next(
        span for span in await spans_of(otlp_receiver, trace, "place", is_whole=False) if span["name"] == "place"
    )
    await spans_of(otlp_receiver, trace, "commit", is_whole=False)  # it decodes
    victim = placed["about"]["moonpool.decode_node"]
    old = cluster.kill(victim)
    status, answer, _ = await asking
    assert (status, answer["moonpool"]["attempts"]) == (200, 2)
    wanted = [ROOT, *(["attempt", "schedule", "place", "prefill"] * 2), "generate"]
    spans = await spans_of(otlp_receiver, trace, *wanted, is_whole=False)  # the victim took its own along
    attempts = sorted((s for s in spans if s["name"] == "attempt"), key=lambda s: int(s["about"]["moonpool.number"]))
    assert [attempt["is_error"] for attempt in attempts] == [True, False]
    assert victim in attempts[0]["status"]
    assert attempts[1]["about"]["moonpool.decode_node"] != victim
    prefills = [span for span in spans if span["name"] == "prefill"]
    assert {span["parent"] for span in prefills} == {attempt["id"] for attempt in attempts}
    root = next(span for span in spans if span["name"] == ROOT)
    assert root["about"]["moonpool.attempts"] == 2
    await cluster.wait_restarted(victim, old)


async def test_an_unsampled_request_leaves_no_span(
    cluster: Any, session: aiohttp.ClientSession, otlp_receiver: Any
) -> None:
    unsampled, after = secrets.token_hex(16), secrets.token_hex(16)
    status, _, headers = await ask(cluster, session, unsampled, prompt(6, 50), sampled=False)
    assert status == 200
    assert "traceparent" not in headers
    await ask(cluster, session, after, prompt(7, 50))
    await spans_of(otlp_receiver, after, ROOT, "generate", "place")
    assert otlp_receiver.trace(unsampled) == []


async def test_a_silent_collector_holds_nobody_up_and_losses_are_counted(
    cluster: Any, session: aiohttp.ClientSession, otlp_receiver: Any
) -> None:
    async def counted(result: str) -> float:
        async with session.get(f"{cluster.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        found = [line for line in lines if line.startswith("moonpool:trace_spans_total{") and result in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    assert await counted("exported") > 0
    otlp_receiver.is_silent.set()
    with contextlib.ExitStack() as stack:
        stack.callback(otlp_receiver.is_silent.clear)
        for seed in range(8, 12):
            assert (await ask(cluster, session, secrets.token_hex(16), prompt(seed, 50)))[0] == 200
    await cluster.validate()
