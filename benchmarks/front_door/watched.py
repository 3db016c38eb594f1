"""A role whose event loop is watched in full: every look at it is written down, not only the longest.

    python -m benchmarks.front_door.watched FILE ROLE [FLAGS]

Each line of FILE: when (monotonic clock), how late the loop came round, what of that its process computed, and what of
it the loop's own thread did; seconds.
"""

from __future__ import annotations

import sys
import time

from moonpool.cli import main
from telemetry import LoopWatch


def write_down(path: str) -> None:
    """Every note of this process's watch goes to the file at `path`, too."""
    file = open(path, "w", buffering=1)  # noqa: SIM115  (as long as the process)
    plain, before = LoopWatch.note, [0.0]

    def note(watch: LoopWatch, lag_s: float, cpu_s: float) -> None:
        thread_s, before[0] = time.thread_time() - before[0], time.thread_time()
        print(f"{time.monotonic():.4f} {lag_s:.5f} {min(lag_s, cpu_s):.5f} {min(lag_s, thread_s):.5f}", file=file)
        plain(watch, lag_s, cpu_s)

    LoopWatch.note = note  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    write_down(sys.argv[1])
    del sys.argv[1]
    main()
