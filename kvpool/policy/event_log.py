"""Log of the numbered events of one pool node incarnation, bounded in bytes."""

from collections import deque
from typing import NamedTuple

from kvpool.events import BlockRun, PoolEvents, Tier, contents_sum

_MAX_MESSAGE_NBYTES = 1 << 20
_EVENT_NBYTES = 256  # approximate memory of an event without its chain


class _Event(NamedTuple):
    stored: bool
    run: BlockRun
    contents_sum: int  # as of this event


class EventLog:
    """Events by number; returns them as the messages described in `kvpool.events`."""

    def __init__(self, incarnation: int, capacity_nbytes: int) -> None:
        self.incarnation = incarnation
        self.seq = 0  # of the last event
        self.contents_sum = 0  # of all blocks stored; see `kvpool.events`
        self._capacity_nbytes = capacity_nbytes
        self._nbytes = 0
        self._events: deque[_Event] = deque()

    def append(self, kv_namespace: bytes, chain: bytes, before: Tier | None, now: Tier | None) -> None:
        """Append an event: the blocks of `chain` (16 bytes each) moved from tier `before` to tier `now`.

        None means that the node does not hold them. Drops the oldest events beyond the capacity.
        """
        total = self.contents_sum
        if before is not None:
            total -= contents_sum(kv_namespace, chain, before)
        if now is not None:
            total += contents_sum(kv_namespace, chain, now)
        self.contents_sum = total % 2**64
        self.seq += 1
        run = BlockRun(kv_namespace, chain, now or Tier.DRAM)
        self._events.append(_Event(now is not None, run, self.contents_sum))
        self._nbytes += _EVENT_NBYTES + len(chain)
        while self._nbytes > self._capacity_nbytes and len(self._events) > 1:
            self._nbytes -= _EVENT_NBYTES + len(self._events.popleft().run.chain)

    def after(self, incarnation: int, seq: int) -> list[PoolEvents] | None:
        """Return the events after `seq`; None if some were dropped or are of another incarnation (take a snapshot)."""
        first_kept = self.seq - len(self._events) + 1
        if incarnation != self.incarnation or not first_kept - 1 <= seq <= self.seq:
            return None
        messages: list[PoolEvents] = []
        stored: list[BlockRun] = []
        removed: list[BlockRun] = []
        nbytes, at, sum_then = 0, seq, 0

        def flush() -> None:
            nonlocal nbytes
            if stored or removed:
                messages.append(
                    PoolEvents(
                        self.incarnation, at, stored=tuple(stored), removed=tuple(removed), contents_sum=sum_then
                    )
                )
                stored.clear()
                removed.clear()
                nbytes = 0

        for i in range(seq - first_kept + 1, len(self._events)):
            event = self._events[i]
            # Readers apply a message's removals first, so storing a block and then removing it takes two messages.
            if (stored and not event.stored) or nbytes > _MAX_MESSAGE_NBYTES:
                flush()
            (stored if event.stored else removed).append(event.run)
            nbytes += len(event.run.chain)
            at, sum_then = at + 1, event.contents_sum
        flush()
        return messages

    def snapshot(self, blocks: dict[tuple[bytes, Tier], bytearray]) -> list[PoolEvents]:
        """Return the messages of a snapshot now; `blocks` maps (namespace, tier) to all chain keys, concatenated."""
        runs = [
            BlockRun(kv_namespace, bytes(chain[start : start + _MAX_MESSAGE_NBYTES]), tier)
            for (kv_namespace, tier), chain in blocks.items()
            for start in range(0, len(chain), _MAX_MESSAGE_NBYTES)
        ]
        begin = PoolEvents(self.incarnation, self.seq, snapshot_begin=True)
        end = PoolEvents(self.incarnation, self.seq, snapshot_end=True, contents_sum=self.contents_sum)
        return [begin, *(PoolEvents(self.incarnation, self.seq, stored=(run,)) for run in runs), end]
