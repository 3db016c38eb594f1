"""A model folder made on the spot, a frontend, and the scripted cluster behind it."""

import asyncio
import io
import json
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from frontend import FrontendConfig, ServedModelConfig, serve_frontend
from frontend.tokenizer import Tokenizer
from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2
from settings.keys import assemble, replaced
from telemetry import logs
from tests.frontend.agent_models import AgentModel, make_model
from tests.frontend.scripted import WAIT_S, ScriptedCluster, logprob_of, within

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{{ suffix or '' }}"
)
TEXT = [
    "the quick brown fox jumps over the lazy dog and the cat sat on the mat",
    "naïve café résumé",
    "你好世界",
    "🎉😀",
]
MAX_MODEL_LEN = 512
BLOCK_TOKENS = 4


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level BPE tokenizer and a chat template; no weights."""
    path = tmp_path_factory.mktemp("tiny")
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator(TEXT, trainer)
    fast.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    fast.save(str(path / "tokenizer.json"))
    write(path / "config.json", {"vocab_size": 340, "max_position_embeddings": 4096, "eos_token_id": 1})
    write(path / "generation_config.json", {"eos_token_id": [1, 3]})
    settings = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}, "chat_template": TEMPLATE}
    write(path / "tokenizer_config.json", settings)
    return path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Short: a unix socket's path has at most 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="mp-fe-"))
    yield path
    shutil.rmtree(path)


def describe(node: conductor_pb2.Node) -> None:
    """Return the description of every worker."""
    node.incarnation, node.model, node.spec.block_tokens = 1, "tiny", BLOCK_TOKENS


@pytest.fixture
async def cluster(run_dir: Path) -> AsyncIterator[ScriptedCluster]:
    scripted = ScriptedCluster(run_dir)
    for node_id in ("p0", "d0"):
        await scripted.add(node_id)
    node = conductor_pb2.Node(node_id="p0", role=common_pb2.ROLE_PREFILL, max_model_len=1024, capacity_tokens=1000)
    describe(node)
    report = conductor_pb2.NodeReport(num_running=1, free_tokens=250, counters={"kv_push_bytes": 7.0})
    scripted.conductor.cluster.nodes.add(node=node, report=report)
    node = conductor_pb2.Node(node_id="d0", role=common_pb2.ROLE_DECODE, max_model_len=MAX_MODEL_LEN)
    describe(node)
    scripted.conductor.cluster.nodes.add(node=node)
    await scripted.start_conductor()
    yield scripted
    await scripted.stop()


class Front:
    """A running frontend and an HTTP client for it."""

    def __init__(
        self, url: str, http: aiohttp.ClientSession, stop: asyncio.Event, task: asyncio.Task[None], rests: list[None]
    ) -> None:
        self.rests = rests  # one for each time that the last request had ended
        self.url = url
        self.http = http
        self.stop = stop
        self.task = task

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, **kwargs) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, path: str) -> tuple[int, str]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.text()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All events of a stream, decoded; the closing [DONE] is checked and left out."""
        async with self.http.post(self.url + path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = (await response.read()).decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def open_stream(self, path: str, body: dict[str, Any]) -> "asyncio.Task[aiohttp.ClientResponse]":
        """Done once the stream's headers are here, which is with its first token."""
        return asyncio.create_task(self.http.post(self.url + path, json=body | {"stream": True}))

    async def events_of(self, stream: aiohttp.ClientResponse, count: int) -> bytes:
        """The stream's next bytes, up to `count` events at least."""
        seen = b""
        async with asyncio.timeout(WAIT_S):
            while seen.count(b"data: ") < count and not stream.content.at_eof():
                seen += await stream.content.readany()
        return seen

    async def has_counted(self, metric: str, count: int) -> None:
        """Once a metric has reached `count`, whichever streams brought what it counts."""

        def value(answer: tuple[int, str]) -> float:
            lines = [line for line in answer[1].splitlines() if line.startswith(metric)]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

        await until(lambda: self.get("/metrics"), lambda answer: value(answer) >= count)

    async def has_generated(self, count: int) -> None:
        """Once the frontend has taken this many tokens."""
        await self.has_counted("vllm:generation_tokens_total", count)

    async def readiness(self, status: int) -> tuple[int, str]:
        """Return the reply of /ready once it has this status."""
        return await until(lambda: self.get("/ready"), lambda answer: answer[0] == status)

    async def validation(self) -> dict[str, Any]:
        """Return what the frontend holds now."""
        return json.loads((await self.get("/validate"))[1])

    async def quiet(self) -> dict[str, Any]:
        """The self-check once nothing is in flight any more."""
        _, text = await until(lambda: self.get("/validate"), lambda answer: json.loads(answer[1])["ok"])
        return json.loads(text)


@pytest.fixture
def config(model_path: Path, cluster: ScriptedCluster) -> FrontendConfig:
    return assemble(
        FrontendConfig,
        models=(ServedModelConfig(model_path, "tiny"),),
        conductor_targets=(cluster.conductor_target,),
        port=0,
        node_id="fe-0",
        block_tokens=BLOCK_TOKENS,
        request_timeout_s=20.0,
        cluster_interval_s=0.05,
        hold_off_s=0.2,
        drain_grace_s=5.0,
    )


StartFront = Callable[..., Any]


@pytest.fixture
def start_front(config: FrontendConfig) -> StartFront:
    """`async with start_front(**changes) as front`: a frontend with changed configuration."""

    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[Front]:
        stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
        rests: list[None] = []
        serving = serve_frontend(replaced(config, **changes), stop, url.set_result, lambda: rests.append(None))
        task = asyncio.create_task(serving)
        await asyncio.wait((task, url), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            try:
                yield Front(url.result(), http, stop, task, rests)
            finally:
                stop.set()
                await within(task)

    return start


@pytest.fixture
def serve_family(start_front: StartFront, cluster: ScriptedCluster, model_path: Path, tmp_path: Path) -> StartFront:
    """`async with serve_family("qwen3") as (front, model)`: a frontend of a model of this family."""

    @asynccontextmanager
    async def start(family: str, **own: Any) -> AsyncIterator[tuple[Front, AgentModel]]:
        for status in cluster.conductor.cluster.nodes:
            status.node.max_model_len = 4096
        path = make_model(model_path, tmp_path / f"{family}-{len(own)}", family)
        async with start_front(models=(ServedModelConfig(path, "tiny", **own),)) as front:
            yield front, AgentModel(path, cluster)

    return start


@pytest.fixture
async def front(start_front: StartFront) -> AsyncIterator[Front]:
    async with start_front() as running:
        yield running


async def until(look: Callable[[], Awaitable[Any]], holds: Callable[[Any], bool]) -> Any:
    """Return the result of `look` once `holds` accepts it, after polling as an operator would."""
    async with asyncio.timeout(WAIT_S):
        while True:
            seen = await look()
            if holds(seen):
                return seen
            await asyncio.sleep(0.01)


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[Any]]:
    return until


@pytest.fixture
def log_lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Return the log so far as decoded JSON lines."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = list(root.handlers), root.level
    logs.configure("frontend", "fe-0", "info", json=True, stream=stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def ids_of(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


@pytest.fixture(name="logprob_of")
def logprob_of_fixture() -> Callable[[int, int], float]:
    return logprob_of


@pytest.fixture
def prompt_of() -> Callable[[worker_pb2.Submit], list[int]]:
    return lambda submit: np.frombuffer(submit.prompt_ids, "<i4").tolist()


@pytest.fixture
async def second_pair(cluster: Any) -> tuple[Any, Any]:
    """Workers p1 and d1; a request is placed on the first pair, and on the second where the first is excluded."""

    def place(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        names = [next(n for n in pair if n not in request.exclude_nodes) for pair in (("p0", "p1"), ("d0", "d1"))]
        return cluster.placement(*names)

    cluster.conductor.place = place
    return await cluster.add("p1"), await cluster.add("d1")


@pytest.fixture(params=["gemma", "llama-2"])
def piece_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer of pieces (▁ for spaces, bytes as tokens); Llama 2's puts a space before every text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abu:", "▁a", "▁ab", "ab"]
    merges = [("▁", "a"), ("▁a", "b"), ("a", "b")]
    vocab = {token: index for index, token in enumerate(tokens)}
    fast = FastTokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    starts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if request.param == "llama-2":
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        fast.decoder = decoders.Sequence([*starts, decoders.Strip(" ", 1, 0)])
    else:
        fast.normalizer, fast.decoder = spaces, decoders.Sequence(starts)
    fast.add_special_tokens(["<s>", "</s>"])
    fast.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(tokens)}))
    template = "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}<s>a:"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return tmp_path
