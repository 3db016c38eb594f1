"""Errors of the workers.

WorkerError
├── RequestRefused        the request is invalid here (too long, unknown model): not retried
├── RequestFailed         this attempt failed here; another node may succeed
│   ├── GroupLost         chunks of other members of a prefill group are missing or damaged
│   ├── Preempted         a more urgent request needs its pages; its KV is saved
│   ├── LoadLost          reused KV of a prompt whose computation has begun is missing or damaged
│   ├── OutOfMemory       the device has too little memory for a step of this request alone
│   └── GrammarLost       the process that followed the request's grammar has ended
├── GrammarError          a grammar that cannot be compiled
│   └── GrammarTooCostly  a grammar that exceeds the limits on time or memory
├── GrammarBusy           a grammar could not be handled now; it may be sent again
├── ProfileError          a profile that cannot be read or lacks a requested entry
├── EngineBroken          the engine fails every step; the process must be restarted
└── StartupError          the node cannot start with this configuration
"""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class WorkerError(Exception):
    """Base class of all errors raised by a worker."""


class RequestRefused(WorkerError):
    """This node can never serve the request, independent of its load. `code` is sent to the frontend."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class RequestFailed(WorkerError):
    """One attempt failed; the frontend may retry it elsewhere, avoiding `suspect_node_id` when it is set."""

    def __init__(self, code: str, message: str, *, suspect_node_id: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.suspect_node_id = suspect_node_id


class GroupLost(RequestFailed):
    """Chunks of other members of a prefill group are missing. The prompt's own node can continue alone."""

    def __init__(self, message: str) -> None:
        super().__init__("group", message)


class LoadLost(RequestFailed):
    """Reused KV of a prompt whose computation has begun is damaged or late. The node computes the prompt again."""

    def __init__(self, message: str) -> None:
        super().__init__("load", message)


class Preempted(RequestFailed):
    """A more urgent request needs the pages of a running answer, whose KV has been saved. It is placed again."""

    def __init__(self) -> None:
        super().__init__("preempted", "a request of a more urgent class needs its KV pages")


class OutOfMemory(RequestFailed):
    """A step needs more memory than the device has. A step of several sequences is divided; a request fails if it needs
    too much by itself.
    """

    def __init__(self, message: str) -> None:
        super().__init__("out_of_memory", message)


class GrammarLost(RequestFailed):
    """The process that followed a request's grammar has ended. `judge`, which blocks, returns the error's cause."""

    def __init__(self, judge: Callable[[], WorkerError]) -> None:
        super().__init__("grammar_lost", "the process that followed the grammar has ended")
        self.judge = judge


class GrammarError(WorkerError):
    """A grammar is malformed, not supported or too large."""


class GrammarTooCostly(GrammarError):
    """A grammar takes more time or memory than one grammar may, or makes its compiler fail."""


class GrammarBusy(WorkerError):
    """Too many grammars wait, or the process that handled this one was ended from outside."""


class ProfileError(WorkerError):
    """A file is not a profile of this version, or a profile lacks a requested entry."""


class EngineBroken(WorkerError):
    """Consecutive engine steps failed; the message names the cause of the last failure."""


class StartupError(WorkerError):
    """The node cannot start: the message names what was found, what was expected and what to do."""


def sequence_error(error: Exception) -> WorkerError:
    """Convert an exception raised for one sequence of a batch into the error that ends this sequence.

    Grammar errors are final, since the sequence would fail in the same way on any node; all others may be retried. The
    cause of a GrammarLost is found out later, off the engine thread.
    """
    if isinstance(error, GrammarLost):
        return error
    if isinstance(error, GrammarError):
        return RequestRefused("grammar", f"the answer cannot continue under its grammar: {error}")
    log.error("one sequence of a step failed", exc_info=error)
    return RequestFailed("engine", f"the sequence's logits cannot be used: {type(error).__name__}: {error}")
