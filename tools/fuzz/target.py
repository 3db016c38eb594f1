"""Interface of a fuzz target, and the verdict of one case."""

import logging
import os
import random
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from tools.fuzz import mutation

ROOT = Path(__file__).resolve().parents[2]


class Misjudged(Exception):
    """A case had an outcome that the target's contract forbids, although nothing was raised."""


class FuzzTarget(ABC):
    """A parser under test. A case is a byte string, so that every target's cases can be stored and replayed.

    `allowed`: errors by which the parser may refuse a case; any other exception is a defect. `covers`: files and
    folders below the repository's root whose lines count as coverage. `deadline_s`, `max_growth_nbytes`: bounds of one
    case on time and on growth of the process's peak memory.
    """

    name: str
    covers: tuple[str, ...]
    allowed: tuple[type[BaseException], ...] = ()
    tokens: tuple[bytes, ...] = ()
    deadline_s: float = 10.0
    max_growth_nbytes: int = 512 << 20

    def open(self) -> None:  # noqa: B027  (most targets hold nothing)
        """Start what the cases need; called once, in the process that runs them."""

    @abstractmethod
    def seeds(self) -> Sequence[bytes]:
        """Return valid cases, which must be accepted, and from which others are derived. Called after `open`."""

    @abstractmethod
    def run(self, case: bytes) -> None:
        """Run one case. Raises one of `allowed` if the parser refused it, Misjudged for a forbidden outcome."""

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Return a case derived from `case`, possibly with parts of `other`."""
        return mutation.mutate_bytes(rng, case, other, self.tokens)

    def close(self) -> None:  # noqa: B027  (most targets hold nothing)
        """Stop what `open` started."""


class LoggedErrors(logging.Handler):
    """Collector of log records with a traceback: an exception that a server caught instead of its parser."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the record's exception."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            self.found.append(error)

    def take(self) -> BaseException | None:
        """Return the first exception since the last call, or None."""
        found, self.found = self.found, []
        return found[0] if found else None


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a new temporary folder; in memory where the machine has such a file system, since most cases write it."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="mpf-", dir=memory if os.access(memory, os.W_OK) else None)


def text_of(data: bytes) -> str:
    """Decode a case that a parser takes as text; lone surrogates are kept, other invalid bytes are replaced."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")
