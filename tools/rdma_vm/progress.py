"""What the bed says while it works, and the one deadline that all its steps share."""

import sys
import time
from dataclasses import dataclass

from tools.rdma_vm.errors import DeadlineExceeded


def say(text: str) -> None:
    """One line to standard error, which the command's own output does not go to."""
    print(f"rdma_vm: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Deadline:
    """A point in time, and how much time there was until then."""

    given_s: float
    at_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """The deadline `seconds` from now."""
        return cls(seconds, time.monotonic() + seconds)

    def left(self) -> float:
        """Seconds left, never below zero."""
        return max(self.at_s - time.monotonic(), 0.0)

    def passed(self) -> bool:
        """Whether no time is left."""
        return self.left() == 0.0

    def error(self, doing: str) -> DeadlineExceeded:
        """The error to raise when the deadline passed while `doing` something."""
        return DeadlineExceeded(
            f"{doing} was not done within the {self.given_s:g} s given for all: --timeout gives more"
        )
