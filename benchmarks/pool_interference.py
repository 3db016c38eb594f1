"""Time between tokens of running answers while another process reads and writes the KV pool at full speed.

    python -m benchmarks.pool_interference [--rounds 15] [--seconds 4] [--streams 4] [--ssd-dir FOLDER] [--store]

For each engine (the real one with the bundled model, then a paced one), a cluster with one prefill, one decode and one
pool node with an SSD streams answers to `--streams` clients without a pause. Phases alternate:

    calm    nothing else
    copy    a process copies memory in a loop, without the pool: what any work beside the engine costs here
    pool    a process puts new blocks of 1 MiB into the pool, 16 at a time, and gets them back verified, in a loop; the
            pool is full from the start, so that every put evicts blocks, and the pool node writes to its SSD

A phase begins when the pool nodes are idle.

The other process has the lowest priority, since it computes elsewhere in reality; the pool node has its own. Reported
are percentiles of the time between two events of a stream as the client receives them; a ratio is the median, over
rounds, of a phase's percentile over that of the calm phase of the same round. The shares of a core that each process
took show what competes for the cores. Needs nothing else on the machine. `--store` writes
benchmarks/results/pool-interference-DATE.json. The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.frontend.processes import BUNDLED, Served, cluster
from benchmarks.stored import store
from kvpool import KvGroup, KvSpec, PoolClient, chain_keys, chain_seed, kv_namespace, parent_keys
from kvpool.local import LocalPoolClient, PutStatus, RegisteredBlocks
from messenger import SharedMemory

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("calm", "copy", "pool")
ENGINES = {"real": (), "paced": ("--engine", "paced", "--paced-profile", "mooncake-70b-8xa800")}
POOL_NBYTES = 512 << 20
SSD_NBYTES = 2 << 30
_PUT_BLOCKS, _PUT_TOKENS = 16, 16
_SPEC = KvSpec((KvGroup("full", 0, tuple(range(16)), 8, 128, "float16"),), _PUT_TOKENS)  # blocks of 1 MiB
_ANSWER_TOKENS = 400
_SETTLE_S = 0.5
_IDLE_SHARE = 0.05  # of a core, that an idle pool node uses


class OtherProcess:
    """This module in a process of the lowest priority, which works while it is `working`."""

    def __init__(self, pool_target: str) -> None:
        command = ["nice", "-n", "19", sys.executable, "-m", "benchmarks.pool_interference", "--work", pool_target]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._ask("fill")

    @property
    def pid(self) -> int:
        return self._process.pid

    @contextmanager
    def working(self, kind: str, moved: dict[str, float]) -> Iterator[None]:
        """Work from here to the end, and add what was moved to `moved`."""
        if kind == "calm":
            yield
            return
        self._send(kind)
        try:
            yield
        finally:
            for name, number in self._ask("stop").items():
                moved[name] = moved.get(name, 0) + number

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _ask(self, line: str) -> dict[str, float]:
        self._send(line)
        assert self._process.stdout is not None
        reply = self._process.stdout.readline()
        if not reply:
            raise SystemExit("the process that reads and writes the pool has failed")
        return dict(json.loads(reply))


class PutsAndGets:
    """Puts and gets through the shared memory of the host."""

    def __init__(self, pool_target: str) -> None:
        client = PoolClient(pool_target, owner="load", owner_incarnation=1)
        local_socket = asyncio.run(_describe(client))
        self._pool = LocalPoolClient(local_socket, owner="load", owner_incarnation=os.getpid())
        self._memory = SharedMemory.create(_PUT_BLOCKS * _SPEC.block_nbytes, "load")
        self._memory.array[:] = np.random.default_rng(0).integers(0, 256, self._memory.nbytes, np.uint8)
        self._region = self._pool.register_memory(self._memory)
        self._landing = np.zeros(self._memory.nbytes, np.uint8)
        self._offsets = np.arange(_PUT_BLOCKS, dtype=np.int64)[None] * _SPEC.block_nbytes
        self._namespace = kv_namespace("load", _SPEC)
        self._num_puts = 0

    def put_and_get(self) -> tuple[int, int]:
        """Store 16 new blocks and read them. Returns (bytes stored, bytes read)."""
        self._num_puts += 1
        ids = np.arange(_PUT_BLOCKS * _PUT_TOKENS, dtype=np.int32)
        chain = chain_keys(chain_seed(str(self._num_puts), "tokenizer", _PUT_TOKENS), ids, _PUT_TOKENS)
        source = RegisteredBlocks(self._region, self._offsets)
        status = self._pool.put(self._namespace, _SPEC, chain, parent_keys(chain), source)
        stored = sum(PutStatus(each) is PutStatus.STORED for each in status)
        read = self._pool.get(self._namespace, _SPEC, chain, self._landing, self._offsets)
        return stored * _SPEC.block_nbytes, read * _SPEC.block_nbytes

    def copy(self) -> tuple[int, int]:
        """Copy as many bytes within this process."""
        self._landing[:] = self._memory.array
        return 0, self._memory.nbytes


async def _describe(client: PoolClient) -> str:
    try:
        return (await client.describe()).local_socket
    finally:
        await client.close()


def work(pool_target: str) -> None:
    """Serve `OtherProcess`: fill | copy | pool, until the next line; replies to `fill` and `stop` are JSON."""
    load = PutsAndGets(pool_target)
    os.set_blocking(sys.stdin.fileno(), False)
    kind = ""
    moved = {"put_bytes": 0, "get_bytes": 0, "seconds": 0.0}
    while True:
        line = os.read(sys.stdin.fileno(), 100) if (ready := _readable()) else b""
        if ready and not line:
            return
        for command in line.decode().split():
            if command == "fill":
                for _ in range(2 * POOL_NBYTES // (_PUT_BLOCKS * _SPEC.block_nbytes)):
                    load.put_and_get()
            if command in ("fill", "stop"):
                print(json.dumps(moved), flush=True)
                moved = dict.fromkeys(moved, 0)
            kind = command if command in ("copy", "pool") else ""
        if not kind:
            time.sleep(0.01)
            continue
        began = time.perf_counter()
        put, got = load.put_and_get() if kind == "pool" else load.copy()
        moved = {
            "put_bytes": moved["put_bytes"] + put,
            "get_bytes": moved["get_bytes"] + got,
            "seconds": moved["seconds"] + time.perf_counter() - began,
        }


def _readable() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


class Streams:
    """Clients that stream one answer after the other; `gaps` grows by the seconds between two events of a stream."""

    def __init__(self, served: Served, num_streams: int) -> None:
        self.gaps: list[float] = []
        self._served, self._num_streams = served, num_streams
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Streams:
        self._session = aiohttp.ClientSession()
        self._tasks = [asyncio.create_task(self._stream(i)) for i in range(self._num_streams)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def check(self) -> None:
        """Raise the error of a stream that has failed."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self, number: int) -> None:
        rng = np.random.default_rng(number)
        while True:
            body = {
                "model": self._served.model,
                "prompt": rng.integers(10, 2000, 64).tolist(),
                "max_tokens": _ANSWER_TOKENS,
                "ignore_eos": True,
                "temperature": 0.0,
                "stream": True,
            }
            async with self._session.post(f"{self._served.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                last = 0.0
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now = time.perf_counter()
                        if last:
                            self.gaps.append(now - last)
                        last = now


async def settled(served: Served) -> None:
    """Wait until the pool nodes have written what they write to their SSDs, at most 10 s."""
    for _ in range(20):
        before = served.cpu_s()
        await asyncio.sleep(_SETTLE_S)
        used = [seconds - before[name] for name, seconds in served.cpu_s().items() if name.startswith("pool")]
        if max(used) < _IDLE_SHARE * _SETTLE_S:
            return


async def measure(served: Served, other: OtherProcess, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one engine."""
    gaps: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    moved: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    cpu: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    async with Streams(served, options.streams) as streams:
        await asyncio.sleep(5)
        for i in range(options.rounds * len(KINDS)):
            kind = KINDS[i % len(KINDS)]
            await settled(served)
            with other.working(kind, moved[kind]):
                await asyncio.sleep(_SETTLE_S)
                before, start = served.cpu_s(), len(streams.gaps)
                await asyncio.sleep(options.seconds)
                streams.check()
                gaps[kind].append(streams.gaps[start:])
                for name, seconds in served.cpu_s().items():
                    cpu[kind][name] = cpu[kind].get(name, 0) + seconds - before[name]
    rows = {kind: _figures(gaps[kind], moved[kind], cpu[kind], options.rounds * options.seconds) for kind in KINDS}
    for kind in KINDS[1:]:
        for share in (50, 99):
            ratios = [
                float(np.percentile(under, share) / np.percentile(calm, share))
                for calm, under in zip(gaps["calm"], gaps[kind], strict=True)
            ]
            rows[kind][f"p{share}_ratio"] = statistics.median(ratios)
            rows[kind][f"p{share}_ratios"] = [round(ratio, 3) for ratio in sorted(ratios)]
    return rows


def _figures(
    phases: list[list[float]], moved: dict[str, float], cpu: dict[str, float], seconds: float
) -> dict[str, Any]:
    gaps = [gap for phase in phases for gap in phase]
    row: dict[str, Any] = {
        "events": len(gaps),
        **{f"p{share}_ms": 1e3 * float(np.percentile(gaps, share)) for share in (50, 90, 99)},
        "cpu_share": {name: round(used / seconds, 3) for name, used in sorted(cpu.items())},
    }
    for name in ("put_bytes", "get_bytes"):
        if moved.get("seconds"):
            row[f"{name}_per_s"] = moved[name] / moved["seconds"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--ssd-dir", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--store", action="store_true")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return
    result: dict[str, Any] = {"streams": options.streams, "rounds": options.rounds, "seconds": options.seconds}
    for engine in options.engines:
        with tempfile.TemporaryDirectory(dir=options.ssd_dir) as ssd, tempfile.TemporaryDirectory() as folder:
            flags = ["--threads", "1", "--pool-bytes", str(POOL_NBYTES), "--pool-ssd-dir", ssd]
            flags += ["--pool-ssd-bytes", str(SSD_NBYTES), *ENGINES[engine]]
            with cluster(BUNDLED, Path(folder), *flags) as served:
                nodes = json.loads((Path(folder) / "ready.json").read_text())["nodes"]
                (target,) = (node["target"] for name, node in nodes.items() if name.startswith("pool"))
                other = OtherProcess(target)
                try:
                    served.pids["load"] = other.pid
                    result[engine] = asyncio.run(measure(served, other, options))
                finally:
                    other.end()
            print(engine, json.dumps(result[engine], indent=1), flush=True)
    ratios = {engine: result[engine]["pool"]["p99_ratio"] for engine in options.engines}
    result |= {"cores": os.cpu_count(), **{f"{engine}_p99_ratio": ratio for engine, ratio in ratios.items()}}
    if options.store:
        store("pool-interference", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
