"""Streams of one node's numbered block events to the directories that follow it."""

import asyncio
from collections.abc import AsyncIterator, Callable

from kvpool.events import PoolEvents
from kvpool.policy.event_log import EventLog

__all__ = ["EventStreams"]


class EventStreams:
    """Any number of streams of one log. Lives on the event loop."""

    def __init__(self, log: EventLog, snapshot: Callable[[], list[PoolEvents]], heartbeat_s: float) -> None:
        """`snapshot()` returns the messages of a snapshot now; an idle stream sends a heartbeat every `heartbeat_s`."""
        self._log = log
        self._snapshot = snapshot
        self._heartbeat_s = heartbeat_s
        self._changed = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """Send the events that have been appended to the log."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def close(self) -> None:
        """End all streams."""
        self._is_closed = True
        self.wake()

    async def read(self, incarnation: int, after_seq: int) -> AsyncIterator[PoolEvents]:
        """Yield the events after (incarnation, after_seq), or from a snapshot; heartbeats when idle."""
        quiet = True
        while not self._is_closed:
            changed = self._changed
            messages = self._log.after(incarnation, after_seq)
            if messages is None:
                messages = self._snapshot()
            if quiet and not messages:
                messages = [PoolEvents(self._log.incarnation, after_seq, contents_sum=self._log.contents_sum)]
            for message in messages:
                yield message
                incarnation, after_seq = message.incarnation, message.seq
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await changed.wait()
                quiet = False
            except TimeoutError:
                quiet = True
