"""Speed-up by prefill groups: TTFT of long prompts computed by 1, 2, ... prefill nodes.

    python benchmarks/prefill_group.py [--tokens N ...] [--sizes 1 2 ...] [--rounds N] [--paced PROFILE]

Runs a real cluster (`moonpool serve`) with one prefill node per member and one decode node. This script acts as a
frontend and sets the helpers in each placement, so that sizes alternate on the same processes. Prompts are random, so
that nothing is reused. With a transformer of random weights, every member needs a CPU core; a paced engine (delays of a
cost profile) shows the protocol's cost without competition for cores. On a busy machine the prefill nodes' CPU time is
more informative than wall time: the excess of a group over one node is its overhead. Ratios are medians of per-round
ratios to the first size. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

# Replace this folder on the path by the repository root: kvpool.py would hide the package of that name.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from engine.random_model import RandomModelSpec, write_random_model  # noqa: E402
from kvpool import chain_keys, chain_seed  # noqa: E402
from moonpool_proto.v1.common_pb2 import JsonRequest  # noqa: E402
from moonpool_proto.v1.conductor_pb2 import NodeRef  # noqa: E402
from moonpool_proto.v1.worker_pb2 import FrontendMessage, Hello, Submit  # noqa: E402
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub  # noqa: E402
from rpc.control import open_channel  # noqa: E402

BUNDLED = Path(__file__).parents[1] / "moonpool" / "data" / "model"
BLOCK = 16
VOCAB = 2048


class BenchFrontend:
    """Additional frontend that is attached to all workers of a cluster."""

    def __init__(self, ready: dict[str, Any]) -> None:
        self.model = str(ready["model"])
        self.targets = {
            name: str(node["target"]) for name, node in ready["nodes"].items() if name.startswith(("prefill", "decode"))
        }
        self._pids = [node["pid"] for name, node in ready["nodes"].items() if name.startswith("prefill")]
        self._channels = {name: open_channel(target) for name, target in self.targets.items()}
        self._calls: dict[str, Any] = {}
        self._first: dict[str, asyncio.Future[float]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}
        self._readers: list[asyncio.Task[None]] = []

    async def attach(self) -> None:
        for name, channel in self._channels.items():
            call = self._calls[name] = WorkerStub(channel).Attach()
            await call.write(FrontendMessage(hello=Hello(frontend_id="bench", incarnation=1)))
            await call.read()
            self._readers.append(asyncio.create_task(self._read(call)))

    async def _read(self, call: Any) -> None:
        while message := await call.read():
            for failure in message.failures:
                error = RuntimeError(f"{failure.code}: {failure.message}")
                for waiting in (self._first, self._ended):
                    if not waiting[failure.request_id].done():
                        waiting[failure.request_id].set_exception(error)
            for token in message.tokens:
                if token.index == 0:
                    self._first[token.request_id].set_result(time.perf_counter())
                if token.finish:
                    self._ended[token.request_id].set_result(None)

    async def ttft_s(self, name: str, prompt: np.ndarray[Any, np.dtype[np.int32]], size: int) -> float:
        """Return the TTFT of a prompt computed by `size` nodes, after the answer is complete."""
        loop = asyncio.get_running_loop()
        self._first[name], self._ended[name] = loop.create_future(), loop.create_future()
        seed = chain_seed("", "bench", BLOCK)
        submit = Submit(
            request_id=name,
            attempt=0,
            frontend_id="bench",
            model=self.model,
            prompt_ids=prompt.astype("<i4").tobytes(),
            chain=chain_keys(seed, prompt, BLOCK).tobytes(),
            chain_seed=seed,
            timeout_s=600,
        )
        submit.sampling.max_tokens = 2
        submit.sampling.top_p = 1.0
        submit.placement.prefill.CopyFrom(NodeRef(node_id="prefill-0", target=self.targets["prefill-0"]))
        submit.placement.decode.CopyFrom(NodeRef(node_id="decode-0", target=self.targets["decode-0"]))
        for i in range(1, size):
            submit.placement.helpers.add(node_id=f"prefill-{i}", target=self.targets[f"prefill-{i}"])
        began = time.perf_counter()
        await self._calls["prefill-0"].write(FrontendMessage(submit=submit))
        first = await self._first[name]
        await self._ended[name]
        return first - began

    def cpu_s(self) -> float:
        """Return the total CPU seconds of all prefill nodes."""
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in self._pids]
        return sum(int(one[11]) + int(one[12]) for one in fields) / os.sysconf("SC_CLK_TCK")

    async def counters(self) -> dict[str, float]:
        """Return the sums of the prefill nodes' counters by name."""
        total: dict[str, float] = {}
        for name, channel in self._channels.items():
            if name.startswith("prefill"):
                reply = await WorkerStub(channel).State(JsonRequest(), timeout=60)
                for key, value in json.loads(reply.json)["counters"].items():
                    total[key] = total.get(key, 0.0) + value
        return total

    async def close(self) -> None:
        for call in self._calls.values():
            call.cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        for channel in self._channels.values():
            await channel.close()


