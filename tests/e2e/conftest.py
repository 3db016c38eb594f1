"""A real cluster of real processes for end-to-end tests, and the judge of its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import Model, SamplingRow, load_model, noisy_scores
from engine.random_model import write_random_model

TOKENIZER = Path(__file__).parents[2] / "moonpool" / "data" / "model"
TOLERANCE = 1e-3
Steer = Callable[[NDArray[np.float32], list[int]], NDArray[np.float32]]
START_S = 240.0  # with Ray, on cores that others use too


@dataclass
class Answer:
    """One completion, however it was asked for."""

    token_ids: list[int]
    prompt_ids: list[int]
    cached_tokens: int
    finish_reason: str
    moonpool: dict[str, Any]
    body: dict[str, Any]


@dataclass
class Cluster:
    """A running `moonpool serve`."""

    process: subprocess.Popen[bytes]
    ready_file: Path
    model: Path
    log: Path
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def reload(self) -> None:
        self.ready = json.loads(self.ready_file.read_text())

    def pid(self, node_id: str) -> int | None:
        """The process of a node; None while it is being restarted."""
        self.reload()
        pid: int | None = self.ready["nodes"][node_id]["pid"]
        return pid

    def kill(self, node_id: str) -> int:
        pid = self.pid(node_id)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    async def wait_restarted(self, node_id: str, old_pid: int) -> None:
        """Until the supervisor has brought the process back and the cluster can serve."""
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, ValueError, KeyError):
                    if self.pid(node_id) not in (None, old_pid) and self.ready["nodes"][node_id]["ready"]:
                        async with session.get(f"{self.url}/ready") as response:
                            if response.status == 200:
                                return
                await asyncio.sleep(0.1)

    async def complete(self, session: aiohttp.ClientSession, prompt: Sequence[int], **options: Any) -> Answer:
        """A completion of a token-id prompt, not streamed. Raises on any status but 200."""
        body = {"model": self.ready["model"], "prompt": list(prompt), "return_token_ids": True, **options}
        async with session.post(f"{self.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        choice = answer["choices"][0]
        return Answer(
            token_ids=choice["token_ids"],
            prompt_ids=list(prompt),
            cached_tokens=answer["usage"]["prompt_tokens_details"]["cached_tokens"],
            finish_reason=choice["finish_reason"],
            moonpool=answer["moonpool"],
            body=answer,
        )

    async def validate(self) -> None:
        """Every role's self-check: at rest, soon after the last token, nothing is held anywhere."""
        command = [sys.executable, "-m", "moonpool", "validate", "--ready-file", str(self.ready_file), "--json"]
        done = await asyncio.to_thread(
            subprocess.run, [*command, "--wait", "20"], capture_output=True, check=False, timeout=100
        )
        assert done.returncode == 0, done.stdout.decode() + done.stderr.decode() + self.log.read_text()


@contextlib.contextmanager
def running_cluster(tmp: Path, model: Path, *flags: str) -> Iterator[Cluster]:
    """`moonpool serve` on a free port, ended on exit."""
    tmp.mkdir(parents=True, exist_ok=True)
    ready_file, log = tmp / "ready.json", tmp / "serve.log"
    command = [sys.executable, "-m", "moonpool", "serve", str(model), "--port", "0", "--ready-file", str(ready_file)]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *flags], stdout=output, stderr=subprocess.STDOUT)
    cluster = Cluster(process, ready_file, model, log)
    try:
        deadline = time.monotonic() + START_S
        while not ready_file.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)  # polling for a file, bounded by the deadline above
        cluster.reload()
        yield cluster
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of enlarged scale: clear margins, so that any wrong KV shows in the tokens."""
    return write_random_model(
        tmp_path_factory.mktemp("model"),
        layers=3,
        hidden=64,
        heads=4,
        kv_heads=2,
        vocab=2048,
        max_len=2048,
        scale=3.0,
        seed=7,
        tokenizer=TOKENIZER,
    )


@pytest.fixture(scope="session")
def two_group_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last layers see a sliding window: two KV groups."""
    return write_random_model(
        tmp_path_factory.mktemp("model2"),
        family="qwen2",
        layers=4,
        hidden=64,
        heads=4,
        kv_heads=2,
        vocab=2048,
        max_len=2048,
        window=48,
        full_layers=2,
        scale=3.0,
        seed=8,
        tokenizer=TOKENIZER,
    )


@pytest.fixture(scope="session")
def start_cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., contextlib.AbstractContextManager[Cluster]]:
    def start(model: Path, *flags: str) -> contextlib.AbstractContextManager[Cluster]:
        return running_cluster(tmp_path_factory.mktemp("cluster"), model, *flags)

    return start


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        yield client


class Judge:
    """Teacher forcing in one process without a cluster: is every token what the model would have said?"""

    def __init__(self, model: Model) -> None:
        self._model = model

    def logprobs(self, ids: Sequence[int]) -> list[list[float]]:
        """Row i: of every token that could follow ids[: i + 1]."""
        logits = self._model.score(np.array(ids, dtype=np.int32)).astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        found: list[list[float]] = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).tolist()
        return found

    def wrong_tokens(self, answer: Answer, steer: Steer | None = None, **sampling: Any) -> list[int]:
        """Indices of tokens that lie more than the tolerance below the best.

        `steer(logits, answer so far)` does to a row of logits what the request asked for.
        """
        ids = np.array([*answer.prompt_ids, *answer.token_ids], dtype=np.int32)
        logits = self._model.score(ids)
        wrong = []
        for index, token in enumerate(answer.token_ids):
            row = SamplingRow(
                temperature=sampling.get("temperature", 0.0),
                top_p=sampling.get("top_p", 1.0),
                top_k=sampling.get("top_k", 0),
                seed=sampling.get("seed", 0),
                choice=0,
                index=index,
                min_p=sampling.get("min_p", 0.0),
            )
            at = logits[len(answer.prompt_ids) - 1 + index]
            at = at if steer is None else steer(at, answer.token_ids[:index])
            # At the border of top-k and top-p, too, the tolerance is in the token's favour.
            mine = noisy_scores(at, row, slack=TOLERANCE)[token]
            if not mine >= noisy_scores(at, row, slack=-TOLERANCE).max() - TOLERANCE:
                wrong.append(index)
        return wrong


@pytest.fixture(scope="session")
def judge_of() -> Callable[[Path], Judge]:
    judges: dict[Path, Judge] = {}

    def judge(model: Path) -> Judge:
        if model not in judges:
            judges[model] = Judge(load_model(model, threads=1))
        return judges[model]

    return judge


@pytest.fixture(scope="session")
def moonpool() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`moonpool("serve", "--port", 80, MOONPOOL_X="y")`: the command's end, without this environment's own settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}

    def run(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "moonpool", *map(str, arguments)]
        environment = {**kept, "COLUMNS": "200", **variables}
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)

    return run


@pytest.fixture(scope="session")
def assert_refused() -> Callable[..., None]:
    """Of a command's end: exit code 2 and one clear message, which holds the words."""

    def check(done: subprocess.CompletedProcess[str], *words: str) -> None:
        shown = done.stdout + done.stderr
        assert done.returncode == 2, shown
        assert "Traceback" not in shown
        for word in words:
            assert word in shown

    return check
