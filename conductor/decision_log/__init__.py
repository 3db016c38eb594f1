"""Decision log on disk: a record per request with its decisions and their reasons, and all events for replay."""

from conductor.decision_log.event_log import (
    FoundDecision,
    RecordedRun,
    ReplayStep,
    find_decisions,
    find_ends,
    recorded_runs,
    replay,
)
from conductor.decision_log.record_search import FoundRecords, find_records
from conductor.decision_log.writer import DecisionLog

__all__ = [
    "DecisionLog",
    "FoundDecision",
    "FoundRecords",
    "RecordedRun",
    "ReplayStep",
    "find_decisions",
    "find_ends",
    "find_records",
    "recorded_runs",
    "replay",
]
