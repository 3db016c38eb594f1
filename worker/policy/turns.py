"""Who goes first of those that wait on a node: by age, class, tenants' shares, deadline. Conductors predict by it.

The order, first to last:

1. who has waited for longer than the bound, oldest first: nothing newer goes before it, whatever its class;
2. the class of the lowest level;
3. within a class the account whose ticket is smallest. Tickets are virtual start times (start-time fair queueing,
   Goyal et al., SIGCOMM 1996), given by the conductor;
4. within an account the lowest priority, then the earliest deadline. Which request of an account uses which of the
   account's tickets is decided by that order alone: the first one has the smallest.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

__all__ = ["ALWAYS_NEXT", "Key", "Line", "Rank", "Turn"]

Key = tuple[str, int]  # request id, attempt
Rank = tuple[int, float, int, int, float, float, int]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request's claim to be served. Times are seconds of the node's clock."""

    arrived_s: float = 0.0  # at the front door
    due_s: float = 0.0  # when its first token should be there
    ages_s: float = 0.0  # from then on nothing newer goes before it
    level: int = 0  # of its class: lower goes first
    account: str = ""  # who is charged
    start_ns: int = 0  # the ticket that it brings
    priority: int = 0  # among the account's own: lower goes first

    def rank(self, now_s: float, number: int = 0) -> Rank:
        """Sorts by the order above; `number` tells equals apart: who came first."""
        if now_s >= self.ages_s:
            return 0, self.arrived_s, 0, 0, 0.0, 0.0, number
        return 1, self.level, self.start_ns, self.priority, self.due_s, self.arrived_s, number


ALWAYS_NEXT = Turn()  # of whoever has none: first come, first served among themselves


class Line:
    """All who wait on a node, in whatever stage. Each stage asks about its own."""

    def __init__(self) -> None:
        self._turns: dict[Key, tuple[Turn, int]] = {}
        self._own: dict[tuple[int, str], list[tuple[int, float, float, int]]] = {}  # by class and account, in order
        self._tickets: dict[tuple[int, str], list[int]] = {}  # the i-th is used by the i-th of `_own`
        self._joined = 0

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, key: object) -> bool:
        return key in self._turns

    def join(self, key: Key, turn: Turn) -> None:
        """Stand in line. A key that stands there already takes its new turn."""
        self.leave(key)
        self._joined += 1
        self._turns[key] = turn, self._joined
        group = turn.level, turn.account
        insort(self._own.setdefault(group, []), _own_rank(turn, self._joined))
        insort(self._tickets.setdefault(group, []), turn.start_ns)

    def leave(self, key: Key) -> None:
        """Served, or given up: its ticket goes with it. Nothing happens to who does not stand in line."""
        found = self._turns.pop(key, None)
        if found is None:
            return
        turn, number = found
        group = turn.level, turn.account
        own, tickets = self._own[group], self._tickets[group]
        at = bisect_left(own, _own_rank(turn, number))
        del own[at], tickets[at]
        if not own:
            del self._own[group], self._tickets[group]

    def rank(self, key: Key, now_s: float) -> Rank:
        """Where it stands now: lower goes first. Who does not stand in line comes before all who do."""
        found = self._turns.get(key)
        return (-1, 0.0, 0, 0, 0.0, 0.0, 0) if found is None else self._placed(*found).rank(now_s, found[1])

    def first(self, keys: Iterable[Key], now_s: float) -> Key:
        """Of some, at least one, the one whose turn it is."""
        return min(keys, key=lambda key: self.rank(key, now_s))

    def next_ahead(self, waiting: Collection[Key], ahead: Collection[Key], num_places: int, now_s: float) -> Key | None:
        """Of those that wait, who is worked ahead on next, beside those that are already; None: nobody yet.

        Who goes before one that is worked on already needs none of the `num_places`: an urgent request does not wait
        until less urgent ones have been computed. Twice as many is the most that there are.
        """
        if not waiting or len(ahead) >= 2 * num_places:
            return None
        first = self.first(waiting, now_s)
        rank = self.rank(first, now_s)
        return None if sum(self.rank(key, now_s) < rank for key in ahead) >= num_places else first

    def turn(self, key: Key) -> Turn:
        """Of one who stands in line, with the ticket that it uses now."""
        return self._placed(*self._turns[key])

    def _placed(self, turn: Turn, number: int) -> Turn:
        group = turn.level, turn.account
        ticket = self._tickets[group][bisect_left(self._own[group], _own_rank(turn, number))]
        return turn if ticket == turn.start_ns else replace(turn, start_ns=ticket)


def _own_rank(turn: Turn, number: int) -> tuple[int, float, float, int]:
    return turn.priority, turn.due_s, turn.arrived_s, number
