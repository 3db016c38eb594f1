"""Log of the numbered events of one pool node incarnation, bounded in bytes."""

from collections import deque
from typing import NamedTuple

from kvpool.events import BlockRun, PoolEvents, Tier, contents_sum

_MAX_MESSAGE_NBYTES = 1 << 20
_EVENT_NBYTES = 256  # approximate memory of an event without its chain
_MAX_WITHOUT_SUM = 64


class _Event(NamedTuple):
    run: BlockRun
    before: Tier | None  # tier in which the node held the blocks until then; None: it did not
    now: Tier | None  # tier in which it has held them since


class EventLog:
    """Events by number; returns them as the messages described in `kvpool.events`.

    Checksums are computed for several events at a time, at the latest when they are read: no put waits for its own.
    """

    def __init__(self, incarnation: int, capacity_nbytes: int) -> None:
        self.incarnation = incarnation
        self.seq = 0  # of the last event
        self._capacity_nbytes = capacity_nbytes
        self._nbytes = 0
        self._events: deque[_Event] = deque()
        self._sums: deque[int] = deque()  # contents sums as of the first events
        self._sum = 0  # as of the last of them

    def append(self, kv_namespace: bytes, chain: bytes, before: Tier | None, now: Tier | None) -> None:
        """Append an event: the blocks of `chain` (16 bytes each) moved from tier `before` to tier `now`.

        None means that the node does not hold them. Drops the oldest events beyond the capacity.
        """
        self.seq += 1
        self._events.append(_Event(BlockRun(kv_namespace, chain, now or Tier.DRAM), before, now))
        self._nbytes += _EVENT_NBYTES + len(chain)
        is_full = self._nbytes > self._capacity_nbytes
        if is_full or len(self._events) - len(self._sums) >= _MAX_WITHOUT_SUM:
            self._add_sums()
        while self._nbytes > self._capacity_nbytes and len(self._events) > 1:
            self._sums.popleft()
            self._nbytes -= _EVENT_NBYTES + len(self._events.popleft().run.chain)

    @property
    def contents_sum(self) -> int:
        """Checksum of all blocks held; see `kvpool.events`."""
        self._add_sums()
        return self._sum

    def after(self, incarnation: int, seq: int) -> list[PoolEvents] | None:
        """Return the events after `seq`; None if some were dropped or are of another incarnation (take a snapshot)."""
        first_kept = self.seq - len(self._events) + 1
        if incarnation != self.incarnation or not first_kept - 1 <= seq <= self.seq:
            return None
        self._add_sums()
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
            if (stored and event.now is None) or nbytes > _MAX_MESSAGE_NBYTES:
                flush()
            (removed if event.now is None else stored).append(event.run)
            nbytes += len(event.run.chain)
            at, sum_then = at + 1, self._sums[i]
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

    def _add_sums(self) -> None:
        """Compute the contents sums of the events that have none yet."""
        for i in range(len(self._sums), len(self._events)):
            run, before, now = self._events[i]
            if before is not None:
                self._sum -= contents_sum(run.kv_namespace, run.chain, before)
            if now is not None:
                self._sum += contents_sum(run.kv_namespace, run.chain, now)
            self._sum %= 2**64
            self._sums.append(self._sum)
