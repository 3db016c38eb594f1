"""What was decided and why, kept on disk: a record per request, and every event for replays. It decides nothing."""

from conductor.decision_log.event_log import RecordedRun, ReplayStep, recorded_runs, replay
from conductor.decision_log.record_search import FoundRecords, find_records
from conductor.decision_log.writer import DecisionLog

__all__ = ["DecisionLog", "FoundRecords", "RecordedRun", "ReplayStep", "find_records", "recorded_runs", "replay"]
