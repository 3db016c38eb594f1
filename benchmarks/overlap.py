"""Overlap of KV transfers with computing: a load of reused KV, and a push to the decode node, over a throttled network.

    python -m benchmarks.overlap [--layers N ...] [--ratios R ...] [--rounds N] [--store]

Real nodes in processes of their own, with the paced engine, which waits at every layer for as long as a real one would
compute, and a proxy before the receiving or sending node that forwards at a bounded rate. Compute time is the same in
all cells; transfer time is `ratio` times it. Without overlap a request takes the sum of both. With it, it takes the
longer one and, since the first layer cannot be computed before it is there and the last one cannot be sent before it is
computed, one layer of the shorter one: this is the bound.

    load   an aggregated worker reuses KV from a pool node and computes the rest; until the first token. `whole`: the
           same when all layers are loaded before the first one is computed
    chunks the same on a prefill node whose chunks are a quarter of the rest; the decode node, beside the pool node,
           reads the reused KV from shared memory
    push   a prefill node computes a prompt and pushes it to a decode node; until the first token of the decode node,
           which the request takes over when all KV has arrived

Needs two idle cores. `--store` writes benchmarks/results/overlap-DATE.json and docs/pictures/overlap.svg. The last line
of output is JSON, with `worst_over_max`: the largest ratio of a measured time to its bound, and `worst_over_longer`: to
the longer time alone. On a busy machine, run it with real-time priority (`chrt -r 10`): it uses a part of one core.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.stored import PICTURES, store
from benchmarks.throttle import ThrottledProxy
from engine.random_model import RandomModelSpec, write_random_model
from kvpool import chain_keys, chain_seed
from moonpool_proto.v1.common_pb2 import JsonRequest
from moonpool_proto.v1.conductor_pb2 import NodeRef
from moonpool_proto.v1.worker_pb2 import FrontendMessage, Hello, Submit
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import open_channel
from rpc.versions import own_software
from worker.paced.profiles import profile_of
from worker.policy.cost_profile import save_profile

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "moonpool" / "data" / "model"
BLOCK, VOCAB = 64, 2048
MOVED_TOKENS, NEW_TOKENS = 2048, 255  # tokens whose KV is moved, and tokens that a load leaves to compute
KV_BYTES = 16 << 10  # per token
OPEN_ADDRESS, PROXIED_ADDRESS = "127.0.0.1", "127.0.0.2"
MODES = ("load", "chunks", "push")
TITLES = ("load of reused KV", "load, rest in four chunks", "push to the decode node")
# Makes a worker read all layers before it computes, as if every load were small.
WHOLE = "import sys, worker.kv_loading as k; k.LEAST_READ_NBYTES = 1 << 60; from moonpool.cli import main; main()"


@dataclass(frozen=True)
class Setup:
    """Processes of one measurement."""

    mode: str
    layers: int
    compute_s: float
    whole: bool = False

    @property
    def loads(self) -> bool:
        return self.mode != "push"

    @property
    def workers(self) -> list[str]:
        return ["aggregated"] if self.mode == "load" else ["prefill", "decode"]

    @property
    def computed_tokens(self) -> int:
        return NEW_TOKENS if self.loads else MOVED_TOKENS

    def placement(self, name: str) -> list[str]:
        """Return a node's transport and host flags; nodes of the same host may use its shared memory."""
        beside = self.mode == "chunks" and name in ("pool", "decode")
        return ["--transport", "auto", "--host-id", "pool"] if beside else ["--transport", "tcp", "--host-id", name]

    def transfer_rate(self, ratio: float) -> float:
        """Return the bytes per second at which the transfer takes `ratio` times as long as the computation."""
        return MOVED_TOKENS * KV_BYTES / (ratio * self.compute_s)

    def bound_s(self, ratio: float) -> float:
        """Return the least time with overlap of whole layers."""
        transfer_s = ratio * self.compute_s
        return max(self.compute_s, transfer_s) + min(self.compute_s, transfer_s) / self.layers


def free_port() -> int:
    """Return a port that is free on both addresses."""
    with socket.socket() as one, socket.socket() as two:
        one.bind((OPEN_ADDRESS, 0))
        two.bind((PROXIED_ADDRESS, one.getsockname()[1]))
        return int(one.getsockname()[1])


