"""Children that open a store, check what they find in it, then write, seal and free until somebody kills them.

`python ssd_writer_process.py FOLDER`: for each line SEED on stdin a child is forked from this warmed process. Lines on
stdout, each written at once: `child PID`; `found NUMBER PAGE` or `wrong NUMBER PAGE` per block recovered; `open`; then
`sealed NUMBER PAGE ...` after each write that returned, `freeing PAGE ...` before each free; and `ended STATUS`.
"""

import gc
import os
import random
import sys
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).resolve().parents[3]), str(Path(__file__).resolve().parents[3] / "proto")]

from kvpool import KvGroup, KvSpec  # noqa: E402
from kvpool.ssd import SsdConfig, SsdEntry, SsdRead, SsdStore, SsdWrite  # noqa: E402
from kvpool.ssd.disk import Disk  # noqa: E402
from kvpool.ssd.kernels import kernels  # noqa: E402

PAGE, PAGES = 4096, 96
NAMESPACE = b"namespace".ljust(16, b"\0")
SPEC = KvSpec((KvGroup("full", 0, (0,), 1, 640, "uint8"), KvGroup("full", 0, (1,), 1, 100, "uint8")), 4)
EXTENT_PAGES = 2


class UnsyncedDisk(Disk):
    """Skip most syncs: what a killed process wrote stays in the page cache."""

    def sync(self, fd: int) -> None:
        pass

    def sync_dir(self, path: Path) -> None:
        pass


def content(number: int) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [rng.integers(0, 256, SPEC.slot_nbytes(g), dtype=np.uint8) for g in range(SPEC.num_groups)]


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def are_right(store: SsdStore) -> list[bool]:
    """Per recovered block: whether it is read, and is what was written."""
    entries = store.recovered
    targets = [[np.zeros(SPEC.slot_nbytes(g), np.uint8) for g in range(SPEC.num_groups)] for _ in entries]
    reads = [
        SsdRead(entry.offset, NAMESPACE, entry.chain_key, each) for entry, each in zip(entries, targets, strict=True)
    ]
    right = []
    for entry, error, got in zip(entries, store.read(reads), targets, strict=True):
        number = int.from_bytes(entry.chain_key, "big")
        same = all(np.array_equal(*pair) for pair in zip(got, content(number), strict=True))
        right.append(error is None and same and entry.digests == (number.to_bytes(8, "little"),) * 2)
    return right


def run(folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    config = SsdConfig(
        folder, PAGES * PAGE, "node", segment_nbytes=31 * PAGE, read_depth=2, write_depth=2, min_journal_nbytes=1 << 16
    )
    store = SsdStore.open(config, Disk() if seed % 4 == 0 else UnsyncedDisk())
    held = []
    for entry, right in zip(store.recovered, are_right(store), strict=True):
        page = entry.offset // PAGE
        held.append(page)
        say("found" if right else "wrong", int.from_bytes(entry.chain_key, "big"), page)
    say("open")
    for turn in range(1_000_000):
        if len(held) > 30:
            gone = [held.pop(rng.randrange(len(held))) for _ in range(rng.randrange(1, 12))]
            say("freeing", *gone)
            store.free([page * PAGE for page in gone])
        free = [page for page in range(0, PAGES, EXTENT_PAGES) if page not in held]
        chosen = rng.sample(free, rng.randrange(1, 7))
        numbers = [seed * 1_000_000 + turn * 10 + i for i in range(len(chosen))]
        errors = store.write(
            [
                SsdWrite(
                    SsdEntry(
                        page * PAGE, NAMESPACE, number.to_bytes(16, "big"), bytes(16), SPEC, 0,
                        (number.to_bytes(8, "little"),) * 2,
                    ),
                    content(number),
                )
                for number, page in zip(numbers, chosen, strict=True)
            ]
        )  # fmt: skip
        assert not any(errors), errors
        say("sealed", *(word for pair in zip(numbers, chosen, strict=True) for word in pair))
        held += chosen


if __name__ == "__main__":
    kernels()
    gc.freeze()
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            try:
                run(Path(sys.argv[1]), int(line))
            finally:
                os._exit(1)
        say("child", pid)
        say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
