"""Writer of the decision log, on a separate thread.

The event loop appends entries to a queue without waiting. If the writer falls behind or the disk is full, entries are
dropped and counted. Locks: `_writing` serialises the writer thread and searches; `_counting` protects the counters; the
queue is a deque with one producer (the event loop) and one consumer at a time (the holder of `_writing`).
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from conductor.decision_log.event_log import EVENTS_STEM, EventLogHeader, dropped_line, event_line, head_line
from conductor.decision_log.files import LineFiles, LinesLost, json_line
from conductor.decision_log.journal import Journal, read_journal
from conductor.decision_log.record_search import DECISIONS_STEM, FoundRecords, find_records
from conductor.decision_log.records import RECORD_VERSION, Hashes, RecordChange, Records
from conductor.errors import ConductorConfigError
from conductor.policy import PolicyConfig
from conductor.policy.decisions import Decision
from conductor.policy.events import Event, NodeReported, RequestArrived
from rpc.private_folder import open_trusted
from settings.conductor import DecisionLogSettings

__all__ = ["DecisionLog"]

log = logging.getLogger(__name__)
_EVERY_S = 0.1  # polling interval of the writer; waking it for each decision would take the GIL from the event loop
_MOST_ENTRIES, _MOST_BYTES = 1 << 15, 256 << 20  # limits of the queue
_AT_ONCE = 16  # entries after which the writer yields the GIL to the event loop
_TURN_S = 0.0005
_TELL_AGAIN_S = 60.0
_CLOSE_S = 10.0
_LONGEST_SECRET = 64  # maximum key size of the hash in bytes
_ENTRY_NBYTES, _ITEM_NBYTES = 2048, 128  # approximate size of a queued entry without arrays; of each reported item

Entry = tuple[int, Event, Sequence[Decision], NDArray[np.uint64]]


class DecisionLog:
    """Decision log of one conductor. `note` and `close` must be called by one thread, other methods by any."""

    def __init__(self, folder: Path, settings: DecisionLogSettings, policy: PolicyConfig, *, now_ns: int) -> None:
        """Open the log in `folder` and start its thread.

        `now_ns`: current time of the policy's clock. Raises ConductorConfigError if the folder cannot be used, or is
        used by another conductor.
        """
        self.folder = folder
        self._wall_ns = time.time_ns() - now_ns  # offset of the wall clock to the policy's clock
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(open_trusted(folder))
            self._lock_fd = _lock(folder)
            try:
                secret, started_ms = _identity(folder)
            except OSError:
                os.close(self._lock_fd)
                raise
            self._journal = Journal(folder)
        except OSError as error:
            raise ConductorConfigError(f"decision_log is {str(folder)!r}, which cannot be used: {error}") from error
        self._run_number, self._part = time.time_ns(), 0

        def head() -> bytes:
            self._part += 1
            return head_line(EventLogHeader(self._run_number, self._part, policy))

        sizes = settings.decision_log_size_bytes, settings.decision_log_files
        self._decisions = LineFiles(folder, DECISIONS_STEM, *sizes)
        self._events = LineFiles(folder, EVENTS_STEM, *sizes, head=head) if settings.decision_log_events else None
        self._records = Records(Hashes(secret, settings.decision_log_block_tokens), started_ms)
        self._waiting: deque[Entry] = deque()
        self._num_events = 0  # noted so far, dropped ones included
        self._put_nbytes = self._taken_nbytes = 0  # each is written by one thread only
        self._dropped_events = 0  # since the last gap was written; protected by _counting
        self._lost: Counter[str] = Counter()
        self._written: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._writing = threading.Lock()
        self._told_s = -_TELL_AGAIN_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision log", daemon=True)
        self._started_ns = now_ns
        self._thread.start()

    def note(self, now_ns: int, event: Event, decisions: Sequence[Decision], keys: NDArray[np.uint64]) -> None:
        """Enqueue an event, its decisions and the keys of its prompt's full blocks; none of them may change later."""
        self._num_events += 1
        if len(self._waiting) >= _MOST_ENTRIES or self._put_nbytes - self._taken_nbytes > _MOST_BYTES:
            self._drop(1)
            return
        self._put_nbytes += _nbytes(event, keys)
        self._waiting.append((now_ns, event, decisions, keys))

    @property
    def last_event(self) -> tuple[int, int] | None:
        """(Number of the run, number of the event in the run, from 1) of the event noted last; None without events."""
        return None if self._events is None else (self._run_number, self._num_events)

    def find(self, request_id: str) -> FoundRecords:
        """Return the records of a request up to now. Reads files, so must not run on the event loop. Raises OSError."""
        with self._writing:
            self._drain()
        return find_records(self.folder, request_id)

    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """Return the numbers of lines written by kind and of entries dropped by reason."""
        with self._counting:
            return {"written": dict(self._written), "lost": dict(self._lost)}

    def close(self) -> None:
        """Write queued entries, for at most a few seconds. Open records stay in the journal."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            log.error("the decision log was not closed in time: %d entries were not written", len(self._waiting))
            return
        os.close(self._lock_fd)

    def _drop(self, count: int) -> None:
        with self._counting:
            self._lost["behind"] += count
            self._dropped_events += count
        self._tell(f"{count} entries were dropped: the writer fell behind")

    def _run(self) -> None:
        try:
            with self._writing:
                self._begin()
            while not self._stop.wait(_EVERY_S):
                with self._writing:
                    self._drain()
            with self._writing:
                self._drain()
        except Exception:
            log.exception("the decision log failed: later events are not logged")
        finally:
            for files in (self._decisions, self._events, self._journal):
                if files is not None:
                    files.close()

    def _begin(self) -> None:
        """Restore the open records of the previous conductor."""
        for record in read_journal(self.folder).values():
            self._records.restore(self._started_ns, record)
        self._try("journal", 0, lambda: self._journal.rewrite(self._records.under_way()))
        with contextlib.suppress(OSError):
            self._decisions.tidy()
            if self._events is not None:
                self._events.tidy()

    def _drain(self) -> None:
        """Write all queued entries in parts. Pauses between them for the event loop unless the queue fills up."""
        left = len(self._waiting)
        while left > 0:
            part = [self._waiting.popleft() for _ in range(min(left, _AT_ONCE))]
            left -= len(part)
            self._write(part)
            if len(self._waiting) < _MOST_ENTRIES // 2 and not self._stop.is_set():
                time.sleep(_TURN_S)

    def _write(self, entries: list[Entry]) -> None:
        changes: list[RecordChange] = []
        events: list[bytes] = []
        with self._counting:
            dropped, self._dropped_events = self._dropped_events, 0
        if dropped:
            events.append(dropped_line(dropped))
        for now_ns, event, decisions, keys in entries:
            wall_ms = (self._wall_ns + now_ns) // 1_000_000
            changes += self._records.take(now_ns, wall_ms, event, decisions, keys)
            if self._events is not None:
                events.append(event_line(now_ns, event, decisions))
            self._taken_nbytes += _nbytes(event, keys)
        over = [json_line(change.record) for change in changes if change.is_over]
        self._try("decisions", len(over), lambda: self._decisions.write(over))
        if self._journal.is_stale:
            self._try("journal", len(changes), lambda: self._journal.rewrite(self._records.under_way()))
        else:
            self._try("journal", len(changes), lambda: self._journal.note(changes))
        files = self._events
        if files is not None:
            lost = self._try("events", len(events), lambda: files.write(events))
            gap_lost = dropped > 0 and lost == len(events)  # the gap is the first line
            with self._counting:
                self._dropped_events += lost + (dropped - 1 if gap_lost else 0)
                self._lost["disk"] -= gap_lost

    def _try(self, kind: str, count: int, write: Callable[[], None]) -> int:
        """Call `write` and return how many of `count` lines were lost."""
        lost = 0
        try:
            write()
        except OSError as error:
            lost = error.count if isinstance(error, LinesLost) else count
            self._tell(f"{lost} {kind} were not written: {error.strerror or error}")
        with self._counting:
            if kind != "journal":  # its records are also written to the log when they end
                self._written[kind] += count - lost
                self._lost["disk"] += lost
        return lost

    def _tell(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_AGAIN_S:
            self._told_s = now_s
            log.warning("decision log in %s: %s; requests are not affected", self.folder, what)


def _nbytes(event: Event, keys: NDArray[np.uint64]) -> int:
    """Return the approximate memory of a queued entry."""
    nbytes = _ENTRY_NBYTES + int(keys.nbytes)
    if isinstance(event, RequestArrived):
        nbytes += 16 * len(event.matches.roster)
    elif isinstance(event, NodeReported):
        parts = (event.held, event.progress, event.prefills, event.decodes, event.transfers)
        nbytes += _ITEM_NBYTES * sum(map(len, parts))
    return nbytes


def _lock(folder: Path) -> int:
    """Lock the folder until the descriptor is closed or the process ends. Raises OSError."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise OSError(error.errno, "another conductor uses this folder; give each conductor its own") from error
        raise
    return fd


def _identity(folder: Path) -> tuple[bytes, int]:
    """Return the log's secret and start (milliseconds since 1970), which are created on first use. Raises OSError."""
    path = folder / "log.json"
    try:
        content = json.loads(path.read_bytes())
        secret, started_ms = bytes.fromhex(content["secret"]), int(content["started_ms"])
        if not 0 < len(secret) <= _LONGEST_SECRET:
            raise ValueError(f"a secret of {len(secret)} bytes")
        return secret, started_ms
    except FileNotFoundError:
        secret, started_ms = secrets.token_bytes(32), time.time_ns() // 1_000_000
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        text = f"{path} is damaged ({error!r}); remove it to start with a new secret, which changes all hash ids"
        raise OSError(errno.EINVAL, text) from error
    fresh = path.with_suffix(".part")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        json.dump({"version": RECORD_VERSION, "started_ms": started_ms, "secret": secret.hex()}, file)
        file.flush()
        os.fsync(fd)
    fresh.replace(path)
    return secret, started_ms
