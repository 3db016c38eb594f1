"""vLLM behind round-robin, behind Moonpool's conductor, and split into prefill and decode; and Moonpool's own engine.

    .vllm/bin/python -m benchmarks.vllm_pd [--requests N] [--rate R] [--sessions N] [--turns N] [--rounds N] [--store]

Runs in vLLM's environment (`make test-vllm` builds it), on CPUs in float32, with the bundled model. Every shape has two
engines and receives the same requests at the same times.

1. `shared prefixes`: prompts that begin with one of many system prompts, which do not fit into the memory of one engine
   but into that of both. Shapes: two `vllm serve` in turn; Moonpool with two aggregated vLLM workers; with one prefill
   and one decode worker with vLLM; with two aggregated workers of its own engine.
2. `dialogues`: dialogues of several turns whose KV exceeds the engines' memory (`num_gpu_blocks_override`), every
   dialogue at one engine as its client would have it. vLLM with its own prefix cache, against Moonpool with its pool.

The shapes of a scenario take turns, in every round with new servers and prompts, and the figures are over all rounds:
the speed of a shared machine changes within minutes. Times are the client's. The hit rate is cached over all prompt
tokens, as the servers report them. CPU seconds are those of all processes of a shape while it serves. The last line of
output is JSON: `tokens_equal` (the share of answers whose tokens equal those of vLLM alone),
`conductor_vs_round_robin_ttft_ratio` and `pool_vs_prefix_cache_ttft_ratio` (of median TTFTs). `--store` writes
benchmarks/results/vllm_pd-DATE.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.stored import store
from settings.worker import BUNDLED_MODEL

BLOCK = 32
LONGEST = 2048  # tokens of a prompt and its answer: vLLM must have memory for one of them
VOCABULARY = 2048
START_S = 240.0
QUIET = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Ask:
    """One request: when it is sent, its prompt, and at which of the engines if the client selects one."""

    at_s: float
    prompt: list[int]
    max_tokens: int
    engine: int


@dataclass
class ServedRequest:
    """Times, tokens and reuse of one request, as its client saw them."""

    ttft_s: float
    tpot_s: float
    prompt_tokens: int
    cached_tokens: int
    ids: list[int] = field(default_factory=list)


@dataclass
class ShapeRun:
    """Requests of one shape, and the CPU time that they took, over all rounds."""

    answers: list[ServedRequest] = field(default_factory=list)
    cpu_s: float = 0.0


@dataclass(frozen=True)
class ServingShape:
    """A way to serve: `flags` of `moonpool serve`, or none for two `vllm serve`."""

    name: str
    flags: tuple[str, ...] = ()


@dataclass
class Servers:
    """Running servers of one shape."""

    urls: list[str]
    model: str
    processes: list[subprocess.Popen[bytes]]

    def cpu_s(self) -> float:
        """CPU time of all processes so far."""
        found = 0.0
        for process in self.processes:
            parent = psutil.Process(process.pid)
            for each in [parent, *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    found += times.user + times.system
        return found


def shared_prefixes(requests: int, rate: float, seed: int) -> list[Ask]:
    """Prompts of 640 to 832 tokens, 608 of which are one of 20 system prompts, at random times."""
    rng = np.random.default_rng(seed)
    systems = rng.integers(5, VOCABULARY, (20, 608)).tolist()
    at_s, asks = 0.0, []
    for index in range(requests):
        own = rng.integers(5, VOCABULARY, int(rng.integers(32, 224))).tolist()
        system = systems[int(rng.integers(0, len(systems)))]
        asks.append(Ask(at_s, system + own, int(rng.integers(8, 40)), index))
        at_s += float(rng.exponential(1 / rate))
    return asks


def questions(sessions: int, turns: int, seed: int) -> list[list[list[int]]]:
    """The new tokens of each turn of each dialogue: a long first message and shorter ones."""
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(5, VOCABULARY, 1200 if turn == 0 else 100).tolist() for turn in range(turns)]
        for _ in range(sessions)
    ]


@contextlib.contextmanager
def moonpool(flags: Sequence[str], folder: Path) -> Iterator[Servers]:
    """A Moonpool cluster."""
    ready = folder / "ready.json"
    ready.unlink(missing_ok=True)
    command = [sys.executable, "-m", "moonpool", "serve", str(BUNDLED_MODEL), "--port", "0", "--threads", "1"]
    command += ["--block-tokens", str(BLOCK), "--ready-file", str(ready), "--frontends", "1"]
    command += ["--max-model-len", str(LONGEST), *flags]
    with _process(command, folder / "moonpool.log") as process:
        _wait(lambda: ready.exists(), process, folder / "moonpool.log")
        told = json.loads(ready.read_text())
        yield Servers([told["url"]], told["model"], [process])


@contextlib.contextmanager
def vllm(num_blocks: int, folder: Path) -> Iterator[Servers]:
    """Two `vllm serve`, each with `num_blocks` blocks."""
    with contextlib.ExitStack() as stack:
        ports, processes = [_free_port(), _free_port()], []
        for port in ports:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BUNDLED_MODEL)]
            command += ["--served-model-name", "m", "--port", str(port), "--dtype", "float32", "--max-num-seqs", "16"]
            command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(num_blocks)]
            command += ["--enable-prompt-tokens-details", "--max-num-batched-tokens", "512"]
            command += ["--max-model-len", str(LONGEST)]
            processes.append(stack.enter_context(_process(command, folder / f"vllm-{port}.log")))
        for port, process in zip(ports, processes, strict=True):
            _wait(lambda port=port: _answers(port), process, folder / f"vllm-{port}.log")
        yield Servers([f"http://127.0.0.1:{port}" for port in ports], "m", processes)


@contextlib.contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, **QUIET, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(is_ready: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"a server did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as probe:
        probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        return b" 200 " in probe.recv(64)
    return False


async def ask(session: aiohttp.ClientSession, servers: Servers, one: Ask) -> ServedRequest:
    """Send one request and read its stream."""
    body = {"model": servers.model, "prompt": one.prompt, "max_tokens": one.max_tokens, "ignore_eos": True}
    body |= {"temperature": 0.0, "stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    url = servers.urls[one.engine % len(servers.urls)]
    times: list[float] = []
    ids: list[int] = []
    usage: dict[str, Any] = {}
    began = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {await response.text()}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                fresh = [token for choice in event["choices"] for token in choice.get("token_ids") or []]
                ids += fresh
                times += [time.perf_counter()] * len(fresh)
                usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    tpot = (times[-1] - times[0]) / max(1, len(times) - 1)
    return ServedRequest(times[0] - began, tpot, len(one.prompt), cached, ids)


async def run_trace(servers: Servers, asks: Sequence[Ask]) -> list[ServedRequest]:
    """Send all requests at their times."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        began = time.perf_counter()

        async def one(each: Ask) -> ServedRequest:
            await asyncio.sleep(each.at_s - (time.perf_counter() - began))
            return await ask(session, servers, each)

        return list(await asyncio.gather(*(one(each) for each in asks)))