class Client:
    """Frontend that is attached to the workers."""

    def __init__(self, targets: dict[str, str]) -> None:
        self._targets = targets
        self._channels = {name: open_channel(target) for name, target in targets.items()}
        self._calls: dict[str, Any] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._came: dict[tuple[str, int], asyncio.Future[float]] = {}
        self._cached: dict[str, int] = {}

    async def attach(self) -> None:
        for name, channel in self._channels.items():
            stream = self._calls[name] = WorkerStub(channel).Attach(wait_for_ready=True)
            hello = Hello(frontend_id="bench", incarnation=1, software=own_software())
            await stream.write(FrontendMessage(hello=hello))
            await stream.read()
            self._readers.append(asyncio.create_task(self._read(stream)))

    async def _read(self, stream: Any) -> None:
        while message := await stream.read():
            for failure in message.failures:
                for (request_id, _), waiting in self._came.items():
                    if request_id == failure.request_id and not waiting.done():
                        waiting.set_exception(RuntimeError(f"{failure.code}: {failure.message}"))
            for token in message.tokens:
                if token.HasField("timing") and not token.timing.HasField("handoff"):
                    self._cached[token.request_id] = token.timing.cached_dram_tokens
                key = token.request_id, token.index
                if key in self._came:
                    self._came[key].set_result(time.perf_counter())

    async def ask(self, name: str, prompt: NDArray[np.int32], *, node: str, num_tokens: int) -> tuple[float, int]:
        """Return (seconds until token `num_tokens - 1`, the last one, tokens from the pool), once all are at rest."""
        seed = chain_seed("", "bench", BLOCK)
        submit = Submit(
            request_id=name,
            frontend_id="bench",
            model="m",
            prompt_ids=prompt.astype("<i4").tobytes(),
            chain=chain_keys(seed, prompt, BLOCK).tobytes(),
            chain_seed=seed,
            timeout_s=120,
        )
        submit.sampling.max_tokens, submit.sampling.top_p = num_tokens, 1.0
        if "decode" in self._targets:
            submit.placement.decode.CopyFrom(NodeRef(node_id="decode", target=self._targets["decode"]))
        came = self._came[name, num_tokens - 1] = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        await self._calls[node].write(FrontendMessage(submit=submit))
        took_s = await asyncio.wait_for(came, 120) - began
        for channel in self._channels.values():
            await self._at_rest(WorkerStub(channel))
        return took_s, self._cached[name]

    async def _at_rest(self, worker: Any) -> None:
        """Wait until a worker holds nothing: the prompt's blocks are stored then."""
        for _ in range(6000):
            state = await worker.State(JsonRequest())
            if not any(json.loads(state.json)["counts"].values()):
                return
            await asyncio.sleep(0.02)
        raise RuntimeError("a worker still holds something after two minutes")

    async def begin(self, node: str) -> None:
        """Wait until the workers serve, which they do once they have found the pool node."""
        reason: Exception | None = None
        for attempt in range(900):
            try:
                await self.ask(f"begin {attempt}", np.arange(5, 5 + BLOCK, dtype=np.int32), node=node, num_tokens=1)
            except RuntimeError as error:
                reason = error
                await asyncio.sleep(0.1)
            else:
                return
        raise RuntimeError(f"the workers do not serve: {reason}")

    async def close(self) -> None:
        for stream in self._calls.values():
            stream.cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()


