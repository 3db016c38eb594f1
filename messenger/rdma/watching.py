"""Looking at the completion queues of a connection's lanes, and sleeping until there is something to see."""

import os
import select
from collections.abc import Sequence
from typing import NamedTuple

from messenger.rdma.lane import Lane
from messenger.rdma.verbs.completions import Completions

_FRAMES_FIRST_S = 0.05
"""Where nobody waits for anything but frames, completions of what was sent are found along with the next frame. Should
none come for so long, whatever completes is waited for: it may be what stops the frames."""


class Seen(NamedTuple):
    """What completed, by lane; whether the peer left, having said nothing more; whether there was a sleep in vain."""

    found: list[tuple[int, Completions]]
    peer_left: bool = False
    overslept: bool = False


class Watch:
    """One thread at a time looks, any wakes it. `sock_fd` tells when the peer leaves."""

    def __init__(self, sock_fd: int) -> None:
        self._sock_fd = sock_fd
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(sock_fd, select.EPOLLRDHUP)

    def add(self, lane: Lane) -> None:
        """Wait for its completions too."""
        self._epoll.register(lane.queue.fd, select.EPOLLIN)

    def remove(self, lane: Lane) -> None:
        """Not any more: it is about to be closed."""
        self._epoll.unregister(lane.queue.fd)

    def wake(self) -> None:
        """Let whoever sleeps look again."""
        os.eventfd_write(self._wake, 1)

    def look(self, lanes: Sequence[Lane], timeout_s: float | None, *, frames_only: bool) -> Seen:
        """What completed by now, or until something does; of completions that are no frames, perhaps only later."""
        found = _polled(lanes)
        if found:
            return Seen(found)
        for lane in lanes:
            lane.queue.arm(solicited=frames_only)
        found = _polled(lanes)
        if found:
            return Seen(found)
        if frames_only:
            timeout_s = _FRAMES_FIRST_S if timeout_s is None else min(timeout_s, _FRAMES_FIRST_S)
        ready = {fd for fd, _ in self._epoll.poll(timeout_s)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for lane in lanes:
            if lane.queue.fd in ready:
                lane.queue.take_event()
        found = _polled(lanes)
        # What arrived before the peer left still counts.
        return Seen(found, self._sock_fd in ready and not found, frames_only and not ready)

    def close(self) -> None:
        """Nobody looks or wakes any more."""
        self._epoll.close()
        os.close(self._wake)


def _polled(lanes: Sequence[Lane]) -> list[tuple[int, Completions]]:
    found = []
    for index, lane in enumerate(lanes):
        completions = lane.queue.poll()
        if completions:
            found.append((index, completions))
    return found
