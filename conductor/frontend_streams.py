"""Open scheduling streams by frontend, and the loss of frontends whose streams have ended."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

__all__ = ["RESUME_S", "FrontendStreams"]

RESUME_S: Final = 2.0  # a frontend that lives opens a broken stream again within half a second


@dataclass
class _Frontend:
    incarnation: int
    num_streams: int = 0
    losing: asyncio.TimerHandle | None = None


class FrontendStreams:
    """Calls `on_lost(frontend_id)` once a frontend's streams have ended for RESUME_S, or a successor has come."""

    def __init__(self, on_lost: Callable[[str], None]) -> None:
        self._on_lost = on_lost
        self._known: dict[str, _Frontend] = {}

    def opened(self, frontend_id: str, incarnation: int) -> None:
        """Record a stream of this incarnation; another one known under the same id is lost."""
        known = self._known.get(frontend_id)
        if known is not None and known.incarnation != incarnation:
            self._lose(frontend_id)
            known = None
        if known is None:
            known = self._known[frontend_id] = _Frontend(incarnation)
        if known.losing is not None:
            known.losing.cancel()
            known.losing = None
        known.num_streams += 1

    def closed(self, frontend_id: str, incarnation: int) -> None:
        """Record the end of a stream."""
        known = self._known.get(frontend_id)
        if known is None or known.incarnation != incarnation:
            return
        known.num_streams -= 1
        if known.num_streams == 0:
            known.losing = asyncio.get_running_loop().call_later(RESUME_S, self._lose, frontend_id)

    def close(self) -> None:
        """Report no further losses."""
        for known in self._known.values():
            if known.losing is not None:
                known.losing.cancel()
        self._known.clear()

    def _lose(self, frontend_id: str) -> None:
        known = self._known.pop(frontend_id)
        if known.losing is not None:
            known.losing.cancel()
        self._on_lost(frontend_id)
