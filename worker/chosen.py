"""A sequence's next token, and what becomes of a sequence that cannot take one. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moonpool_proto.v1.worker_pb2 import LogProbs
from worker.errors import GrammarError, RequestFailed, RequestRefused, WorkerError
from worker.request import Sequence

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A row's next token, with its log-probabilities if they were asked for."""

    token: int
    logprobs: LogProbs | None = None


def append(sequence: Sequence, token: int) -> bool:
    """Let the sequence go on with its token. False if it cannot; its `error` says why."""
    try:
        sequence.append(token)
    except Exception as error:
        sequence.error = named(error)
    return sequence.error is None


def named(error: Exception) -> WorkerError:
    """What a sequence that failed alone failed by."""
    if isinstance(error, GrammarError):  # it would end so on any node
        return RequestRefused("grammar", f"the answer cannot be held to its grammar any further: {error}")
    log.error("a sequence failed alone", exc_info=error)
    return RequestFailed("engine", f"its logits could not be used: {type(error).__name__}: {error}")
