"""The network paths to one peer that has several addresses: watches them, and moves its streams between them.

Each stream has a home path, and a connection by one path at a time. When the policy leaves a path, every stream on it
is cut and connects again by another path, under the same session. This is what keeps a late byte from landing: the
owner ends the session's earlier connection, and waits until its thread has left the memory, before it accepts the new
one; requests that were not acknowledged are then repeated under the same numbers, and executed once. So at no time can
two connections write for one request, and nothing of the path that was left lands after an operation is complete,
however long its bytes were under way.

    sample (alarm thread, every TICK_S while something is in flight) ─▶ leave a path: its streams are cut
    probe  (a thread of its own: connect, greet, Goodbye)            ─▶ use it again: its streams go home

The traffic's lock guards all state. Probes run without it; at most one per path is under way.
"""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from messenger.alarms import AlarmClock, EarliestAlarm
from messenger.counters import Counters
from messenger.link import Link
from messenger.path_policy import PathPolicy, PathSample

TICK_S = 0.02
UNUSED_S = 60.0
"""Resting paths of a peer that was not used for so long are not probed until it is."""
_LONGEST_ROUND_TRIP_S = 10.0

_log = logging.getLogger(__name__)


class PathStream(Protocol):
    """The part of `messenger.stream.Stream` that the paths use."""

    path: int | None

    num_answers: int

    def sampled_locked(self) -> tuple[Link | None, int]: ...
    def leave_path_locked(self, reason: str) -> None: ...
    def go_home_locked(self, home: int) -> None: ...


class PathDialer(Protocol):
    """Maker of probes."""

    def probe(self, path: int, probes: "ProbeLinks") -> bool: ...


