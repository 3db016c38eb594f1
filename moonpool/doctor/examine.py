"""Runs checks at once, each on a thread of its own, and waits no longer than its deadline for the slowest."""

import queue
import threading
import time
from collections.abc import Sequence

from moonpool.doctor.finding import Check, Finding, Level, Needs

DEADLINE_S = 4.0


def examine(checks: Sequence[Check], needs: Needs, *, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Every check's finding, in their order. One that raises, or has not answered by the deadline, is a warning."""
    give_up_s = time.monotonic() + deadline_s
    answers: queue.SimpleQueue[tuple[int, Finding]] = queue.SimpleQueue()

    def look(index: int, check: Check) -> None:
        try:
            answers.put((index, check.look(needs)))
        except Exception as error:  # a machine's files can hold anything: the other checks go on
            text = f"could not be looked at: {type(error).__name__}: {error}"
            answers.put((index, Finding(check.name, Level.WARN, text, "Look at it by hand.")))

    for index, check in enumerate(checks):
        # Daemons: a call that the kernel does not return from must not keep the command from ending.
        threading.Thread(target=look, args=(index, check), name=f"doctor-{check.name}", daemon=True).start()
    found: dict[int, Finding] = {}
    while len(found) < len(checks):
        try:
            index, finding = answers.get(timeout=max(0.0, give_up_s - time.monotonic()))
        except queue.Empty:
            break
        found[index] = finding
    return [found.get(index) or _unanswered(check, deadline_s) for index, check in enumerate(checks)]


def _unanswered(check: Check, deadline_s: float) -> Finding:
    return Finding(
        check.name, Level.WARN, f"did not answer within {deadline_s:g} s", "Try again; if it stays so, it may hang."
    )
