"""Comparison of the pool node's SSD store with fio: same disk, sizes, depth and file size, O_DIRECT, random blocks.

Per size and depth, every round runs both; ratios are medians over the rounds of the store's rate to that of fio in the
same round, with the fastest of fio's engines (determined per case in a preliminary round):

- read: `SsdStore.read`, including a checksum of every byte, compared with fio's random reads without checks.
- write: `SsdStore.write` into freed space, as in a full tier; data, journal and frees are durable when it returns.
  Compared with fio's random writes with an fdatasync after as many bytes (and one more I/O, without which fio omits
  it).
- write_unsynced: the same bytes through the store's I/O path only, compared with fio without sync.

Run: python benchmarks/kvpool_ssd.py [--dir FOLDER] [--rounds N] [--store]; the last line of output is JSON. It writes
several GB to a temporary folder, which is removed at the end.
"""

import argparse
import gc
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

# Replace this folder on the path by the repository root: scripts here may have the names of packages.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.stored import store  # noqa: E402
from kvpool import KvGroup, KvSpec  # noqa: E402
from kvpool.ssd import SsdConfig, SsdEntry, SsdRead, SsdStore, SsdWrite  # noqa: E402
from kvpool.ssd.disk import (  # noqa: E402
    Disk,
    IoBatch,
    IoThreads,
)
from kvpool.ssd.records import Run  # noqa: E402

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
DEPTHS = (8, 1)
ENGINES = ("psync", "libaio", "io_uring")
FILE_NBYTES = 256 * MIB
ROUND_NBYTES = {4 * KIB: 16 * MIB, 64 * KIB: 64 * MIB, MIB: 128 * MIB, 16 * MIB: 128 * MIB}
KINDS = ("read", "write", "write_unsynced")
NAMESPACE = b"benchmark".ljust(16, b"\0")


def measure(
    folder: Path, rounds: int = 5, sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS
) -> dict[str, Any]:
    """Return rates in bytes per second and ratios, for the last line of output; without fio, ratios are missing.

    `folder` must be on a disk. `ssd_read_vs_fio` and `ssd_write_vs_fio` are minima over sizes at the largest depth.
    """
    by_size: dict[str, Any] = {}
    fio = shutil.which("fio")
    for size in sizes:
        for depth in depths:
            with tempfile.TemporaryDirectory(dir=folder, prefix="moonpool-ssd-") as own:
                case = _Case(Path(own), size, depth, fio)
                by_size.setdefault(_name(size), {})[f"depth_{depth}"] = case.measure(rounds)
    result: dict[str, Any] = {"fio": fio is not None, "file_nbytes": FILE_NBYTES, "by_size": by_size}
    if fio:
        for kind in KINDS:
            key = f"ssd_{kind}_vs_fio"
            result[key] = min(each[f"depth_{max(depths)}"][kind]["vs_fio"] for each in by_size.values())
    return result


