"""Terminal output of `serve`: start-up, restarts, and the log lines that need attention."""

import json
import re
from typing import TextIO

from moonpool.supervision.supervisor import NodeState, SupervisorEvents

_RECORD = re.compile(r"^\d\d:\d\d:\d\d\.\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_ROUTINE = frozenset({"DEBUG", "INFO"})


class TerminalView(SupervisorEvents):
    """Writes one line per event to `stream`, and all log lines if `verbose`, otherwise only the important ones.

    During start-up these are errors, since processes that do not find each other yet are normal; later also warnings;
    during shutdown none, since processes lose each other.
    """

    def __init__(self, stream: TextIO, *, verbose: bool) -> None:
        self._stream = stream
        self._verbose = verbose
        self._shown: dict[str, bool] = {}
        self._hidden = _ROUTINE | {"WARNING"}
        self._stopping = False

    def on_ready(self, state: NodeState, seconds: float) -> None:
        again = f" again (restart {state.restarts})" if state.restarts else ""
        self.show(f"  {state.node_id:<18} ready{again} in {seconds:.1f} s")

    def on_exit(self, state: NodeState, cause: str, restart_in_s: float | None) -> None:
        then = "given up" if restart_in_s is None else f"starting again in {restart_in_s:.1f} s"
        self.show(f"  {state.node_id:<18} ended ({cause}); {then}")

    def on_left(self, state: NodeState) -> None:
        self.show(f"  {state.node_id:<18} has left")

    def on_line(self, node_id: str, line: str) -> None:
        if self._verbose or self._is_worth_showing(node_id, line):
            self.show(f"[{node_id}] {line}")

    def started(self) -> None:
        """Note that the cluster is up."""
        self._hidden = _ROUTINE

    def stopping(self) -> None:
        """Note that the cluster shuts down."""
        self._stopping = True

    def _is_worth_showing(self, node_id: str, line: str) -> bool:
        """Return True for records of the shown levels, the traceback after one, and lines before any record."""
        if self._stopping:
            return False
        level = record_level(line)
        if level is not None:
            self._shown[node_id] = level not in self._hidden
        return self._shown.get(node_id, True)

    def show(self, text: str) -> None:
        """Print one line; a closed terminal is ignored."""
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            pass


def record_level(line: str) -> str | None:
    """Return the level of a log record in either format; None for a line that starts no record."""
    match = _RECORD.match(line)
    if match:
        return match.group(1)
    if line.startswith("{"):
        try:
            record = json.loads(line)
        except ValueError:
            return None
        level = record.get("level")
        return level.upper() if isinstance(level, str) else None
    return None