@contextlib.contextmanager
def processes(setup: Setup, folder: Path) -> Iterator[tuple[dict[str, str], ThrottledProxy]]:
    """Run the nodes of a setup; yield the workers' gRPC targets and the proxy."""
    model = folder / "model"
    spec = RandomModelSpec(layers=setup.layers, vocab=VOCAB, max_len=8192)
    write_random_model(model, spec, tokenizer=BUNDLED)
    instant = profile_of("instant")
    prefill = replace(instant.prefill, per_token_s=setup.compute_s / setup.computed_tokens)
    save_profile(replace(instant, name="overlap", prefill=prefill), folder / "profile.json")
    workers = setup.workers
    names = ["conductor", "pool", *workers]
    proxied = "pool" if setup.loads else "decode"
    targets = {name: f"unix:{folder}/{name}.sock" for name in names}
    running: list[subprocess.Popen[bytes]] = []
    proxy: ThrottledProxy | None = None
    try:
        for name in names:
            command = ["node", name, "--listen", targets[name]]
            if name != "conductor":
                port = free_port()
                command += ["--node-id", name, *setup.placement(name), "--conductor", targets["conductor"]]
                command += ["--data-host", OPEN_ADDRESS, "--data-port", str(port)]
                command += ["--data-advertise", PROXIED_ADDRESS if name == proxied else OPEN_ADDRESS]
            if name == proxied:
                proxy = ThrottledProxy(PROXIED_ADDRESS, OPEN_ADDRESS, port)
            if name == "pool":
                command += ["--pool-bytes", "1GiB"]
            elif name in workers:
                # Every prompt takes all slots, so that its prefix is never found here but in the pool.
                capacity = MOVED_TOKENS + (NEW_TOKENS + 1 if setup.loads else BLOCK)
                command += ["--pool", targets["pool"], "--model", str(model), "--served-model-name", "m"]
                command += ["--engine", "paced", "--paced-profile", str(folder / "profile.json")]
                command += ["--paced-kv-bytes", str(KV_BYTES), "--paced-answer-tokens", "0"]
                command += ["--block-tokens", str(BLOCK), "--capacity-tokens", str(capacity)]
                command += ["--prefill-chunk-tokens", str((NEW_TOKENS + 1) // 4 if setup.mode == "chunks" else 4096)]
            program = ["-c", WHOLE] if setup.whole and name in workers else ["-m", "moonpool"]
            running.append(
                subprocess.Popen(
                    [sys.executable, *program, *command],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=(folder / f"{name}.log").open("wb"),
                )
            )
        assert proxy is not None
        yield {name: targets[name] for name in workers}, proxy
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            process.wait(60)
        if proxy is not None:
            proxy.close()


async def measure(
    setup: Setup, targets: dict[str, str], proxy: ThrottledProxy, ratios: list[float], rounds: int
) -> list[dict[str, Any]]:
    """Measure all ratios with the running processes of a setup."""
    client = Client(targets)
    rng = np.random.default_rng(setup.layers)

    def ids(count: int) -> NDArray[np.int32]:
        return rng.integers(5, VOCAB, count).astype(np.int32)

    prefixes = [ids(MOVED_TOKENS), ids(MOVED_TOKENS)]

    turns = itertools.count()

    async def load(name: str) -> float:
        prompt = np.concatenate([prefixes[next(turns) % 2], ids(NEW_TOKENS)])
        took_s, cached = await client.ask(name, prompt, node=setup.workers[0], num_tokens=1)
        if cached != MOVED_TOKENS and not name.startswith("warm up"):
            raise SystemExit(
                f"{cached} of {MOVED_TOKENS} tokens came from the pool: a read has failed, or slots had them"
            )
        return took_s

    async def push(name: str) -> float:
        took_s, _ = await client.ask(name, ids(MOVED_TOKENS), node=setup.workers[0], num_tokens=2)
        return took_s

    rows = []
    try:
        await client.attach()
        await client.begin(setup.workers[0])
        if setup.loads:
            for i, prefix in enumerate(prefixes):
                await client.ask(f"store {i}", prefix, node=setup.workers[0], num_tokens=1)
        run = load if setup.loads else push
        for turn in range(2):
            await run(f"warm up {turn}")
        for ratio in ratios:
            proxy.bytes_per_s = setup.transfer_rate(ratio)
            times = [await run(f"{ratio} {turn}") for turn in range(rounds)]
            rows.append(
                {
                    "mode": "whole" if setup.whole else setup.mode,
                    "layers": setup.layers,
                    "ratio": ratio,
                    "seconds": round(statistics.median(times), 4),
                    "all_seconds": [round(each, 4) for each in sorted(times)],
                    "bound_s": round(setup.bound_s(ratio), 4),
                    "sum_s": round((1 + ratio) * setup.compute_s, 4),
                    "over_bound": round(statistics.median(times) / setup.bound_s(ratio), 4),
                    "over_sum": round(statistics.median(times) / ((1 + ratio) * setup.compute_s), 4),
                }
            )
            print(rows[-1], file=sys.stderr)
    finally:
        await client.close()
    return rows


def over_longer(row: dict[str, Any], compute_s: float) -> float:
    """Return the ratio of a measured time to the longer one of computing and transfer, without the layer."""
    return round(float(row["seconds"]) / (compute_s * max(1.0, float(row["ratio"]))), 4)


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the measured times over the ratio, beside the sum and the bound."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    counts = sorted({row["layers"] for row in result["rows"]})
    colours = dict(zip(counts, ("#0969da", "#8250df", "#1a7f37", "#bf8700"), strict=False))
    compute_s = result["compute_s"]
    with plt.rc_context({"svg.hashsalt": "overlap", "font.size": 9.0, "axes.titlelocation": "left"}):
        figure, panels = plt.subplots(1, len(MODES), figsize=(12.5, 3.6), layout="constrained", sharey=True)
        for axes, mode, title in zip(panels, MODES, TITLES, strict=True):
            ratios = sorted({row["ratio"] for row in result["rows"]})
            line = np.geomspace(ratios[0], ratios[-1], 100)
            axes.plot(line, 1 + line, color="#cf222e", linestyle=":", label="compute + transfer")
            axes.plot(line, np.maximum(1, line), color="#57606a", linewidth=0.9, label="the longer of both")
            for layers in counts:
                for kind, marker in ((mode, "o"), ("whole", "x")) if mode == "load" else ((mode, "o"),):
                    rows = [row for row in result["rows"] if (row["mode"], row["layers"]) == (kind, layers)]
                    if rows:
                        label = f"{layers} layers" + (", loaded whole" if kind == "whole" else "")
                        axes.plot(
                            [row["ratio"] for row in rows],
                            [row["seconds"] / compute_s for row in rows],
                            marker,
                            color=colours[layers],
                            label=label,
                            markersize=5,
                        )
            axes.set_xscale("log", base=2)
            axes.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
            axes.set_title(title)
            axes.set_xlabel("transfer time / compute time")
            axes.grid(color="#d8dee4", linewidth=0.7)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8, loc="upper left")
        panels[0].set_ylabel("time until the token / compute time")
        panels[0].set_ylim(0, None)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32], help="numbers of model layers [8 32]")
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 0.5, 1, 2, 4], help="transfer / compute")
    parser.add_argument("--compute", type=float, default=0.6, help="seconds of computing [0.6]")
    parser.add_argument("--rounds", type=int, default=3, help="requests per cell; the median counts [3]")
    parser.add_argument("--modes", nargs="+", choices=[*MODES, "whole"], default=[*MODES, "whole"])
    parser.add_argument("--store", action="store_true", help="write the result and the picture")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for layers in options.layers:
        for mode in options.modes:
            setup = Setup("load" if mode == "whole" else mode, layers, options.compute, whole=mode == "whole")
            with (
                tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder,
                processes(setup, Path(folder)) as (targets, proxy),
            ):
                rows += asyncio.run(measure(setup, targets, proxy, options.ratios, options.rounds))
    table = Table("transfer", "layers", "ratio", "seconds", "bound", "sum", "over bound", "over sum")
    for row in rows:
        names = ("mode", "layers", "ratio", "seconds", "bound_s", "sum_s", "over_bound", "over_sum")
        table.add_row(*(str(row[name]) for name in names))
    Console(stderr=True).print(table)
    layered = [row for row in rows if row["mode"] != "whole"]
    result = {
        "benchmark": "overlap",
        "cores": os.cpu_count(),
        "compute_s": options.compute,
        "moved_bytes": MOVED_TOKENS * KV_BYTES,
        "rounds": options.rounds,
        "worst_over_max": max((row["over_bound"] for row in layered), default=0.0),
        "worst_over_longer": max((over_longer(row, options.compute) for row in layered), default=0.0),
        "rows": rows,
    }
    if options.store:
        store("overlap", result)
        draw(result, PICTURES / "overlap.svg")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
