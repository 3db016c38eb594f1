"""Role process that logs every sample of its event loop's lag.

    python -m benchmarks.frontend.watched FILE ROLE [FLAGS]

Each line of FILE contains, in seconds: the time (monotonic clock), the lag of the event loop, the CPU time of the
process during it, and the CPU time of the loop's thread during it.
"""

from __future__ import annotations

import sys
import time

from moonpool.cli import main
from telemetry import LoopWatch


def write_down(path: str) -> None:
    """Log every sample of this process's LoopWatch to the file at `path`."""
    file = open(path, "w", buffering=1)  # noqa: SIM115  (open until the process ends)
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
