"""Which tenants there are, as front doors tell that ask this conductor. No I/O."""

import time
from collections.abc import Callable, Iterable, Sequence

__all__ = ["FrontDoors"]

_MOST = 1000  # front doors
_MEMORY_S = 60.0  # after which one that was heard no more is gone
_SHOWN = 5


class FrontDoors:
    """A tenant is an API key's digest; where no key is asked for, all requests are of the one tenant ""."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[str, tuple[float, frozenset[str]]] = {}  # when, and the tenants, the last one told last

    def hear(self, frontend_id: str, tenants: Iterable[str]) -> None:
        """A front door told its tenants; "" as an id is that of one that does not tell."""
        if not frontend_id:
            return
        self._told.pop(frontend_id, None)
        self._told[frontend_id] = self._clock(), frozenset(tenants)
        if len(self._told) > _MOST:
            del self._told[next(iter(self._told))]

    def problem_with(self, tenants: Sequence[str]) -> str:
        """Why some of them can never be met with here; "" if none, or if no front door has told its tenants."""
        since_s = self._clock() - _MEMORY_S
        told = {name: known for name, (at_s, known) in self._told.items() if at_s >= since_s}
        known = frozenset().union(*told.values())
        strange = [tenant for tenant in tenants if tenant not in known]
        if not told or not strange:
            return ""
        who = f"{', '.join(sorted(told)[:_SHOWN])}{' and others' if len(told) > _SHOWN else ''}"
        if not known - {""}:
            return f"tenant {strange[0]!r} can never come: {who} ask for no API key, so that there is one tenant alone"
        some = ", ".join(sorted(known)[:_SHOWN])
        more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        return f"tenant {strange[0]!r} is of no API key that {who} know; there are {some}{more}"
