"""What was decided and why, kept on disk: a record per request, and every event for replays. It decides nothing."""

from conductor.decision_log.event_log import Life, Step, lives, replay
from conductor.decision_log.record_search import Found, find_records
from conductor.decision_log.writer import DecisionLog

__all__ = ["DecisionLog", "Found", "Life", "Step", "find_records", "lives", "replay"]
