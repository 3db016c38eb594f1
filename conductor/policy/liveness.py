"""Who reports and who has fallen silent: a process that hangs keeps its streams open and says nothing on them."""

__all__ = ["Liveness", "deaf_ns"]


def deaf_ns(before_ns: int, now_ns: int, timeout_ns: int) -> int:
    """How much of the time between two events nobody listened to nodes, for whom silence of `timeout_ns` matters.

    Where two events lie further apart than half the timeout, it was the conductor that stood still, and its first
    event after that finds the nodes' reports unread.
    """
    passed_ns = now_ns - before_ns
    return passed_ns if 2 * passed_ns > timeout_ns else 0


class Liveness:
    """When each node was last heard of. A timeout of 0 suspects nobody. Silence counts only while somebody listened."""

    def __init__(self, timeout_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._heard_ns: dict[str, int] = {}  # the longest silent first; suspects are not in it
        self._now_ns: int | None = None
        self.suspects: frozenset[str] = frozenset()

    def pass_time(self, now_ns: int) -> frozenset[str]:
        """It is `now_ns`: the nodes that are suspect from now on."""
        if not self._timeout_ns:
            return frozenset()
        unheard_ns = 0 if self._now_ns is None else deaf_ns(self._now_ns, now_ns, self._timeout_ns)
        self._now_ns = now_ns
        if unheard_ns:
            self._heard_ns = {node_id: heard_ns + unheard_ns for node_id, heard_ns in self._heard_ns.items()}
        silent = []
        for node_id, heard_ns in self._heard_ns.items():
            if now_ns - heard_ns <= self._timeout_ns:
                break
            silent.append(node_id)
        for node_id in silent:
            del self._heard_ns[node_id]
        if silent:
            self.suspects |= frozenset(silent)
        return frozenset(silent)

    def hear(self, node_id: str, now_ns: int) -> None:
        """The node joined or reported: whatever was thought of it, it is alive."""
        self.forget(node_id)
        self._heard_ns[node_id] = now_ns

    def forget(self, node_id: str) -> None:
        """The node has left."""
        self._heard_ns.pop(node_id, None)
        if node_id in self.suspects:
            self.suspects -= {node_id}
