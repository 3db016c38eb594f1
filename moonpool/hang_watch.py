"""Which processes have been silent for too long. Pure: time is an argument."""

from collections.abc import Set


class HangWatch:
    """Counts each node's silence. A timeout of 0 suspects nobody.

    Silence counts only while somebody looked: after a pause longer than `longest_look_s` it was this process, or the
    whole machine, that stood still.
    """

    def __init__(self, timeout_s: float, longest_look_s: float) -> None:
        self._timeout_s = timeout_s
        self._longest_look_s = longest_look_s
        self._silent_since_s: dict[str, float] = {}
        self._looked_s: float | None = None

    def look(self, now_s: float, silent: Set[str]) -> dict[str, float]:
        """It is `now_s`, and these nodes are silent: seconds of silence of those that hang, each told once."""
        if self._looked_s is not None and now_s - self._looked_s > self._longest_look_s:
            self._silent_since_s.clear()
        self._looked_s = now_s
        self._silent_since_s = {node_id: self._silent_since_s.get(node_id, now_s) for node_id in sorted(silent)}
        if not self._timeout_s:
            return {}
        hung = {
            node_id: now_s - since_s
            for node_id, since_s in self._silent_since_s.items()
            if now_s - since_s >= self._timeout_s
        }
        for node_id in hung:
            del self._silent_since_s[node_id]
        return hung
