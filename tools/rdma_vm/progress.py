"""Progress messages, and the deadline shared by all steps."""

import sys
import time
from dataclasses import dataclass

from tools.rdma_vm.errors import VmDeadlineExceeded


def say(text: str) -> None:
    """Write a line to standard error, separate from the command's output."""
    print(f"rdma_vm: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Deadline:
    """Deadline in monotonic seconds. `given_s`: the total time, for messages."""

    given_s: float
    at_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return the deadline `seconds` from now."""
        return cls(seconds, time.monotonic() + seconds)

    def left(self) -> float:
        """Return the seconds left, never below zero."""
        return max(self.at_s - time.monotonic(), 0.0)

    def passed(self) -> bool:
        """Return True if no time is left."""
        return self.left() == 0.0

    def error(self, doing: str) -> VmDeadlineExceeded:
        """Return the error to raise when the deadline passed while `doing` something."""
        return VmDeadlineExceeded(
            f"{doing} was not done within the total timeout of {self.given_s:g} s; raise --timeout"
        )
