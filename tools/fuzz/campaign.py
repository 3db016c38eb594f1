"""A run of several targets, a few at a time, with progress on standard error."""

import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tools.fuzz.fuzzer import Findings
from tools.fuzz.process import TargetProcess
from tools.fuzz.targets import TARGETS

_PROGRESS_S = 10.0


def campaign(
    names: Sequence[str], *, seed: int, cases: int, seconds: float, processes: int, out: Path
) -> dict[str, Findings]:
    """Return the findings of each target after `seconds` in all, or `cases` cases of each; `processes` at a time."""
    share_s = seconds * min(processes, len(names)) / len(names)
    running = {name: TargetProcess(TARGETS[name], out / name, seed) for name in names}
    waiting, current = deque(names), set[str]()
    turn = threading.Lock()

    def work() -> None:
        while True:
            with turn:
                if not waiting:
                    return
                name = waiting.popleft()
                current.add(name)
            running[name].run(cases=cases, seconds=share_s)
            with turn:
                current.discard(name)
                _show(name, running[name].findings, "done")

    threads = [threading.Thread(target=work, name="fuzz", daemon=True) for _ in range(processes)]
    for thread in threads:
        thread.start()
    shown_s = time.monotonic()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.2)
        if time.monotonic() - shown_s > _PROGRESS_S:
            shown_s = time.monotonic()
            with turn:
                for name in sorted(current):
                    _show(name, running[name].findings, "runs")
    return {name: running[name].findings for name in names}


def _show(name: str, found: Findings, state: str) -> None:
    rate = found.cases / found.seconds if found.seconds else 0.0
    print(
        f"{name:22} {state}  {found.cases:8} cases  {rate:7.0f}/s  {found.lines:5} of {found.num_lines} lines  "
        f"{found.corpus:5} in corpus  {len(found.defects)} defects",
        file=sys.stderr,
        flush=True,
    )
