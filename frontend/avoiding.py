"""The nodes that one request stays away from: those that failed it. Pure; time is an argument."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_UNKNOWN: Final = 0  # incarnation of a node that nobody knows


@dataclass(frozen=True, slots=True)
class _Failure:
    incarnation: int
    count: int  # how often this incarnation failed the request
    until_s: float  # not asked again before, even where there is nobody else


class Avoided:
    """A node that failed the request is asked again when it is another process, or when there is nobody else.

    In the latter case only after a pause, which doubles from `hold_off_s` to `longest_s` with each failure: a process
    that hangs would fail one attempt after the other.
    """

    def __init__(self, hold_off_s: float, longest_s: float, incarnation_of: Callable[[str], int]) -> None:
        """`incarnation_of(node_id)`: the one in the cluster now; 0 where that is not known."""
        self._hold_off_s = hold_off_s
        self._longest_s = longest_s
        self._incarnation_of = incarnation_of
        self._failures: dict[str, _Failure] = {}

    def add(self, node_id: str, incarnation: int, now_s: float) -> None:
        """The node failed the request; `incarnation` 0 where it is not known."""
        former = self._failures.get(node_id)
        count = former.count + 1 if former is not None and former.incarnation == incarnation else 1
        pause_s = min(self._hold_off_s * 2 ** (count - 1), self._longest_s)
        self._failures[node_id] = _Failure(incarnation, count, now_s + pause_s)

    def nodes(self) -> list[str]:
        """All that failed the request and are not known to have been replaced."""
        return sorted(node_id for node_id, failure in self._failures.items() if not self._is_replaced(node_id, failure))

    def held_off(self, now_s: float) -> list[str]:
        """Of those, the ones that failed so lately that waiting is better than asking them."""
        return [node_id for node_id in self.nodes() if now_s < self._failures[node_id].until_s]

    def _is_replaced(self, node_id: str, failure: _Failure) -> bool:
        current = self._incarnation_of(node_id)
        return _UNKNOWN not in (current, failure.incarnation) and current != failure.incarnation
