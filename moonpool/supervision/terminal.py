"""What the terminal shows of a cluster: who became ready when, restarts, and the lines worth showing."""

import json
import re
from typing import TextIO

from moonpool.supervision.supervisor import NodeState, SupervisorEvents

_RECORD = re.compile(r"^\d\d:\d\d:\d\d\.\d+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")
_ROUTINE = frozenset({"DEBUG", "INFO"})


class TerminalView(SupervisorEvents):
    """Writes one line per event to `stream`; of the log lines, all when `verbose`, else those that need a reader.

    While the cluster comes up those are errors: that a process does not find another yet is no news. Then warnings
    too. Once it goes down, none: processes lose each other.
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
        """The cluster is up."""
        self._hidden = _ROUTINE

    def stopping(self) -> None:
        """The cluster goes down."""
        self._stopping = True

    def _is_worth_showing(self, node_id: str, line: str) -> bool:
        """Records of the levels in question, a traceback's lines after them, and what comes before any record."""
        if self._stopping:
            return False
        level = record_level(line)
        if level is not None:
            self._shown[node_id] = level not in self._hidden
        return self._shown.get(node_id, True)

    def show(self, text: str) -> None:
        """One line; a terminal that is gone does not matter."""
        try:
            print(text, file=self._stream, flush=True)
        except OSError:
            pass


def record_level(line: str) -> str | None:
    """The level of a log record in either format; None for a line that begins no record."""
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