async def run_dialogues(servers: Servers, dialogues: Sequence[list[list[int]]]) -> list[ServedRequest]:
    """Two clients go through the dialogues turn by turn, each at an engine of its own if there are two."""
    found: list[tuple[int, int, ServedRequest]] = []

    async def client(number: int) -> None:
        own = range(number, len(dialogues), 2)
        histories: dict[int, list[int]] = {index: [] for index in own}
        for turn in range(len(dialogues[0])):
            for index in own:
                prompt = histories[index] + dialogues[index][turn]
                answer = await ask(session, servers, Ask(0.0, prompt, 24, number))
                histories[index] = prompt + answer.ids
                found.append((turn, index, answer))

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        await asyncio.gather(client(0), client(1))
    return [answer for _, _, answer in sorted(found, key=lambda each: each[:2])]


def figures(answers: Sequence[ServedRequest], cpu_s: float) -> dict[str, float]:
    """Figures of one run."""
    ttft = sorted(answer.ttft_s for answer in answers)
    return {
        "ttft_p50_ms": round(1e3 * statistics.median(ttft), 2),
        "ttft_p90_ms": round(1e3 * ttft[int(0.9 * len(ttft))], 2),
        "tpot_p50_ms": round(1e3 * statistics.median(answer.tpot_s for answer in answers), 2),
        "hit_rate": round(sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers), 3),
        "cpu_s": round(cpu_s, 1),
    }


