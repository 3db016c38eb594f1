"""A cluster of roles started one by one, as Kubernetes would, and a load that notices all that goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from moonpool.cluster_view.collector import ValidationResult, validate_cluster
from moonpool.cluster_view.locate import Located
from moonpool.supervision.child import READY_PREFIX

START_S = 240.0
END_S = 90.0  # what is promised is far below, on a machine that has nothing else to do


class Role:
    """One process of a role, and its successors under the same name and address."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.target = ""  # once it is ready
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def start(self, python_path: str = "", before: str = "") -> None:
        """`python_path`: folders that go before all others, such as another version's; `before`: what to run first."""
        paths = [python_path, os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        program = ["-c", f"{before}; from moonpool.cli import main; main()"] if before else ["-m", "moonpool"]
        command = [sys.executable, *program, *self.arguments]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)

    def wait_ready(self) -> None:
        process = self._running
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(READY_PREFIX):
                self.target = json.loads(line.removeprefix(READY_PREFIX))["target"]
                return
        raise AssertionError(f"{self.name} ended: {self.log}")

    def signal(self, number: signal.Signals) -> None:
        self._running.send_signal(number)

    def wait_ended(self) -> int:
        """Its exit status."""
        process = self._running
        try:
            status = process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end: {self.log}") from None
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
        return status

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.wait_ended()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def _running(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process


class Roles:
    """Two of each role but the pool node, in this order: conductors, pool node, workers, frontends."""

    def __init__(self, folder: Path, model: Path, *worker_flags: str) -> None:
        sockets = {name: f"unix:{folder}/{name}.sock" for name in ("c0", "c1", "pool", "p0", "p1", "d0", "d1")}
        join = ["--conductor", sockets["c0"], sockets["c1"]]
        worker = [*join, "--pool", sockets["pool"], "--model", str(model), *worker_flags]
        arguments = {
            "c0": ["conductor"],
            "c1": ["conductor"],
            "pool": ["pool-node", *join, "--pool-bytes", "64MiB"],
            **{name: ["prefill-node", *worker] for name in ("p0", "p1")},
            **{name: ["decode-node", *worker] for name in ("d0", "d1")},
            **{
                name: ["frontend", *join, "--model", str(model), "--block-tokens", "8", "--drain-grace", "60"]
                for name in ("f0", "f1")
            },
        }
        self.folder = folder
        self.conductors = [sockets["c0"], sockets["c1"]]
        self._all: dict[str, Role] = {}
        for name, words in arguments.items():
            listen = ["--listen", sockets[name]] if name in sockets else ["--port", "0"]
            own = [*words, *listen, "--node-id", name, "--socket-dir", str(folder / "s")]
            self._all[name] = Role(name, own, folder / f"{name}.log")

    def __iter__(self) -> Iterator[Role]:
        return iter(self._all.values())

    def __getitem__(self, name: str) -> Role:
        return self._all[name]

    def start(self, python_path: str = "") -> None:
        """All at once."""
        for role in self:
            role.start(python_path)
        for role in self:
            role.wait_ready()
        for role in (self["f0"], self["f1"]):  # its successors are to be found where it was
            port = role.target.rpartition(":")[2]
            role.arguments[role.arguments.index("--port") + 1] = port

    @property
    def urls(self) -> list[str]:
        return [self["f0"].target, self["f1"].target]

    async def until_ready(self) -> None:
        """Both frontends find the cluster able to serve."""
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            for url in self.urls:
                while True:
                    with contextlib.suppress(aiohttp.ClientError):
                        async with session.get(f"{url}/ready") as response:
                            if response.status == 200:
                                break
                    await asyncio.sleep(0.1)

    async def at_rest(self) -> None:
        """Returns once no process holds anything; fails with what is held."""
        deadline_s = time.monotonic() + 60
        while held := [answer for answer in await self._validate() if not answer.ok]:
            assert time.monotonic() < deadline_s, held
            await asyncio.sleep(0.2)

    async def _validate(self) -> list[ValidationResult]:
        found = []
        for conductor in self.conductors:
            found += await validate_cluster(Located(conductor, tuple(self.urls), None))
        return found

    def close(self) -> None:
        for role in self:
            role.kill()


class Load:
    """Dialogues over several frontends, by a client that tries the next one where a door is closed or closing.

    Anything else that goes wrong is in `errors`; `answers` are prompts with all tokens that came.
    """

    def __init__(self, urls: Sequence[str], *, max_tokens: int, **sampling: Any) -> None:
        self.answers: list[tuple[list[int], list[int]]] = []
        self.errors: list[str] = []
        self.num_tokens = 0
        self._urls = list(urls)
        self._body = {"stream": True, "return_token_ids": True, "ignore_eos": True, "max_tokens": max_tokens}
        self._body |= sampling
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self, session: aiohttp.ClientSession, num_dialogues: int, *, once: bool = False) -> None:
        """`once`: each asks one request, instead of going on until `end`."""
        self._stopping = once
        self._tasks = [asyncio.create_task(self._lead(session, number)) for number in range(num_dialogues)]

    async def end(self) -> None:
        """Every request that has begun ends."""
        self._stopping = True
        async with asyncio.timeout(END_S):
            await asyncio.gather(*self._tasks)

    async def more(self, num_tokens: int = 1) -> None:
        """Wait until so many further tokens have come."""
        async with asyncio.timeout(END_S):
            goal = self.num_tokens + num_tokens
            while self.num_tokens < goal and not self.errors:
                await asyncio.sleep(0.02)

    async def _lead(self, session: aiohttp.ClientSession, number: int) -> None:
        rng = np.random.default_rng(number)
        said: list[int] = []
        while True:
            said = said if len(said) < 600 else []
            prompt = [*said, *rng.integers(5, 2000, 60).tolist()]
            try:
                tokens = await self._ask(session, prompt, number)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error}")
                return
            self.answers.append((prompt, tokens))
            said = [*prompt, *tokens]
            if self._stopping:
                return

    async def _ask(self, session: aiohttp.ClientSession, prompt: list[int], number: int) -> list[int]:
        for turn in range(600):
            url = self._urls[(number + turn) % len(self._urls)]
            try:
                response = await session.post(f"{url}/v1/completions", json={**self._body, "prompt": prompt})
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionResetError):
                await asyncio.sleep(0.1)  # this door is closed
                continue
            async with response:
                if response.status == 503 and (await response.json())["error"]["code"] == "draining":
                    await asyncio.sleep(0.1)
                    continue
                assert response.status == 200, await response.text()
                return await self._read(response)
        raise AssertionError("no frontend takes the request")

    async def _read(self, response: aiohttp.ClientResponse) -> list[int]:
        tokens: list[int] = []
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            news = [token for choice in event["choices"] for token in choice.get("token_ids") or []]
            tokens += news
            self.num_tokens += len(news)
        assert len(tokens) == self._body["max_tokens"], f"{len(tokens)} tokens"
        return tokens
