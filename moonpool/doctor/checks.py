"""The lock under which checks import packages that only some of them need, as late as they do.

Checks run at once, each on a thread of its own, and the modules of `messenger` import one another: two threads that
enter the package at different modules would each wait for what the other has begun.

What a check is and what it can find. No check lives here.

Runs checks at once, each on a thread of its own, and waits no longer than its deadline for the slowest.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

ONE_AT_A_TIME: Final = threading.Lock()


class Level(StrEnum):
    """How serious a finding is: only FAIL means that what was asked for cannot be served here."""

    OK = "ok"
    NOTE = "note"  # good to know; nothing is wrong
    WARN = "warn"  # works, but worse than it could, or only as long as nothing unusual happens
    FAIL = "fail"


class Purpose(StrEnum):
    """What the machine is for, beyond a cluster on its CPU: makes what is optional needed."""

    PREFILL = "prefill"
    DECODE = "decode"
    POOL = "pool"
    RDMA = "rdma"
    GPU = "gpu"


@dataclass(frozen=True)
class CheckResult:
    """What one check found; `advice`, one sentence on what to do, is empty where nothing is to be done."""

    check: str
    level: Level
    found: str
    advice: str = ""


Needs = frozenset[Purpose]
Verdict = tuple[Level, str, str]  # level, found, advice


@dataclass(frozen=True)
class Check:
    """A named pair of halves: `observe` may block or raise, `judge` is pure."""

    name: str
    observe: Callable[[], Any]
    judge: Callable[[Any, Needs], Verdict]

    def look(self, needs: Needs) -> CheckResult:
        """Observe and judge."""
        return CheckResult(self.name, *self.judge(self.observe(), needs))


def optional(needs: Needs, *purposes: Purpose) -> Level:
    """FAIL for what is missing and needed for one of the purposes asked for; else a NOTE."""
    return Level.FAIL if needs & set(purposes) else Level.NOTE


DEADLINE_S = 4.0


def examine(checks: Sequence[Check], needs: Needs, *, deadline_s: float = DEADLINE_S) -> list[CheckResult]:
    """Every check's finding, in their order. One that raises, or has not answered by the deadline, is a warning."""
    give_up_s = time.monotonic() + deadline_s
    answers: queue.SimpleQueue[tuple[int, CheckResult]] = queue.SimpleQueue()

    def look(index: int, check: Check) -> None:
        try:
            answers.put((index, check.look(needs)))
        except Exception as error:  # a machine's files can hold anything: the other checks go on
            text = f"could not be looked at: {type(error).__name__}: {error}"
            answers.put((index, CheckResult(check.name, Level.WARN, text, "Look at it by hand.")))

    for index, check in enumerate(checks):
        # Daemons: a call that the kernel does not return from must not keep the command from ending.
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
        check.name, Level.WARN, f"did not answer within {deadline_s:g} s", "Try again; if it stays so, it may hang."
    )
