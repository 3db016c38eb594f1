"""TCP in the kernels of simulated hosts: one `TcpConnection` for each side, with the system calls that may block.

A side has a send buffer and a receive buffer. Bytes leave the send buffer at positions that the seed chooses, while the
other side's receive buffer has room for them; what its process has read is reported back in steps of half a buffer.
The kernel goes on while its process does not run (it may be stopped), and after the socket was closed: it sends the
rest and FIN, and answers later bytes with RST. As Linux:

    close with unread bytes, or SO_LINGER 0     RST instead of FIN; unsent bytes are discarded
    bytes arrive after SHUT_RD and FIN          RST
    RST arrives                                 bytes that have arrived can be read, then ECONNRESET (EPIPE after FIN)
    nothing is heard for TCP_USER_TIMEOUT       ETIMEDOUT, noticed by keepalive, or by what was sent

All fields of a connection are used without locks: simulated threads change only at points of preemption, and these
are at the beginning of system calls.
"""

from __future__ import annotations

import errno
import functools
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from tools.prove.world.network import End
from tools.prove.world.scheduler import SECOND_NS, SimThread, Timer, World, world

__all__ = ["Address", "TcpConnection", "Waiters", "system_error"]

Address = tuple[str, int]

_BUFFER_NBYTES = (8 << 10, 64 << 10, 256 << 10, 256 << 10, 1 << 20)
"""Sizes of the buffers of all connections of one schedule; the seed chooses one."""
_SPLIT = 0.2  # of the steps in which bytes leave a send buffer
_PARTIAL = 0.1  # of the system calls that move bytes
_FEW = 0.02  # of these steps and calls: a few bytes only


def system_error(number: int) -> OSError:
    """Return the error of a system call; its class is that of the number."""
    return OSError(number, os.strerror(number))


def _fewer(most: int, share: float) -> int:
    """Return `most`, or sometimes a smaller positive number."""
    chance = world().chance
    if most <= 1:
        return most
    drawn = chance.random()
    if drawn < _FEW:
        return chance.randint(1, min(most, 64))
    return chance.randint(1, most) if drawn < share else most


class Waiters:
    """Threads that wait for a condition in a system call."""

    def __init__(self) -> None:
        self._threads: dict[SimThread, Callable[[], bool]] = {}

    def wait(self, is_over: Callable[[], bool], until_ns: int | None) -> bool:
        """Block the running thread until the condition holds. Returns False if that takes too long."""
        thread = world().current
        assert thread is not None
        self._threads[thread] = is_over
        try:
            while not is_over():
                left_s = None if until_ns is None else (until_ns - world().now_ns) / SECOND_NS
                if left_s is not None and left_s <= 0:
                    return False
                world().park(left_s)
            return True
        finally:
            del self._threads[thread]

    def wake(self) -> None:
        """Let the threads continue whose condition holds."""
        if self._threads:
            for thread, is_over in list(self._threads.items()):
                if is_over():
                    world().wake(thread)


