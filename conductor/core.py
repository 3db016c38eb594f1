"""The policy, its clock and its log: the one door through which a live cluster's events enter. No I/O but the log."""

import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from conductor.config import ConductorConfig
from conductor.event_log import EventLog
from conductor.policy import Conductor
from conductor.policy.decisions import Decision
from conductor.policy.events import Event

__all__ = ["Core"]

log = logging.getLogger(__name__)
_NO_KEYS = np.zeros(0, np.uint64)


class Core:
    """Takes events on the event loop's thread, one after the other."""

    def __init__(self, config: ConductorConfig, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.policy = Conductor(config.policy)
        self._clock = clock
        self._log: EventLog | None = None
        if config.decision_log is not None:
            self._log = EventLog(
                config.decision_log,
                config.policy,
                max_bytes=config.decision_log_bytes,
                max_files=config.decision_log_files,
            )

    def now_ns(self) -> int:
        """The policy's clock."""
        return self._clock()

    def handle(self, event: Event, keys: NDArray[np.uint64] = _NO_KEYS) -> list[Decision]:
        """Decide on an event. `keys` of the prompt's blocks go to the log only."""
        now_ns = self._clock()
        before = self.policy.suspects
        decisions = self.policy.on_event(now_ns, event)
        if self.policy.suspects is not before:
            _tell(before, self.policy.suspects)
        if self._log is not None:
            try:
                self._log.write(now_ns, event, decisions, keys.tolist())
            except OSError:
                log.exception("the decision log cannot be written; going on without it")
                self._log = None
        return decisions

    def flush(self) -> None:
        """Hand the log's rows to the operating system."""
        if self._log is not None:
            try:
                self._log.flush()
            except OSError:
                log.exception("the decision log cannot be written; going on without it")
                self._log = None

    def close(self) -> None:
        """Close the log; what still happens is not written: a write would begin a new file."""
        if self._log is not None:
            self._log.close()
            self._log = None


def _tell(before: frozenset[str], now: frozenset[str]) -> None:
    for node_id in sorted(now - before):
        log.warning("node %s is suspect: it has stopped reporting and gets no work until it does again", node_id)
    for node_id in sorted(before - now):
        log.warning("node %s is no longer suspect: it reported again or has left", node_id)
