"""A real cluster of real processes for end-to-end tests, and the judge of its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import ForwardBatch, Model, PagedCache, SamplingRow, SequenceChunk, load_model, noisy_scores
from engine.config import read_config
from engine.random_model import write_random_model
from moonpool.cluster_view.collector import validate_cluster
from moonpool.cluster_view.locate import locate
from tests import served_models
from worker.paced.profiles import profile_of
from worker.paced.tokens import Draw, PacedTokens
from worker.policy.cost_profile import save_profile

TOKENIZER = Path(__file__).parents[2] / "moonpool" / "data" / "model"
TOLERANCE = 1e-3
Steer = Callable[[NDArray[np.float32], list[int]], NDArray[np.float32]]
START_S = 240.0  # with Ray, on cores that others use too
REST_S = 60.0


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
        """Wait until the supervisor has brought the process back and the cluster can serve."""
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
        located = locate(conductor="", url="", ready_file=self.ready_file)
        give_up = time.monotonic() + REST_S
        while held := [answer for answer in await validate_cluster(located) if not answer.ok]:
            assert time.monotonic() < give_up, f"{held}\n{self.log.read_text()}"
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def running_cluster(tmp: Path, model: Path, *flags: str) -> Iterator[Cluster]:
    """`moonpool serve` on a free port, ended on exit; without a standby frontend, which would only take time here."""
    tmp.mkdir(parents=True, exist_ok=True)
    ready_file, log = tmp / "ready.json", tmp / "serve.log"
    command = [sys.executable, "-m", "moonpool", "serve", str(model), "--port", "0", "--ready-file", str(ready_file)]
    command += ["--frontends", "1"]
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


async def metric(session: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a metric over all its labels."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), served_models.PLAIN, tokenizer=TOKENIZER)


@pytest.fixture(scope="session")
def two_group_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with small KV in floats."""
    return write_random_model(tmp_path_factory.mktemp("model2"), served_models.TWO_GROUPS, tokenizer=TOKENIZER)


@pytest.fixture(scope="session")
def small_kv_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with KV, weights and activations in int8, whose answers depend neither on chunks nor on reuse."""
    return write_random_model(tmp_path_factory.mktemp("model4"), served_models.SMALL_KV, tokenizer=TOKENIZER)


@pytest.fixture(scope="session")
def windows_only_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with windows in all layers."""
    return write_random_model(tmp_path_factory.mktemp("model3"), served_models.WINDOWS_ONLY, tokenizer=TOKENIZER)


@pytest.fixture(scope="session")
def weightless() -> Callable[[Path, Path], Path]:
    """A model's folder without its weights, as paced engines need it, with the profile "slow.json" to pace them."""

    def make(model: Path, folder: Path) -> Path:
        for file in model.iterdir():
            if file.suffix != ".safetensors":
                shutil.copyfile(file, folder / file.name)
        instant = profile_of("instant")
        slow = replace(instant, name="slow", decode=replace(instant.decode, fixed_s=0.004, per_sequence_s=0.0005))
        save_profile(slow, folder / "slow.json")
        return folder

    return make


@pytest.fixture(scope="session")
def paced_model(
    random_model: Path, weightless: Callable[[Path, Path], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """For what processes do, whatever they compute: `start_paced` starts them in half of the time, without torch."""
    return weightless(random_model, tmp_path_factory.mktemp("paced"))


@pytest.fixture(scope="session")
def start_paced(start_cluster: Callable[..., Any], paced_model: Path) -> Callable[..., Any]:
    """As `start_cluster`: workers with paced engines, whose KV and tokens are known, and judged by `judge_of`."""

    def start(*flags: str, model: Path = paced_model) -> Any:
        return start_cluster(model, "--engine", "paced", "--paced-profile", str(model / "slow.json"), *flags)

    return start


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

    def _logits(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the logits of every position, from the dense reference; of a model in int8, whose roundings a last bit
        of a float could turn, from the kernels that serve it, in one step."""
        model = self._model
        if not model.config.kv_scale_group:
            return model.score(ids)
        blocks = np.arange(-(-len(ids) // 16), dtype=np.int32)
        cache = PagedCache(model.kv_groups, [len(blocks)] * len(model.kv_groups), 16, device=model.device)
        chunk = SequenceChunk(ids, 0, (blocks,) * len(model.kv_groups), want_logits=True, every=True)
        found: NDArray[np.float32] = model.forward(ForwardBatch([chunk]), cache).cpu().numpy()
        return found

    def logprobs(self, ids: Sequence[int]) -> list[list[float]]:
        """Row i: of every token that could follow ids[: i + 1]."""
        logits = self._logits(np.array(ids, dtype=np.int32)).astype(np.float64)
        shifted = logits - logits.max(axis=1, keepdims=True)
        found: list[list[float]] = (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))).tolist()
        return found

    def wrong_tokens(self, answer: Answer, steer: Steer | None = None, **sampling: Any) -> list[int]:
        """Indices of tokens that lie more than the tolerance below the best.

        `steer(logits, answer so far)` does to a row of logits what the request asked for.
        """
        ids = np.array([*answer.prompt_ids, *answer.token_ids], dtype=np.int32)
        logits = self._logits(ids)
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


class PacedJudge:
    """The tokens of paced engines follow from the ids before them; KV that is not what its ids give changes them."""

    def __init__(self, model: Path) -> None:
        self._tokens = PacedTokens.of(model, read_config(model), 0)

    def wrong_tokens(self, answer: Answer, *, temperature: float = 0.0, seed: int = 0) -> list[int]:
        """Indices of tokens that are not the ones."""
        prompt, count = np.array(answer.prompt_ids, np.int32), len(answer.token_ids)
        right = self._tokens.answer(prompt, Draw(seed, temperature, 0), count)
        return [index for index, token in enumerate(answer.token_ids) if token != right[index]]


@pytest.fixture(scope="session")
def judge_of() -> Callable[[Path], Judge | PacedJudge]:
    judges: dict[Path, Judge | PacedJudge] = {}

    def judge(model: Path) -> Judge | PacedJudge:
        if model not in judges:
            is_real = any(model.glob("*.safetensors"))
            judges[model] = Judge(load_model(model, threads=1)) if is_real else PacedJudge(model)
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
    """Check that a command ended with exit code 2 and one clear message that holds the words."""

    def check(done: subprocess.CompletedProcess[str], *words: str) -> None:
        shown = done.stdout + done.stderr
        assert done.returncode == 2, shown
        assert "Traceback" not in shown
        for word in words:
            assert word in shown

    return check
