"""Policy, clock and decision log of a live conductor: the only entry point for events. The only I/O is the log's."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from conductor.config import ConductorConfig
from conductor.decision_log import DecisionLog
from conductor.directory.feeds import sample
from conductor.policy import Conductor
from conductor.policy.decisions import Decision
from conductor.policy.events import Event
from moonpool_proto.v1 import conductor_pb2

__all__ = ["Core"]

log = logging.getLogger(__name__)
_NO_KEYS = np.zeros(0, np.uint64)


class Core:
    """Policy of a live conductor with its clock and decision log. Must be called on the event loop's thread."""

    def __init__(self, config: ConductorConfig, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Create the policy and open the decision log. Raises ConductorConfigError if the log cannot be opened."""
        policy, logged = config.policy, config.decision_log
        if logged.decision_log is not None:
            policy = replace(policy, explain=logged.decision_log_candidates)
        self.policy = Conductor(policy)
        self._clock = clock
        self.log: DecisionLog | None = None
        if logged.decision_log is not None:
            self.log = DecisionLog(logged.decision_log, logged, policy, now_ns=clock())

    def now_ns(self) -> int:
        """Return the policy's time in nanoseconds of a monotonic clock."""
        return self._clock()

    def handle(self, event: Event, keys: NDArray[np.uint64] = _NO_KEYS) -> list[Decision]:
        """Return the policy's decisions on an event.

        `keys`: short keys of the prompt's blocks, uint64 [n], for the log.
        """
        now_ns = self._clock()
        before = self.policy.suspects
        decisions = self.policy.on_event(now_ns, event)
        if self.policy.suspects is not before:
            _log_suspects(before, self.policy.suspects)
        for warning in self.policy.take_warnings():
            log.warning("%s", warning)
        if self.log is not None:
            self.log.note(now_ns, event, decisions, keys)
        return decisions

    @property
    def last_event(self) -> tuple[int, int] | None:
        """Place of the last event in the event log, as in `DecisionLog.last_event`; None if there is no log."""
        return None if self.log is None else self.log.last_event

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """Yield the numbers of lines that the decision log wrote and dropped."""
        for name, label, key in (("lines", "kind", "written"), ("lost", "reason", "lost")):
            for value, count in sorted(self.log.counts()[key].items()) if self.log is not None else ():
                yield sample(f"decision_log_{name}_total", count, **{label: value})

    def close(self) -> None:
        """Close the log; later events are not written."""
        if self.log is not None:
            self.log.close()
            self.log = None


def _log_suspects(before: frozenset[str], now: frozenset[str]) -> None:
    for node_id in sorted(now - before):
        log.warning("node %s is suspect: it stopped reporting and gets no work until it reports again", node_id)
    for node_id in sorted(before - now):
        log.warning("node %s is no longer suspect: it reported again or left", node_id)
