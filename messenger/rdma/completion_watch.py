"""Polling of the completion queues of a connection's lanes, and sleeping until one has a completion."""

import os
import select
from collections.abc import Sequence
from typing import NamedTuple

from messenger.rdma.lane import Lane
from messenger.rdma.verbs.completions import Completions

_FRAMES_FIRST_S = 0.05
"""While threads wait for frames only, completions of sent work are collected with the next frame. After this time
without a frame, any completion wakes the leader, since it may be required for the next frame."""


class WatchResult(NamedTuple):
    """Completions by lane. `peer_left`: the peer closed the connection. `overslept`: the sleep ended without event."""

    found: list[tuple[int, Completions]]
    peer_left: bool = False
    overslept: bool = False


class CompletionWatch:
    """Waiting for completions. One thread at a time calls `look`, any thread may wake it.

    `sock_fd` becomes readable when the peer closes the connection.
    """

    def __init__(self, sock_fd: int) -> None:
        self._sock_fd = sock_fd
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(sock_fd, select.EPOLLRDHUP)

    def add(self, lane: Lane) -> None:
        """Include the lane's completions."""
        self._epoll.register(lane.queue.fd, select.EPOLLIN)

    def remove(self, lane: Lane) -> None:
        """Exclude the lane, which is about to be closed."""
        self._epoll.unregister(lane.queue.fd)

    def wake(self) -> None:
        """Wake the thread that sleeps in `look`."""
        os.eventfd_write(self._wake, 1)

    def look(self, lanes: Sequence[Lane], timeout_s: float | None, *, frames_only: bool) -> WatchResult:
        """Return the available completions; if there are none, sleep until there are some, or for `timeout_s`.

        With `frames_only`, completions other than frames do not end the sleep at once.
        """
        found = _polled(lanes)
        if found:
            return WatchResult(found)
        for lane in lanes:
            lane.queue.arm(solicited=frames_only)
        found = _polled(lanes)
        if found:
            return WatchResult(found)
        if frames_only:
            timeout_s = _FRAMES_FIRST_S if timeout_s is None else min(timeout_s, _FRAMES_FIRST_S)
        ready = {fd for fd, _ in self._epoll.poll(timeout_s)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for lane in lanes:
            if lane.queue.fd in ready:
                lane.queue.take_event()
        found = _polled(lanes)
        # Completions that arrived before the peer left are processed first.
        return WatchResult(found, self._sock_fd in ready and not found, frames_only and not ready)

    def close(self) -> None:
        """Release the descriptors; no thread may use the object afterwards."""
        self._epoll.close()
        os.close(self._wake)


def _polled(lanes: Sequence[Lane]) -> list[tuple[int, Completions]]:
    found = []
    for index, lane in enumerate(lanes):
        completions = lane.queue.poll()
        if completions:
            found.append((index, completions))
    return found