def equal_share(answers: Sequence[ServedRequest], alone: Sequence[ServedRequest]) -> float:
    """The share of answers with the tokens of another run."""
    return round(sum(a.ids == b.ids for a, b in zip(answers, alone, strict=True)) / len(alone), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=120, help="requests with shared prefixes")
    parser.add_argument("--rate", type=float, default=2.5, help="of them per second")
    parser.add_argument("--sessions", type=int, default=12, help="dialogues")
    parser.add_argument("--turns", type=int, default=6, help="turns of each dialogue")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of all shapes")
    parser.add_argument("--store", action="store_true", help="write the result")
    given = parser.parse_args()
    console = Console(stderr=True)
    capacity, small = 9216, 3072  # tokens of KV per engine
    engine = ("--engine", "vllm", "--max-batch", "16", "--prefill-chunk-tokens", "512")
    shapes = [
        ServingShape("vLLM, round-robin"),
        ServingShape("vLLM, conductor", (*engine, "--aggregated", "2", "--capacity-tokens", str(capacity))),
        ServingShape(
            "vLLM, 1 prefill + 1 decode",
            (*engine, "--prefill-nodes", "1", "--decode-nodes", "1", "--capacity-tokens", str(capacity)),
        ),
        ServingShape("own engine, conductor", ("--aggregated", "2", "--capacity-tokens", str(capacity), *engine[2:])),
    ]
    pool = (*engine, "--aggregated", "2", "--capacity-tokens", str(small), "--pool-bytes", "512MiB")
    cached = [ServingShape("vLLM, prefix cache"), ServingShape("vLLM, pool", pool)]
    runs: dict[str, dict[str, ShapeRun]] = {"shared prefixes": {}, "dialogues": {}}
    with tempfile.TemporaryDirectory(prefix="moonpool-vllm-pd-") as name:
        folder = Path(name)
        for number in range(given.rounds):
            asks = shared_prefixes(given.requests, given.rate, seed=10 * number + 1)
            dialogues = questions(given.sessions, given.turns, seed=10 * number + 2)
            for scenario, each, tokens in (("shared prefixes", shapes, capacity), ("dialogues", cached, small)):
                for shape in each:
                    console.print(f"round {number + 1} of {given.rounds}, {scenario}: {shape.name}")
                    with moonpool(shape.flags, folder) if shape.flags else vllm(tokens // BLOCK + 1, folder) as servers:
                        before = servers.cpu_s()
                        served = run_trace(servers, asks) if each is shapes else run_dialogues(servers, dialogues)
                        run = runs[scenario].setdefault(shape.name, ShapeRun())
                        run.answers += asyncio.run(served)
                        run.cpu_s += servers.cpu_s() - before
    rows = {
        scenario: {label: figures(run.answers, run.cpu_s) for label, run in found.items()}
        for scenario, found in runs.items()
    }
    equal = {
        label: equal_share(run.answers, next(iter(found.values())).answers)
        for found in runs.values()
        for label, run in found.items()
    }
    for scenario, found in rows.items():
        table = Table(title=scenario)
        names = list(next(iter(found.values())))
        for heading in ("shape", *names, "equal tokens"):
            table.add_column(heading, justify="left" if heading == "shape" else "right")
        for label, row in found.items():
            table.add_row(label, *(f"{row[each]:g}" for each in names), f"{equal[label]:.3f}")
        Console(width=150).print(table)
    first, second = rows["shared prefixes"], rows["dialogues"]
    result = {
        "tokens_equal": min(equal.values()),
        "conductor_vs_round_robin_ttft_ratio": round(
            first["vLLM, conductor"]["ttft_p50_ms"] / first["vLLM, round-robin"]["ttft_p50_ms"], 3
        ),
        "pool_vs_prefix_cache_ttft_ratio": round(
            second["vLLM, pool"]["ttft_p50_ms"] / second["vLLM, prefix cache"]["ttft_p50_ms"], 3
        ),
        "kv_tokens_per_engine": {"shared prefixes": capacity, "dialogues": small},
        "equal": equal,
        "rows": rows,
    }
    if given.store:
        store("vllm_pd", {"command": "python -m benchmarks.vllm_pd " + " ".join(sys.argv[1:]), **result})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
