"""The policy, its clock and its log: the one door through which a live cluster's events enter. No I/O but the log's."""

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
    """Takes events on the event loop's thread, one after the other."""

    def __init__(self, config: ConductorConfig, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Raises ConfigError for a decision log that cannot be begun."""
        policy, logged = config.policy, config.decision_log
        if logged.decision_log is not None:
            policy = replace(policy, explain=logged.decision_log_candidates)
        self.policy = Conductor(policy)
        self._clock = clock
        self.log: DecisionLog | None = None
        if logged.decision_log is not None:
            self.log = DecisionLog(logged.decision_log, logged, policy, now_ns=clock())

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
        for warning in self.policy.take_warnings():
            log.warning("%s", warning)
        if self.log is not None:
            self.log.note(now_ns, event, decisions, keys)
        return decisions

    def samples(self) -> Iterator[conductor_pb2.Sample]:
        """What the log has written and left out, as numbers."""
        for name, label, key in (("lines", "kind", "written"), ("lost", "reason", "lost")):
            for value, count in sorted(self.log.counts()[key].items()) if self.log is not None else ():
                yield sample(f"decision_log_{name}_total", count, **{label: value})

    def close(self) -> None:
        """Close the log; what still happens is not written."""
        if self.log is not None:
            self.log.close()
            self.log = None


def _tell(before: frozenset[str], now: frozenset[str]) -> None:
    for node_id in sorted(now - before):
        log.warning("node %s is suspect: it has stopped reporting and gets no work until it does again", node_id)
    for node_id in sorted(before - now):
        log.warning("node %s is no longer suspect: it reported again or has left", node_id)
