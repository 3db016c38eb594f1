"""Framework of the doctor's checks: what a check is, its results, and running checks concurrently.

Each check runs on a thread of its own, with one deadline for all. Checks import some packages only when needed, under
`ONE_AT_A_TIME`: two threads that enter one package at different modules could deadlock on the import locks.
"""

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

ONE_AT_A_TIME: Final = threading.Lock()


class Level(StrEnum):
    """Severity of a result; only FAIL means that the machine cannot serve as requested."""

    OK = "ok"
    NOTE = "note"  # informative; nothing is wrong
    WARN = "warn"  # works, but slower or less safely than it could
    FAIL = "fail"


class Purpose(StrEnum):
    """Intended use of the machine beyond a cluster on its CPU; turns optional checks into required ones."""

    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"
    RDMA = "rdma"
    GPU = "gpu"


@dataclass(frozen=True)
class CheckResult:
    """Result of one check; `advice` is one sentence on what to do, or empty."""

    check: str
    level: Level
    found: str
    advice: str = ""


Needs = frozenset[Purpose]
Verdict = tuple[Level, str, str]  # level, found, advice


@dataclass(frozen=True)
class Check:
    """A named check: `observe` may block or raise, `judge` is pure."""

    name: str
    observe: Callable[[], Any]
    judge: Callable[[Any, Needs], Verdict]

    def look(self, needs: Needs) -> CheckResult:
        """Run the check."""
        return CheckResult(self.name, *self.judge(self.observe(), needs))


def optional(needs: Needs, *purposes: Purpose) -> Level:
    """Return FAIL if one of the purposes is requested, otherwise NOTE."""
    return Level.FAIL if needs & set(purposes) else Level.NOTE


DEADLINE_S = 4.0


def read_text(path: Path) -> str:
    """Return the file's text, stripped; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def run_script(script: str, within_s: float) -> tuple[str, str]:
    """Run a Python script in a child process; return (its output, "") or ("", the error)."""
    command = [sys.executable, "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {within_s:g} s"
    except OSError as error:
        return "", str(error)
    if done.returncode:
        return "", (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return done.stdout, ""


def examine(checks: Sequence[Check], needs: Needs, *, deadline_s: float = DEADLINE_S) -> list[CheckResult]:
    """Run all checks concurrently and return their results in order; an exception or a timeout is a warning."""
    give_up_s = time.monotonic() + deadline_s
    answers: queue.SimpleQueue[tuple[int, CheckResult]] = queue.SimpleQueue()

    def look(index: int, check: Check) -> None:
        try:
            answers.put((index, check.look(needs)))
        except Exception as error:  # a machine's files may have any content: other checks go on
            text = f"the check failed: {type(error).__name__}: {error}"
            answers.put((index, CheckResult(check.name, Level.WARN, text, "Check it by hand.")))

    for index, check in enumerate(checks):
        # Daemon threads: a call that never returns must not keep the command from exiting.
        threading.Thread(target=look, args=(index, check), name=f"doctor-{check.name}", daemon=True).start()
    found: dict[int, CheckResult] = {}
    while len(found) < len(checks):
        try:
            index, finding = answers.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except queue.Empty:
            break
        found[index] = finding
    return [found.get(index) or _unanswered(check, deadline_s) for index, check in enumerate(checks)]


def _unanswered(check: Check, deadline_s: float) -> CheckResult:
    return CheckResult(
        check.name, Level.WARN, f"did not answer within {deadline_s:g} s", "Try again; if it persists, it may hang."
    )
