"""Objectives of a live cluster with two conductors and two tenants: changed by command, held to over HTTP, counted."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from typer.testing import CliRunner

from moonpool.commands.slo import app

KEYS = ("key-of-acme", "key-of-globex")
FIRST = """
classes:
  chat: {ttft: 30s}
  batch: {ttft: off, priority: 10}
default_class: chat
"""
VERSION = "moonpool:slo_version 4.0"


class Slo:
    """`moonpool slo …`, as typed for one cluster."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder

    async def run(self, *arguments: str, stdin: str = "", expect: int = 0) -> str:
        where = [] if arguments[0] == "tenant" else ["--ready-file", str(self._cluster.ready_file)]
        done = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *where], stdin)
        assert done.exit_code == expect, done.output
        return str(done.output)

    async def version(self) -> int:
        """0: the conductor does not answer."""
        where = ["show", "--json", "--ready-file", str(self._cluster.ready_file)]
        done = await asyncio.to_thread(CliRunner().invoke, app, where)
        return int(json.loads(done.output)["version"]) if done.exit_code == 0 else 0

    async def set(self, text: str, *, command: str = "set", expect: int = 0) -> str:
        path = self._folder / "slo.yaml"
        path.write_text(text)
        reason = ["--reason", "a test"] if command == "set" else []
        return await self.run(command, str(path), *reason, expect=expect)


@pytest.fixture(scope="module")
def cluster(start_paced: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("slo") / "first.yaml"
    path.write_text(FIRST)
    keys = [word for key in KEYS for word in ("--api-key", key)]
    with start_paced("--conductors", "2", "--slo-file", str(path), *keys) as cluster:
        yield cluster


async def complete(
    session: aiohttp.ClientSession, cluster: Any, *, key: str = KEYS[0], **extra: Any
) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}", **extra.pop("headers", {})}
    prompt = np.random.default_rng(len(str(extra))).integers(5, 2000, 40).tolist()
    body = {"model": cluster.ready["model"], "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **extra}
    async with session.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_objectives_are_changed_held_to_and_counted(
    cluster: Any, session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    slo = Slo(cluster, tmp_path)
    assert "version 1" in await slo.run("show")
    status, told = await complete(session, cluster, slo_class="gold")
    assert (status, told["error"]["code"], told["error"]["param"]) == (400, "unknown_class", "slo_class")
    assert "batch, chat" in told["error"]["message"]
    for fields in ({}, {"slo_class": "batch", "priority": 3}, {"headers": {"x-slo-class": "chat"}}):
        assert (await complete(session, cluster, **fields))[0] == 200

    acme = (await slo.run("tenant", stdin=KEYS[0])).strip()
    tight = f"{FIRST}tenants:\n  {json.dumps(acme)}: {{ttft: 0.01ms}}\n"
    assert "warning: tenants" in await slo.set(tight, command="check", expect=1)
    said = await slo.set(tight)
    assert f"tenants.{acme}.ttft: not there -> 0.00001s" in said
    assert re.search(r"acknowledged by conductor, conductor-1$", said, re.MULTILINE)
    status, told = await complete(session, cluster)
    assert (status, told["error"]["code"]) == (429, "ttft")
    looser = {"x-slo-ttft-ms": "30000"}
    assert (await complete(session, cluster, headers=looser))[0] == 429, "clients may only tighten"
    await slo.set(tight.replace("0.01ms", "0.01ms, headers: any"))
    assert (await complete(session, cluster, headers=looser))[0] == 200
    assert (await complete(session, cluster, key=KEYS[1]))[0] == 200
    said = await slo.set(f"{FIRST}tenants: {{'0123456789abcdef': {{ttft: 1s}}}}\n", expect=2)
    assert "belongs to no API key of frontend" in said

    os.kill(cluster.ready["nodes"]["conductor"]["pid"], signal.SIGKILL)
    async with asyncio.timeout(60):
        while await slo.version() != 3:
            await asyncio.sleep(0.2)
    await slo.run("rollback", "1", "--reason", "too tight")
    async with asyncio.timeout(60):
        while (await complete(session, cluster))[0] != 200:
            await asyncio.sleep(0.2)
    history = json.loads(await slo.run("history", "--json"))
    assert [each["how"] for each in history] == ["rollback to 1", "admin", "admin", "configuration"]

    wanted = r'moonpool:slo_requests_total\{[^}]*objective="ttft",result="met",slo_class="chat"\} [1-9]'
    async with asyncio.timeout(60):
        # The killed conductor counts anew, and the frontend comes back to it in its own time.
        while not (re.search(wanted, metrics := await scraped(session, cluster)) and VERSION in metrics):
            assert (await complete(session, cluster))[0] == 200


async def scraped(session: aiohttp.ClientSession, cluster: Any) -> str:
    async with session.get(f"{cluster.url}/metrics") as response:
        return await response.text()