class _Case:
    """Measurement of one size and depth: a full store of blocks of this size, and fio's file of the same length."""

    def __init__(self, folder: Path, size: int, depth: int, fio: str | None) -> None:
        self._folder, self._size, self._depth, self._fio = folder, size, depth, fio
        self._round_blocks = ROUND_NBYTES[size] // size
        self._num_blocks = FILE_NBYTES // size
        self._rng = np.random.default_rng(0)
        # Private memory like fio's, which the kernel may back with huge pages.
        memory = np.empty(ROUND_NBYTES[size] + 2 * MIB, np.uint8)
        start = -memory.ctypes.data % (2 * MIB)
        self._memory = memory[start : start + ROUND_NBYTES[size]]
        self._memory[:] = np.resize(self._rng.integers(0, 256, MIB, dtype=np.uint8), len(self._memory))
        self._spec = KvSpec((KvGroup("full", 0, (0,), kv_heads=1, head_dim=size // 32, dtype="uint8"),), 16)
        assert self._spec.block_nbytes == size

    def measure(self, rounds: int) -> dict[str, Any]:
        engines = {kind: self._fastest_engine(kind) for kind in KINDS} if self._fio else {}
        config = SsdConfig(self._folder, FILE_NBYTES, "benchmark", read_depth=self._depth, write_depth=self._depth)
        store = SsdStore.open(config)
        bare = _BareFile(self._folder / "bare.bin", self._depth)
        rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        try:
            for start in range(0, self._num_blocks, self._round_blocks):
                blocks = range(start, min(start + self._round_blocks, self._num_blocks))
                self._write(store, blocks)
                self._write_bare(bare, blocks)
            # Like every role when it is ready.
            gc.collect()
            gc.freeze()
            for _ in range(rounds):
                ours = {
                    "read": self._read(store, self._chosen()),
                    "write": self._write(store, self._chosen()),
                    "write_unsynced": self._write_bare(bare, self._chosen()),
                }
                for kind in KINDS:
                    theirs = self._run_fio(kind, engines[kind]) if self._fio else math.nan
                    rates[kind].append((ours[kind], theirs))
        finally:
            gc.unfreeze()
            store.close()
            bare.close()
        return {kind: _summary(rates[kind], engines.get(kind)) for kind in KINDS}

    def _chosen(self) -> Sequence[int]:
        chosen: list[int] = self._rng.permutation(self._num_blocks)[: self._round_blocks].tolist()
        return chosen

    def _array(self, i: int) -> Any:
        return self._memory[i * self._size : (i + 1) * self._size]

    def _read(self, store: SsdStore, blocks: Sequence[int]) -> float:
        reads = [
            SsdRead(block * self._size, NAMESPACE, block.to_bytes(16, "big"), [self._array(i)])
            for i, block in enumerate(blocks)
        ]
        began = time.perf_counter()
        errors = store.read(reads)
        took_s = time.perf_counter() - began
        assert not any(errors), errors
        return len(blocks) * self._size / took_s

    def _write(self, store: SsdStore, blocks: Sequence[int]) -> float:
        writes = [SsdWrite(self._entry(block), [self._array(i)]) for i, block in enumerate(blocks)]
        began = time.perf_counter()
        store.free([write.entry.offset for write in writes])
        errors = store.write(writes)
        took_s = time.perf_counter() - began
        assert not any(errors), errors
        return len(blocks) * self._size / took_s

    def _write_bare(self, bare: "_BareFile", blocks: Sequence[int]) -> float:
        offsets = [block * self._size for block in blocks]
        memory = [[(self._array(i).ctypes.data, self._size)] for i in range(len(blocks))]
        began = time.perf_counter()
        bare.write(offsets, memory)
        return len(blocks) * self._size / (time.perf_counter() - began)

    def _entry(self, block: int) -> SsdEntry:
        key = block.to_bytes(16, "big")
        return SsdEntry(block * self._size, NAMESPACE, key, bytes(16), self._spec, 0, (bytes(8),))

    def _fastest_engine(self, kind: str) -> str:
        rates = {engine: self._run_fio(kind, engine) for engine in ENGINES}
        return max(rates, key=rates.__getitem__)

    def _run_fio(self, kind: str, engine: str) -> float:
        """Return bytes per second; 0 if the engine cannot run here."""
        jobs = self._depth if engine == "psync" else 1
        blocks = max(1, self._round_blocks // jobs)
        # fio syncs before the next I/O, so a job needs one more I/O.
        ios = blocks + (kind == "write")
        command = [
            str(self._fio), "--name=fio", f"--filename={self._folder}/fio.bin", f"--size={FILE_NBYTES}",
            f"--bs={self._size}", "--direct=1", "--output-format=json", "--thread", "--group_reporting",
            f"--ioengine={engine}", f"--numjobs={jobs}", f"--iodepth={self._depth if jobs == 1 else 1}",
            f"--rw={'randread' if kind == 'read' else 'randwrite'}", f"--io_size={ios * self._size}",
            "--fallocate=none", "--overwrite=1", "--randrepeat=0",
        ]  # fmt: skip
        if kind == "write":
            command += [f"--fdatasync={blocks}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=self._folder)
        if done.returncode:
            return 0.0
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return float(job["read" if kind == "read" else "write"]["bw_bytes"])


class _BareFile:
    """The store's I/O path without the store."""

    def __init__(self, path: Path, depth: int) -> None:
        self._disk, self._threads = Disk(), IoThreads(depth, "bare")
        self._fd = self._disk.open(path, create=True, direct=True)
        self._disk.allocate(self._fd, FILE_NBYTES)

    def write(self, offsets: Sequence[int], memory: Sequence[Sequence[Run]]) -> None:
        batch = IoBatch(offsets, memory, FILE_NBYTES)
        outcome = self._disk.start(self._threads, batch, np.array([self._fd], np.int32), write=True).finish()
        assert not outcome.status.any()

    def close(self) -> None:
        self._threads.stop()
        self._disk.close(self._fd)


def _summary(rates: list[tuple[float, float]], engine: str | None) -> dict[str, Any]:
    summary: dict[str, Any] = {"gb_per_s": round(statistics.median(ours for ours, _ in rates) / 1e9, 3)}
    if engine is not None:
        summary["fio_gb_per_s"] = round(statistics.median(theirs for _, theirs in rates) / 1e9, 3)
        summary["fio_engine"] = engine
        summary["vs_fio"] = round(statistics.median(ours / theirs for ours, theirs in rates), 3)
    return summary


def _name(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes per block, from " + str(SIZES))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="I/Os in flight")
    parser.add_argument("--store", action="store_true", help="write the result")
    options = parser.parse_args()
    sizes, depths = ([int(each) for each in text.split(",")] for text in (options.sizes, options.depths))
    result = measure(options.dir, options.rounds, sizes, depths)
    for size, cases in result["by_size"].items():
        for depth, kinds in cases.items():
            print(f"{size:>8} {depth:8} " + "  ".join(f"{kind} {value}" for kind, value in kinds.items()))
    if not result["fio"]:
        print("fio was not found: no ratios")
    if options.store:
        store("kvpool-ssd", result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
