"""What was decided and why, kept on disk: a record per request, and every event for replays. It decides nothing."""

from conductor.decision_log.replaying import Life, Step, lives, replay
from conductor.decision_log.searching import Found, search
from conductor.decision_log.settings import DecisionLogConfig
from conductor.decision_log.writer import DecisionLog

__all__ = ["DecisionLog", "DecisionLogConfig", "Found", "Life", "Step", "lives", "replay", "search"]
