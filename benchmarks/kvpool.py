"""Comparison of the host's KV pool with memcpy and Mooncake Store: gets into the caller's buffer, and puts.

Block sizes are 4 KiB to 16 MiB. A get finds the block in the pool node's shared index and copies it from the mapped
arena, with or without verification of digests. A put ends when the pool node has copied the block, computed its digests
and sealed it (put_verified: the caller computes the digests, too, and the pool node compares them). memcpy is numpy's
copy of as many bytes between two buffers of the same sizes. Mooncake Store (get_into, put_from, batch_put_from,
registered buffers, its segment on this host, no checksum) runs with its master in the Python given by
--mooncake-python. All alternate in every round over the same number of blocks; a round's time is its median operation,
and ratios are medians over rounds. All memory has been touched before. Mooncake Store's blocks are removed after each
round; the pool's are evicted when it is full. With --ssd-dir, kvpool_ssd.py measures the SSD tier.

Run: python benchmarks/kvpool.py [--mooncake-python PATH] [--ssd-dir FOLDER] [--store]; the last line of output is
JSON. Each ratio is the minimum over the sizes (`..._vs_memcpy`: from 1 MiB up); all figures are under `by_size`.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Replace this folder on the path by the repository root: this file would hide the package kvpool.
HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

from benchmarks.stored import store  # noqa: E402
from kvpool import (  # noqa: E402
    KvGroup,
    KvSpec,
    PoolClient,
    PoolNodeConfig,
    chain_keys,
    chain_seed,
    kv_namespace,
)
from kvpool.local import LocalPoolClient, PutStatus, RegisteredBlocks  # noqa: E402
from kvpool.server import serve_pool_node  # noqa: E402
from messenger import MessengerConfig, SharedMemory  # noqa: E402
from rpc.control import run  # noqa: E402
from settings.keys import assemble  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
ARENA_NBYTES = 512 * MIB
BUFFER_NBYTES = 64 * MIB
LAYER_NBYTES = 64 * KIB  # per layer; larger blocks have more layers, like blocks of a model's KV
BATCH = 16
READY = "READY"


class Ours:
    """Pool node in a separate process, and a local client in this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moonpool-bench-")
        self._process = subprocess.Popen(
            [sys.executable, __file__, "node", self._folder.name], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        while READY not in self._process.stdout.readline():
            if self._process.poll() is not None:
                raise SystemExit("the pool node did not start")
        path = next(Path(self._folder.name).glob("d-*.sock"))
        self.pool = LocalPoolClient(str(path), owner="benchmark", owner_incarnation=1, deadline_s=60)
        self.memory = SharedMemory.create(BUFFER_NBYTES, "benchmark")
        self.memory.array[:] = np.random.default_rng(0).integers(0, 256, BUFFER_NBYTES, np.uint8)
        self._region = self.pool.register_memory(self.memory)
        self.landing = np.zeros(BUFFER_NBYTES, np.uint8)
        self._serial = 0

    def size(self, nbytes: int) -> None:
        """Use blocks of `nbytes` bytes from now on."""
        layers = max(1, nbytes // LAYER_NBYTES)
        tokens = nbytes // layers // (2 * 128)
        group = KvGroup("full", 0, tuple(range(layers)), kv_heads=1, head_dim=64, dtype="float16")
        self._spec = KvSpec((group,), tokens)
        assert self._spec.block_nbytes == nbytes
        self._ns = kv_namespace("benchmark", self._spec)
        self._places = BUFFER_NBYTES // nbytes

    def fill(self) -> None:
        """Write to the whole arena once, so that page faults do not affect measurements."""
        self.size(MIB)
        for _ in range(0, ARENA_NBYTES, BUFFER_NBYTES):
            self.put(self.keys(BUFFER_NBYTES // MIB), BATCH)

    def flush(self) -> None:
        """Empty the pool, so that blocks of one size are not evicted for those of another."""

        async def ask() -> None:
            client = PoolClient(f"unix:{self._folder.name}/pool.sock", owner="benchmark", owner_incarnation=1)
            try:
                await client.flush(deadline_s=60)
            finally:
                await client.close()

        asyncio.run(ask())

    def keys(self, count: int) -> NDArray[np.uint8]:
        """Return unused chain keys [count, 16]."""
        self._serial += 1
        ids = np.zeros(count, np.int32)
        return chain_keys(chain_seed(str(self._serial), "benchmark", 1), ids, 1)

    def offsets(self, start: int, count: int) -> NDArray[np.int64]:
        return ((start + np.arange(count)) % self._places * self._spec.block_nbytes).reshape(1, -1)

    def put(self, keys: NDArray[np.uint8], batch: int = 1, verified: bool = False) -> list[float]:
        parents = np.zeros((batch, 16), np.uint8)
        seconds = []
        for i in range(0, len(keys), batch):
            part, offsets = keys[i : i + batch], self.offsets(i, batch)
            began = time.perf_counter()
            digests = self.pool.digests(self._spec, self._region, offsets) if verified else None
            status = self.pool.put(
                self._ns, self._spec, part, parents, RegisteredBlocks(self._region, offsets, digests)
            )
            seconds.append(time.perf_counter() - began)
            if (status != PutStatus.STORED).any():
                raise SystemExit(f"a put returned status {status}")
        return seconds

    def get(self, keys: NDArray[np.uint8], verify: bool) -> list[float]:
        seconds = []
        for i in range(len(keys)):
            part, offsets = keys[i : i + 1], self.offsets(i, 1)
            began = time.perf_counter()
            done = self.pool.get(self._ns, self._spec, part, self.landing, offsets, verify=verify)
            seconds.append(time.perf_counter() - began)
            if done != 1:
                raise SystemExit("a block was not found")
        self.pool.send_touches()
        return seconds

    def memcpy(self, count: int) -> list[float]:
        nbytes, seconds = self._spec.block_nbytes, []
        for i in range(count):
            # Use other memory than a get has just touched.
            start = (i + count) % self._places * nbytes
            source, target = self.memory.array[start : start + nbytes], self.landing[start : start + nbytes]
            began = time.perf_counter()
            np.copyto(target, source)
            seconds.append(time.perf_counter() - began)
        return seconds

    def check(self, count: int) -> None:
        end = min(count, self._places) * self._spec.block_nbytes
        if not np.array_equal(self.landing[:end], self.memory.array[:end]):
            raise SystemExit("the bytes read differ from the bytes put")

    def close(self) -> None:
        self.pool.close()
        self._process.terminate()
        self._process.wait(20)
        self._folder.cleanup()


class MooncakeStore:
    """Mooncake Store's master, and its client in another Python (peers/mooncake_store.py)."""

    def __init__(self, python: str) -> None:
        ports = [str(port) for port in free_ports(4)]
        master = [
            str(Path(python).parent / "mooncake_master"),
            f"--rpc_port={ports[0]}",
            "--enable_http_metadata_server=true",
            f"--http_metadata_server_port={ports[1]}",
            f"--metrics_port={ports[3]}",
            "--default_kv_lease_ttl=500",
        ]
        self._master = subprocess.Popen(master, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(int(ports[0]))
        wait_for_port(int(ports[1]))
        args = [python, str(HERE / "peers" / "mooncake_store.py"), *ports[:3], str(ARENA_NBYTES)]
        self._client = subprocess.Popen(
            args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._answer(lambda line: line.startswith(READY))

    def ask(self, operation: str, nbytes: int, count: int, first: int) -> list[float]:
        assert self._client.stdin is not None
        self._client.stdin.write(f"{operation} {nbytes} {count} {first}\n")
        self._client.stdin.flush()
        return list(json.loads(self._answer(lambda line: line.startswith("["))))

    def _answer(self, expected: Callable[[str], bool]) -> str:
        assert self._client.stdout is not None
        for line in self._client.stdout:
            if expected(line):
                return line
        raise SystemExit("Mooncake Store's client ended; run benchmarks/peers/mooncake_store.py by hand to see why")

    def close(self) -> None:
        assert self._client.stdin is not None
        self._client.stdin.close()
        self._client.wait(30)
        self._master.terminate()
        self._master.wait(30)


def measure(sizes: Sequence[int], rounds: int, mooncake_python: str | None) -> dict[str, Any]:
    """Return all figures under `by_size`, and the minimum of each ratio."""
    with contextlib.ExitStack() as stack:
        ours = Ours()
        stack.callback(ours.close)
        peer = None
        if mooncake_python is not None:
            peer = MooncakeStore(mooncake_python)
            stack.callback(peer.close)
        ours.fill()
        by_size = {name_of(nbytes): one_size(ours, peer, nbytes, rounds) for nbytes in sizes}
    large = [name_of(nbytes) for nbytes in sizes if nbytes >= MIB]
    result: dict[str, Any] = {"mooncake_store": peer is not None, "rounds": rounds, "by_size": by_size}
    for key, names in (
        ("get_vs_memcpy", large),
        ("get_unverified_vs_memcpy", large),
        ("get_vs_mooncake_store", list(by_size)),
        ("put_vs_mooncake_store", list(by_size)),
    ):
        values = [by_size[name][key] for name in names if key in by_size[name]]
        if values:
            result[key] = min(values)
    return result


def one_size(ours: Ours, peer: MooncakeStore | None, nbytes: int, rounds: int) -> dict[str, Any]:
    """Measure one size; all contenders alternate. The first round, in which memory is first touched, is discarded."""
    ours.flush()
    ours.size(nbytes)
    count = min(256, max(4, BUFFER_NBYTES // nbytes))
    kept = ours.keys(count)
    ours.put(kept)
    if peer is not None:
        peer.ask("put", nbytes, count, 0)
    rows: list[dict[str, float]] = []
    for number in range(rounds + 1):
        row = {
            "memcpy": statistics.median(ours.memcpy(count)),
            "get": statistics.median(ours.get(kept, verify=True)),
            "get_unverified": statistics.median(ours.get(kept, verify=False)),
            "put": statistics.median(ours.put(ours.keys(count))),
            "put_verified": statistics.median(ours.put(ours.keys(count), verified=True)),
        }
        ours.check(count)
        if count >= BATCH:
            row["put_batch"] = statistics.median(ours.put(ours.keys(count), BATCH)) / BATCH
        if peer is not None:
            first = (2 * number + 1) * count
            row["mooncake_get"] = statistics.median(peer.ask("get", nbytes, count, 0))
            row["mooncake_put"] = statistics.median(peer.ask("put", nbytes, count, first))
            peer.ask("remove", nbytes, count, first)
            if count >= BATCH:
                row["mooncake_put_batch"] = statistics.median(peer.ask("put16", nbytes, count, first + count)) / BATCH
                peer.ask("remove", nbytes, count, first + count)
        rows.append(row)
    rows = rows[1:]
    if peer is not None:
        time.sleep(1)  # blocks stay leased for half a second after a get
        peer.ask("remove", nbytes, count, 0)

    def ratio(theirs: str, mine: str) -> float:
        return round(statistics.median(row[theirs] / row[mine] for row in rows), 3)

    result: dict[str, Any] = {
        "blocks": count,
        **{f"{name}_us": round(statistics.median(row[name] for row in rows) * 1e6, 2) for name in rows[0]},
        "get_vs_memcpy": ratio("memcpy", "get"),
        "get_unverified_vs_memcpy": ratio("memcpy", "get_unverified"),
    }
    if peer is not None:
        result["get_vs_mooncake_store"] = ratio("mooncake_get", "get")
        result["put_vs_mooncake_store"] = ratio("mooncake_put", "put")
        if "put_batch" in rows[0]:
            result["put_batch_vs_mooncake_store"] = ratio("mooncake_put_batch", "put_batch")
    print(name_of(nbytes), result, flush=True)
    return result


def serve(folder: str) -> None:
    """Run the pool node's process."""
    config = assemble(
        PoolNodeConfig,
        node_id="benchmark",
        listen=f"unix:{folder}/pool.sock",
        pool_bytes=ARENA_NBYTES,
        messenger=assemble(MessengerConfig, shm_dir=Path(folder)),
    )
    stop = asyncio.Event()

    def ready(target: str) -> None:
        # Like every role when it is ready.
        gc.collect()
        gc.freeze()
        print(READY, flush=True)

    run(serve_pool_node(config, stop, ready), stop=stop)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def wait_for_port(port: int, deadline_s: float = 30) -> None:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"Mooncake Store's master does not listen at port {port}")


def name_of(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: [int(part) for part in text.split(",")], default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--mooncake-python", help="Python with mooncake-transfer-engine; without it, Mooncake Store is skipped"
    )
    parser.add_argument("--ssd-dir", type=Path, help="folder on a disk in which to measure the SSD tier")
    parser.add_argument("--store", action="store_true", help="write the result")
    args = parser.parse_args()
    result = measure(args.sizes, args.rounds, args.mooncake_python)
    if args.mooncake_python is None:
        print("Mooncake Store was skipped; give a Python that has it with --mooncake-python")
    if args.ssd_dir is not None:
        from benchmarks import kvpool_ssd

        ssd = kvpool_ssd.measure(args.ssd_dir, min(args.rounds, 5), args.sizes)
        result |= {key: value for key, value in ssd.items() if key.startswith("ssd_")} | {"ssd": ssd}
    if args.store:
        store("kvpool", result)
    print(json.dumps(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        serve(sys.argv[2])
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main()
