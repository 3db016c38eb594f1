"""Errors of the workers.

WorkerError
├── RequestRefused        the request itself is at fault (too long, unknown model): not retried
├── RequestFailed         this attempt failed here; another node may do better
│   └── GroupLost         the other members' chunks of a prompt do not come, or not right
├── GrammarError          a grammar that cannot be compiled: says what is wrong with it
├── ProfileError          a cost profile that cannot be read, or does not have what is asked
├── EngineBroken          the engine computes nothing any more; only another process may do better
└── StartupError          the node cannot start with this configuration
"""

import logging

log = logging.getLogger(__name__)


class WorkerError(Exception):
    """Base of all errors raised by a worker."""


class RequestRefused(WorkerError):
    """The request can never be served by this node, whatever its load. `code` is sent to the frontend."""

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
    """What other members of a prefill group were to compute is missing. The prompt's own node can go on alone."""

    def __init__(self, message: str) -> None:
        super().__init__("group", message)


class GrammarError(WorkerError):
    """A grammar that is malformed, not supported or too large."""


class ProfileError(WorkerError):
    """A file that is no cost profile of this version, or a profile without what it was asked for."""


class EngineBroken(WorkerError):
    """Step after step failed; the message names the last one's cause."""


class StartupError(WorkerError):
    """The node cannot start: the message says what was found, what was expected and what to do."""


def sequence_error(error: Exception) -> WorkerError:
    """Convert an exception that concerns one sequence of a batch into the error with which that sequence ends.

    Grammar errors are final, since the sequence would fail in the same way on any node; all others may be retried.
    """
    if isinstance(error, GrammarError):
        return RequestRefused("grammar", f"the answer cannot be held to its grammar any further: {error}")
    log.error("a sequence failed alone", exc_info=error)
    return RequestFailed("engine", f"its logits could not be used: {type(error).__name__}: {error}")
