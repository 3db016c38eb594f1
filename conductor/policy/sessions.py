"""The prefill node that each session of a model used last."""

from collections import OrderedDict
from typing import Final

__all__ = ["SessionNodes"]

_MOST_SESSIONS: Final = 1 << 16  # about 15 MB for a model


class SessionNodes:
    """Node ids of the sessions that were used most recently."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[int, str] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._nodes)

    def node_of(self, session: int) -> str:
        """Return the node that the session used last; "" if it is not known, or `session` is 0."""
        return self._nodes.get(session, "")

    def use(self, session: int, node_id: str) -> None:
        """Record that a request of the session was placed on the node."""
        self._nodes[session] = node_id
        self._nodes.move_to_end(session)
        if len(self._nodes) > _MOST_SESSIONS:
            self._nodes.popitem(last=False)