async def measure(ready: dict[str, Any], lengths: list[int], sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    frontend = BenchFrontend(ready)
    await frontend.attach()
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    try:
        for length in lengths:
            times: dict[int, list[float]] = {size: [] for size in sizes}
            cpu: dict[int, list[float]] = {size: [] for size in sizes}
            sent: dict[int, float] = {}
            for turn in range(rounds + 1):  # the first one warms up
                for size in sizes if turn % 2 else sizes[::-1]:
                    prompt = rng.integers(5, VOCAB, length).astype(np.int32)
                    before, cpu_before_s = await frontend.counters(), frontend.cpu_s()
                    ttft_s = await frontend.ttft_s(f"{length}-{turn}-{size}", prompt, size)
                    cpu_s, after = frontend.cpu_s() - cpu_before_s, await frontend.counters()
                    sent[size] = after.get("kv_group_bytes", 0.0) - before.get("kv_group_bytes", 0.0)
                    formed = after.get("prefill_groups", 0.0) - before.get("prefill_groups", 0.0)
                    lost = after.get("lost_groups", 0.0) - before.get("lost_groups", 0.0)
                    if (formed, lost) != (float(size > 1), 0.0):
                        raise SystemExit(f"of {size} nodes, {formed:g} groups were formed and {lost:g} lost")
                    if turn:
                        times[size].append(ttft_s)
                        cpu[size].append(cpu_s)
            for size in sizes:
                more = [mine / alone for alone, mine in zip(cpu[sizes[0]], cpu[size], strict=True)]
                ratios = [alone / mine for alone, mine in zip(times[sizes[0]], times[size], strict=True)]
                rows.append(
                    {
                        "tokens": length,
                        "members": size,
                        "ttft_s": round(statistics.median(times[size]), 4),
                        "speedup": round(statistics.median(ratios), 3),
                        "speedups": [round(ratio, 3) for ratio in sorted(ratios)],
                        "cpu_s": round(statistics.median(cpu[size]), 3),
                        "cpu_ratio": round(statistics.median(more), 3),
                        "cpu_ratios": [round(ratio, 3) for ratio in sorted(more)],
                        "group_bytes_per_token": round(sent[size] / length, 1),
                    }
                )
    finally:
        await frontend.close()
    return rows


def start(folder: Path, arguments: argparse.Namespace) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    model = folder / "model"
    write_random_model(
        model,
        RandomModelSpec(
            layers=arguments.layers,
            hidden=arguments.hidden,
            heads=8,
            kv_heads=4,
            vocab=VOCAB,
            max_len=max(arguments.tokens) + 64,
        ),
        tokenizer=BUNDLED,
    )
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "moonpool", "serve", str(model), "--port", "0", "--ready-file", str(ready)]
    command += ["--prefill-nodes", str(max(arguments.sizes)), "--prefill-chunk-tokens", str(arguments.chunk)]
    command += ["--block-tokens", str(BLOCK), "--capacity-tokens", str(2 * (max(arguments.tokens) + 4096))]
    if arguments.paced:
        command += ["--engine", "paced", "--paced-profile", arguments.paced]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the cluster did not start; run this command to see why: " + " ".join(command))
        time.sleep(0.1)
    return process, json.loads(ready.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="prompt lengths")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2], help="group sizes; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=512, help="maximum tokens of a chunk")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--paced", default="", help="use a paced engine with this cost profile")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-") as folder:
        process, ready = start(Path(folder), arguments)
        try:
            rows = asyncio.run(measure(ready, arguments.tokens, arguments.sizes, arguments.rounds))
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    table = Table("tokens", "members", "TTFT s", "speedup", "CPU s", "CPU ratio", "bytes sent in the group, per token")
    for row in rows:
        names = ("tokens", "members", "ttft_s", "speedup", "cpu_s", "cpu_ratio", "group_bytes_per_token")
        table.add_row(*(str(row[name]) for name in names))
    Console().print(table)
    settings = {name: getattr(arguments, name) for name in ("chunk", "layers", "hidden", "paced", "rounds")}
    print(json.dumps({"benchmark": "prefill_group", "cores": os.cpu_count(), **settings, "rows": rows}))


if __name__ == "__main__":
    main()
