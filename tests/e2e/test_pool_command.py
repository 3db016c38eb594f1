"""`moonpool pool` against a live cluster with an SSD: numbers, single blocks, damage found, and emptying."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from typer.testing import CliRunner

from kvpool import PoolClient
from moonpool.commands.pool import app

NUM_PROMPTS = 5
# Each worker's pages hold two prompts: the first is gone there when it is asked for again.
FLAGS = ["--block-tokens", "16", "--capacity-tokens", "320", "--pool-bytes", "4MiB", "--pool-ssd-bytes", "16MiB"]


def prompt(number: int) -> list[int]:
    return np.random.default_rng(number).integers(5, 2000, 131).tolist()


class Pool:
    """`moonpool pool …` for one cluster."""

    def __init__(self, cluster: Any) -> None:
        self._ready_file = str(cluster.ready_file)
        self.target = cluster.ready["nodes"]["pool-0"]["target"]

    async def run(self, *arguments: str, expect: int = 0) -> str:
        """Return the output of both streams."""
        called = [*arguments, "--ready-file", self._ready_file]
        done = await asyncio.to_thread(CliRunner().invoke, app, called)
        assert done.exit_code == expect, done.output
        return str(done.output)

    async def json(self, *arguments: str, expect: int = 0) -> Any:
        return json.loads(await self.run(*arguments, "--json", expect=expect))

    async def any_key_on_ssd(self) -> tuple[str, int]:
        """(key, offset on SSD) of a block."""
        client = PoolClient(self.target, owner="test", owner_incarnation=1)
        try:
            found = [facts for facts in await client.inspect(b"") if "ssd" in facts["tiers"]]
        finally:
            await client.close()
        return found[0]["key"], found[0]["tiers"]["ssd"]["offsets"][0]


def flip(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def answered_on_a_terminal(cluster: Any, answer: str) -> tuple[int, str]:
    """`pool flush` where a person is asked, and says `answer`: exit status and what was printed."""
    command = [sys.executable, "-m", "moonpool", "pool", "flush", "--ready-file", str(cluster.ready_file)]
    ours, theirs = pty.openpty()
    try:
        os.write(ours, f"{answer}\n".encode())
        done = subprocess.run(
            command, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=120
        )
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, done.stdout.decode()


async def test_the_pool_of_a_live_cluster_is_shown_verified_and_emptied(
    start_paced: Callable[..., AbstractContextManager[Any]],
    session: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    with start_paced(*FLAGS, "--pool-ssd-dir", str(tmp_path)) as cluster:
        pool = Pool(cluster)
        for number in range(NUM_PROMPTS):
            await cluster.complete(session, prompt(number), max_tokens=2, temperature=0.0)
        await cluster.validate()

        flushed = await pool.json("flush", "--dram-only", "--yes")
        assert flushed["pool-0"]["removed"] >= 8 * NUM_PROMPTS
        again = await cluster.complete(session, prompt(0), max_tokens=2, temperature=0.0)
        assert again.moonpool["cached_ssd_tokens"] >= 112
        await cluster.validate()

        async with asyncio.timeout(30):  # workers report once a second
            while not (seen := await pool.json("status"))["reused_tokens"]["ssd"]:
                await asyncio.sleep(0.1)
        (node,) = seen["nodes"]
        assert (node["state"], node["directory"], node["ssd_state"], node["problem"]) == ("ready", "EXACT", "ok", "")
        dram, ssd = node["tiers"]["dram"], node["tiers"]["ssd"]
        assert (dram["capacity_bytes"], ssd["capacity_bytes"]) == (4 << 20, 16 << 20)
        assert dram["evicted_blocks"] == {"flushed": flushed["pool-0"]["removed"]}
        found = dram["hit_blocks"] + ssd["hit_blocks"]
        assert ssd["hit_blocks"] >= 7
        assert ssd["saved_s"] > 0
        assert node["asked_blocks"] == found + node["waiting_blocks"] + node["missed_blocks"]
        assert node["hit_rate"] == pytest.approx(found / node["asked_blocks"])
        assert sum(node["namespaces"].values()) >= 8 * NUM_PROMPTS
        assert seen["prompt_tokens"] >= 131 * (NUM_PROMPTS + 1)
        picture = await pool.run("status")
        assert all(word in picture for word in ("pool-0", "EXACT", "SSD ok in", "Prompt tokens"))

        key, offset = await pool.any_key_on_ssd()
        (block,) = await pool.json("inspect", key)
        assert (block["node_id"], block["key"], block["tiers"]["ssd"]["right"]) == ("pool-0", key, True)
        assert key in await pool.run("inspect", key[:9].upper())
        assert "No pool node has" in await pool.run("inspect", "0" * 32, expect=1)

        whole = await pool.json("verify")
        assert whole["pool-0"]["checked"] == whole["pool-0"]["total"] > 0
        flip(tmp_path / "pool-0" / "segment-00000", offset)
        damaged = await pool.run("verify", "--node", "pool-0", expect=1)
        assert "1 damaged blocks were removed" in damaged
        assert "all are intact" in await pool.run("verify")
        assert (await pool.json("status"))["nodes"][0]["corrupt_blocks"] == 1
        await pool.run("inspect", key, expect=1)

        assert "give --yes" in await pool.run("flush", expect=2)
        status, said = await asyncio.to_thread(answered_on_a_terminal, cluster, "n")
        assert (status, "Nothing was removed." in said) == (1, True)
        emptied = await pool.run("flush", "--yes")
        assert "0 kept (in use)" in emptied
        (node,) = (await pool.json("status"))["nodes"]
        assert [tier["blocks"] for tier in node["tiers"].values()] == [0, 0]
        await cluster.validate()

        assert "KEY must be the first 4 to 32 hex digits" in await pool.run("inspect", "pool", expect=2)
        assert "must be one of pool-0" in await pool.run("verify", "--node", "pool-7", expect=2)
    assert "no cluster" in await pool.run("status", expect=1)
