"""Scheduling order of the requests that wait on a node: age, class, tenants' shares, deadline.

Conductors use it for predictions. The order, first to last:

1. requests that have waited longer than the bound, oldest first: no newer one overtakes them, whatever its class;
2. the class with the lowest level;
3. within a class the account with the smallest ticket. Tickets are virtual start times (start-time fair queueing,
   Goyal et al., SIGCOMM 1996), assigned by the conductor;
4. within an account the lowest priority, then the earliest deadline. This order alone decides which request of an
   account uses which of its tickets: the first request has the smallest.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

RequestKey = tuple[str, int]  # request id, attempt
QueueRank = tuple[int, float, int, int, float, float, int]


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A request's scheduling parameters. Times are seconds of the node's clock."""

    arrived_s: float = 0.0  # at the frontend
    due_s: float = 0.0  # when its first token is due
    ages_s: float = 0.0  # from this time on no newer request precedes it
    level: int = 0  # of its class: lower goes first
    account: str = ""  # account that is charged
    start_ns: int = 0  # ticket of this request
    priority: int = 0  # among the account's own requests: lower goes first

    def rank(self, now_s: float, number: int = 0) -> QueueRank:
        """Return a sort key for the order above; `number` breaks ties by arrival."""
        if now_s >= self.ages_s:
            return 0, self.arrived_s, 0, 0, 0.0, 0.0, number
        return 1, self.level, self.start_ns, self.priority, self.due_s, self.arrived_s, number

    def step_rank(self, now_s: float) -> tuple[int, int]:
        """Return a sort key by age and class alone: running answers that are equal by it take turns."""
        return (0, 0) if now_s >= self.ages_s else (1, self.level)


ALWAYS_NEXT = QueueEntry()  # for requests without an entry: first come, first served among themselves


class WaitQueue:
    """All requests that wait on a node, in any stage; each stage queries its own subset."""

    def __init__(self) -> None:
        self._entries: dict[RequestKey, tuple[QueueEntry, int]] = {}
        self._own: dict[tuple[int, str], list[tuple[int, float, float, int]]] = {}  # by class and account, in order
        self._tickets: dict[tuple[int, str], list[int]] = {}  # the i-th belongs to the i-th of `_own`
        self._joined = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def add(self, key: RequestKey, entry: QueueEntry) -> None:
        """Add a request; replaces the entry of a key that is queued already."""
        self.remove(key)
        self._joined += 1
        self._entries[key] = entry, self._joined
        group = entry.level, entry.account
        insort(self._own.setdefault(group, []), _own_rank(entry, self._joined))
        insort(self._tickets.setdefault(group, []), entry.start_ns)

    def remove(self, key: RequestKey) -> None:
        """Remove a request together with its ticket. Does nothing if it is not queued."""
        found = self._entries.pop(key, None)
        if found is None:
            return
        entry, number = found
        group = entry.level, entry.account
        own, tickets = self._own[group], self._tickets[group]
        at = bisect_left(own, _own_rank(entry, number))
        del own[at], tickets[at]
        if not own:
            del self._own[group], self._tickets[group]

    def rank(self, key: RequestKey, now_s: float) -> QueueRank:
        """Return the sort key of a request now, lowest first. Requests that are not queued precede all others."""
        found = self._entries.get(key)
        return (-1, 0.0, 0, 0, 0.0, 0.0, 0) if found is None else self._placed(*found).rank(now_s, found[1])

    def first(self, keys: Iterable[RequestKey], now_s: float) -> RequestKey:
        """Return the first of these requests, of which there must be at least one."""
        return min(keys, key=lambda key: self.rank(key, now_s))

    def next_ahead(
        self, waiting: Collection[RequestKey], ahead: Collection[RequestKey], num_permits: int, now_s: float
    ) -> RequestKey | None:
        """Return the waiting request to prepare next, beside those in `ahead`; None if none may be prepared yet.

        A request that precedes one in `ahead` needs none of the `num_permits`, so that an urgent request does not
        wait until less urgent ones are computed. At most twice as many are granted.
        """
        if not waiting or len(ahead) >= 2 * num_permits:
            return None
        first = self.first(waiting, now_s)
        rank = self.rank(first, now_s)
        return None if sum(self.rank(key, now_s) < rank for key in ahead) >= num_permits else first

    def entry(self, key: RequestKey) -> QueueEntry:
        """Return the entry of a queued request with the ticket that it uses now."""
        return self._placed(*self._entries[key])

    def _placed(self, entry: QueueEntry, number: int) -> QueueEntry:
        group = entry.level, entry.account
        ticket = self._tickets[group][bisect_left(self._own[group], _own_rank(entry, number))]
        return entry if ticket == entry.start_ns else replace(entry, start_ns=ticket)


def _own_rank(entry: QueueEntry, number: int) -> tuple[int, float, float, int]:
    return entry.priority, entry.due_s, entry.arrived_s, number