class ProbeLinks:
    """Links of the probes under way, so that `cut` can end them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: set[Link] = set()
        self._is_cut = False

    def opened(self, link: Link) -> None:
        """Add the link of a probe; it is cut at once if `cut` was called."""
        with self._lock:
            self._links.add(link)
            if self._is_cut:
                link.cut()

    def ended(self, link: Link) -> None:
        """Remove a link that is about to be closed."""
        with self._lock:
            self._links.discard(link)

    def cut(self) -> None:
        """End all probes, now and later."""
        with self._lock:
            self._is_cut = True
            for link in self._links:
                link.cut()


class PeerPaths:
    """Paths to one peer. `lock` is the peer's traffic lock; methods named `..._locked` require it."""

    def __init__(
        self, addresses: Sequence[str], lock: threading.Lock, clock: AlarmClock, counters: Counters, *, name: str
    ) -> None:
        self.addresses = tuple(addresses)
        self._lock = lock
        self._counters = counters
        self._name = name
        self._policy = PathPolicy(len(addresses))
        self._alarm = EarliestAlarm(clock, self._tick)
        self._streams: Sequence[PathStream] = ()
        self._dialer: PathDialer | None = None
        self._moved, self._answers = [0] * len(addresses), [0] * len(addresses)
        self._counted: dict[Link, int] = {}  # bytes of open connections that `_moved` includes
        self._is_ticking = False
        self._used_s = 0.0
        self._closing = False
        self._probe_links = ProbeLinks()
        self._probing: set[threading.Thread] = set()

    def attach(self, streams: Sequence[PathStream], dialer: PathDialer) -> None:
        """Set the peer's streams and the maker of probes, once."""
        self._streams, self._dialer = streams, dialer

    def order(self, home: int) -> list[int]:
        """Return the paths in the order in which to try them for a stream of this home."""
        with self._lock:
            return self._policy.order(home)

    def dial_failed(self, path: int, reason: str) -> None:
        """Let a path rest by which no connection could be made, while another path could be used."""
        with self._lock:
            if self._policy.is_up(path):
                self._policy.failed(path, time.monotonic())
                self._leave_locked(path, reason)
                self._arm_locked()

    def num_down(self) -> int:
        """Return the number of paths that are not in use."""
        with self._lock:
            return self._policy.num_down

    def has_thread(self) -> bool:
        """Return True if a probe is under way."""
        with self._lock:
            return bool(self._probing)

    def close(self) -> None:
        """Stop watching, and end the probes."""
        with self._lock:
            self._closing = True
            self._alarm.clear()
            probing = list(self._probing)
        self._probe_links.cut()
        for thread in probing:
            thread.join()

    # Called by the streams, with the lock held.

    def began_locked(self) -> None:
        """Watch the paths, because a request is in flight."""
        if not self._is_ticking and not self._closing:
            self._is_ticking = True
            self._alarm.watch(time.monotonic() + TICK_S)

    def window_nbytes_locked(self, path: int) -> int:
        """Return the number of bytes in flight from which on a stream on the path begins no further part."""
        return self._policy.window_nbytes(path)

    # On the alarm thread and on probes' threads.

    def _tick(self) -> None:
        with self._lock:
            self._alarm.rang()
            self._is_ticking = False
            if self._closing:
                return
            now_s = time.monotonic()
            samples = self._sample_locked()
            for path, reason in self._policy.sample(samples, now_s):
                self._leave_locked(path, reason)
            if any(sample.in_flight_nbytes for sample in samples):
                self._used_s = now_s
                self.began_locked()
            if now_s - self._used_s < UNUSED_S:
                for path in self._policy.probes_due(now_s):
                    self._start_probe_locked(path)
            self._arm_locked()

    def _sample_locked(self) -> list[PathSample]:
        in_flight = [0] * len(self._moved)
        round_trip_s = [0.0] * len(self._moved)
        counted: dict[Link, int] = {}
        for stream in self._streams:
            path = stream.path
            if path is None:
                continue
            link, nbytes = stream.sampled_locked()
            in_flight[path] += nbytes
            self._answers[path] += stream.num_answers
            stream.num_answers = 0
            if link is None:
                continue
            progress = link.progress()
            self._moved[path] += progress.nbytes - self._counted.get(link, 0)
            counted[link] = progress.nbytes
            round_trip_s[path] = max(round_trip_s[path], progress.round_trip_s)
        self._counted = counted
        return [PathSample(*each) for each in zip(self._moved, in_flight, self._answers, round_trip_s, strict=True)]

    def _leave_locked(self, path: int, reason: str) -> None:
        self._counters.add("path_failovers")
        _log.warning("path %s to %s is left: %s", self.addresses[path], self._name, reason)
        for stream in self._streams:
            if stream.path == path:
                stream.leave_path_locked(reason)

    def _arm_locked(self) -> None:
        """Set the alarm to the end of the next rest, unless the peer is not used."""
        due_s = self._policy.next_probe_s()
        if due_s is not None and not self._closing and time.monotonic() - self._used_s < UNUSED_S:
            self._alarm.watch(due_s)

    def _start_probe_locked(self, path: int) -> None:
        thread = threading.Thread(target=self._probe, args=(path,), name=f"{self._name}-probe", daemon=True)
        self._probing.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the system starts no thread: probe again after a rest
            self._probing.discard(thread)
            self._policy.probed(path, answered=False, now_s=time.monotonic())

    def _probe(self, path: int) -> None:
        answered = False
        try:
            if self._dialer is not None:
                answered = self._dialer.probe(path, self._probe_links)
        except Exception:
            _log.exception("the probe of path %s to %s failed", self.addresses[path], self._name)
        with self._lock:
            self._probing.discard(threading.current_thread())
            if self._policy.probed(path, answered=answered, now_s=time.monotonic()):
                self._counters.add("paths_returned")
                _log.info("path %s to %s is used again", self.addresses[path], self._name)
                for stream in self._streams:
                    stream.go_home_locked(path)
            self._arm_locked()
            if self._is_ticking:
                self._alarm.watch(time.monotonic())  # a stalled path may have waited for this answer