class TcpConnection:
    """One side of a connection, in its host's kernel."""

    def __init__(self, end: End, own: Address, other: Address) -> None:
        self.own, self.other = own, other
        self.readers, self.writers = Waiters(), Waiters()
        self.received: deque[memoryview] = deque()
        self.num_received = 0  # bytes in the receive buffer
        self.total_received = self.total_sent = 0
        self.has_fin = False  # from the other side
        self.error: int = 0  # not reported yet
        self.is_dead = False  # by an error, which may have been reported already
        self.is_read_shut = self.is_write_shut = False
        self._end = end
        self._world = world()
        self.buffer_nbytes = _buffer_nbytes(self._world)
        self._unsent: deque[memoryview] = deque()
        self._num_unsent = 0
        self._num_unread = 0  # bytes that were sent, as far as the other side has not reported them as read
        self._num_read = 0  # bytes that were read, and not reported yet
        self._fin_sent = self._is_orphan = False
        self._keepalive = 0.0, 0.0, 0.0  # idle_s, interval_s, dead_after_s
        self._watch: Timer | None = None
        self._heard_ns = self._progress_ns = self._world.now_ns
        end.listen(self._on_item, self._on_end)

    # System calls.

    def send(self, views: Sequence[memoryview], *, blocks: bool, until_ns: int | None = None) -> int:
        """Append bytes to the send buffer; returns their number, at least 1. Raises OSError."""
        most = sum(map(len, views))
        taken = 0
        while taken < most:
            if self.error or self.is_dead or self.is_write_shut:
                if taken:
                    return taken
                raise self._take_error() or system_error(errno.EPIPE)
            room = min(most - taken, self.buffer_nbytes - self._num_unsent)
            if room > 0:
                now = _fewer(room, _PARTIAL)
                self._append(views, taken, now)
                taken += now
                self._pump()
                if not blocks or now < room:
                    break
                world().point()
            elif not blocks:
                raise system_error(errno.EAGAIN)
            elif not self.writers.wait(self._can_write, until_ns):
                if taken:
                    break
                raise TimeoutError("timed out")
        return taken

    def receive(
        self, views: Sequence[memoryview], *, blocks: bool, until_ns: int | None = None, takes_all: bool = False
    ) -> int:
        """Move bytes from the receive buffer into the views; returns their number, 0 at the end. Raises OSError.

        With `takes_all`, waits until all views are full, or until the end.
        """
        most = sum(map(len, views))
        taken = 0
        at = _Position(views)
        while taken < most:
            if self.num_received:
                now = min(most - taken, self.num_received)
                if not takes_all:
                    now = _fewer(now, _PARTIAL)
                self._move(at, now)
                taken += now
                if not takes_all or taken == most:
                    break
                world().point()
            elif self._is_at_end():
                error = None if taken else self._take_error()
                if error is not None:
                    raise error
                break
            elif not blocks:
                if taken:
                    break
                raise system_error(errno.EAGAIN)
            else:
                wanted = self._wanted(most - taken) if takes_all else 1
                if not self.readers.wait(functools.partial(self._has, wanted), until_ns):
                    raise TimeoutError("timed out")
        return taken

    def shut(self, *, reading: bool, writing: bool) -> None:
        """End one direction, or both: FIN follows what is in the send buffer."""
        if self.is_dead:
            raise system_error(errno.ENOTCONN)
        self.is_read_shut |= reading
        self.is_write_shut |= writing
        self._pump()
        self._wake()

    def close(self, *, reset: bool) -> None:
        """Leave the connection to the kernel, because its socket was closed."""
        self.is_read_shut = self.is_write_shut = self._is_orphan = True
        if reset or self.num_received:
            self._reset()
        else:
            self._pump()
            self._forget_if_done()

    def take_error(self) -> int:
        """Return the number of the pending error and clear it (SO_ERROR)."""
        number, self.error = self.error, 0
        return number

    @property
    def is_readable(self) -> bool:
        """True if a read would not block."""
        return self.num_received > 0 or self._is_at_end()

    @property
    def is_writable(self) -> bool:
        """True if sending would not block."""
        return self._can_write()

    @property
    def num_acked(self) -> int:
        """Bytes that have arrived at the other side's kernel."""
        return self.total_sent - self._end.nbytes_on_way

    # The kernel.

    def watch(self, idle_s: float, interval_s: float, dead_after_s: float) -> None:
        """Look after silence from now on: keepalive's times, and TCP_USER_TIMEOUT."""
        self._keepalive = idle_s, interval_s, dead_after_s
        self._watch_in(idle_s)

    def _watch_in(self, seconds: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._world.at(seconds, self._look)

    def _look(self) -> None:
        if self.is_dead or self._end.is_closed or self._end.process.is_dead:
            return
        idle_s, interval_s, dead_after_s = self._keepalive
        silent_s = (self._world.now_ns - self._heard_ns) / SECOND_NS
        stuck_s = (self._world.now_ns - self._progress_ns) / SECOND_NS if self._num_unsent else 0.0
        if max(silent_s, stuck_s) >= dead_after_s:
            self._fail(errno.ETIMEDOUT)
            self._end.reset()
        elif silent_s >= idle_s:
            self._end.send(("probe", None), 0)
            self._watch_in(interval_s)
        else:
            self._watch_in(interval_s if self._num_unsent else idle_s - silent_s)

    def _on_item(self, item: tuple[str, Any]) -> None:
        kind, value = item
        self._heard_ns = self._world.now_ns
        if self.is_dead:
            self._end.reset()
        elif kind == "data":
            self._arrived(value)
        elif kind == "read":
            self._num_unread -= value
            self._progress_ns = self._world.now_ns
            self._pump()
            self.writers.wake()
        elif kind == "fin":
            self.has_fin = True
            self._wake()
            self._forget_if_done()
        else:
            self._end.send(("read", 0), 0)

    def _arrived(self, views: list[memoryview]) -> None:
        if self.is_read_shut and self._fin_sent:
            self._reset()
            return
        self.received.extend(views)
        nbytes = sum(map(len, views))
        self.num_received += nbytes
        self.total_received += nbytes
        self.readers.wake()

    def _on_end(self, error: OSError | None) -> None:
        if error is None:
            self.has_fin = True
            self._wake()
        else:
            number = error.errno or errno.ECONNRESET
            self._fail(errno.EPIPE if number == errno.ECONNRESET and self.has_fin else number)

    def _fail(self, number: int) -> None:
        if not self.is_dead:
            self.error, self.is_dead = number, True
            self._discard_unsent()
            self._wake()

    def _reset(self) -> None:
        self._fail(errno.ECONNRESET)
        self._end.reset()

    def _pump(self) -> None:
        """Send what the other side has room for, and FIN at the end."""
        while self._num_unsent and self._num_unread < self.buffer_nbytes and not self.is_dead:
            nbytes = _fewer(min(self._num_unsent, self.buffer_nbytes - self._num_unread), _SPLIT)
            views = self._take_unsent(nbytes)
            self._num_unread += nbytes
            self.total_sent += nbytes
            self._progress_ns = self._world.now_ns
            self._end.send(("data", views), nbytes)
        if self.is_write_shut and not self._num_unsent and not self._fin_sent and not self.is_dead:
            self._fin_sent = True
            self._end.send(("fin", None), 0)

    def _take_unsent(self, nbytes: int) -> list[memoryview]:
        unsent = self._unsent
        self._num_unsent -= nbytes
        views: list[memoryview] = []
        while nbytes:
            view = unsent[0]
            if len(view) <= nbytes:
                views.append(unsent.popleft())
                nbytes -= len(view)
            else:
                views.append(view[:nbytes])
                unsent[0] = view[nbytes:]
                nbytes = 0
        return views

    def _discard_unsent(self) -> None:
        self._unsent.clear()
        self._num_unsent = 0

    def _append(self, views: Sequence[memoryview], skipped: int, nbytes: int) -> None:
        """Copy `nbytes` of the views, after the first `skipped`, into the send buffer."""
        pieces: list[memoryview] = []
        for view in views:
            if skipped >= len(view):
                skipped -= len(view)
                continue
            piece = view[skipped : skipped + nbytes]
            skipped = 0
            pieces.append(piece)
            nbytes -= len(piece)
            if not nbytes:
                break
        copied = memoryview(b"".join(pieces))
        if not self._num_unsent:
            self._progress_ns = self._world.now_ns
        self._unsent.append(copied)
        self._num_unsent += len(copied)

    def _move(self, at: _Position, nbytes: int) -> None:
        """Move bytes from the receive buffer to the position, and report to the other side that they were read."""
        received = self.received
        self.num_received -= nbytes
        self._num_read += nbytes
        while nbytes:
            view = received[0]
            if len(view) <= nbytes:
                at.put(received.popleft())
                nbytes -= len(view)
            else:
                at.put(view[:nbytes])
                received[0] = view[nbytes:]
                nbytes = 0
        if self._num_read >= self.buffer_nbytes // 2:
            self._end.send(("read", self._num_read), 0)
            self._num_read = 0

    def _wanted(self, left: int) -> int:
        """Return the number of bytes for which a reader of many is woken."""
        return max(1, min(left, self.buffer_nbytes // 4))

    def _has(self, nbytes: int) -> bool:
        return self.num_received >= nbytes or self._is_at_end()

    def _can_write(self) -> bool:
        return (
            self.is_dead or self.is_write_shut or not self._num_unsent or 3 * self._num_unsent <= 2 * self.buffer_nbytes
        )

    def _is_at_end(self) -> bool:
        return self.is_dead or self.has_fin or self.is_read_shut

    def _take_error(self) -> OSError | None:
        number = self.take_error()
        return system_error(number) if number else None

    def _wake(self) -> None:
        self.readers.wake()
        self.writers.wake()

    def _forget_if_done(self) -> None:
        if self._is_orphan and self._fin_sent and self.has_fin:
            self._end.close()


class _Position:
    """Position in a list of views, which are filled from the first on."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self._index = self._offset = 0

    def put(self, data: memoryview) -> None:
        """Copy bytes to the position, and move it behind them."""
        done = 0
        while done < len(data):
            view = self._views[self._index]
            room = len(view) - self._offset
            step = min(room, len(data) - done)
            view[self._offset : self._offset + step] = data[done : done + step]
            done += step
            self._offset += step
            if step == room:
                self._index, self._offset = self._index + 1, 0


_chosen: WeakKeyDictionary[World, int] = WeakKeyDictionary()


def _buffer_nbytes(of: World) -> int:
    if of not in _chosen:
        _chosen[of] = of.chance.choice(_BUFFER_NBYTES)
    return _chosen[of]
