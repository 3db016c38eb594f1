"""Group commit: one sync of the data and one journal frame make the writes of several threads durable.

Order: a block's bytes are durable before the frame that names it is written; the frame is durable before the write
returns; a free is durable before any of its space is written again.

    thread A   queue ── takes `_committing` ── takes the queue (A, B) ── sync data ── append frame ── done
    thread B      queue ── waits for `_committing` ─────────────────────────────────────────────────── finds it done

`lock` guards the extent maps and the queue and is never held during I/O. `_committing` serialises syncs and the
journal, and is taken before `lock`.
"""

import errno
import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.errors import SsdFull, SsdIoError
from kvpool.ssd.disk import Disk
from kvpool.ssd.folder import Segments
from kvpool.ssd.journal import JournalHeader, JournalWriter, pack_blocks
from kvpool.ssd.kernels import SHORT
from kvpool.ssd.records import ExtentMap, ExtentState, SsdConfig, SsdExtent

_log = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)


def io_error(what: str, number: int) -> SsdIoError:
    """Return the error for an errno, or for SHORT; `what` names the operation."""
    if number == SHORT:
        return SsdIoError(f"{what}: unexpected end of file; the file may have been truncated or replaced", number)
    kind = SsdFull if number in _FULL else SsdIoError
    return kind(f"{what}: {os.strerror(number)}", number)


@dataclass(eq=False)
class CommitRequest:
    """Extents to seal for one thread, and the result. `groups` are the same extents, packed."""

    extents: Sequence[SsdExtent]
    groups: Sequence[bytes]
    failed: dict[SsdExtent, SsdIoError] = field(default_factory=dict)
    failure: SsdIoError | None = None  # nothing was recorded, neither blocks nor frees
    done: bool = False

    def groups_of_good(self) -> Sequence[bytes]:
        """Return the packed extents that did not fail."""
        if not self.failed:
            return self.groups
        good = [extent for extent in self.extents if extent not in self.failed]
        return [pack_blocks(good)] if good else []


def _fail(commit: CommitRequest, failure: SsdIoError) -> None:
    commit.failure = failure
    commit.failed.update(dict.fromkeys(commit.extents, failure))


class GroupCommit:
    """The journal, the map of all extents, and the frees that the journal does not record yet.

    `lock` guards both maps and the queue.
    """

    def __init__(
        self, disk: Disk, config: SsdConfig, header: JournalHeader, segments: Segments, extents: Sequence[SsdExtent]
    ) -> None:
        """Write a new journal with these extents and replace the old one by it. Raises OSError."""
        self.lock = threading.Lock()
        self.extents = ExtentMap(config.nbytes, extents)
        self.pending_frees = ExtentMap(config.nbytes)  # freed, but not yet in the journal
        self.accepts_writes = True
        self.num_compactions = 0
        self.num_failed_syncs = 0
        # By segment, if a sync of it has failed: the number of the last one, and its error
        self._last_failures: dict[int, tuple[int, SsdIoError]] = {}
        self._disk, self._config, self._header, self._segments = disk, config, header, segments
        self._journal = JournalWriter(disk, config, header, self.extents)
        self._journal.install()
        self._rewritten_nbytes = self._journal.nbytes
        self._committing = threading.Lock()
        self._queue: list[CommitRequest] = []

    @property
    def journal_nbytes(self) -> int:
        return self._journal.nbytes

    def commit(self, extents: Sequence[SsdExtent] = (), groups: Sequence[bytes] = ()) -> CommitRequest:
        """Seal blocks whose bytes were written, and record the pending frees. Returns when both are durable or failed.

        `groups` are the same blocks packed by `pack_blocks`, in any number of groups. Errors are in the result.
        """
        commit = CommitRequest(extents, groups)
        with self.lock:
            self._queue.append(commit)
        with self._committing:
            # The thread that held the lock before may have committed this request too.
            if not commit.done:
                self._commit_all()
        if not commit.done:
            _fail(commit, SsdIoError("the commit was aborted"))
        return commit

    def close(self) -> None:
        """Close the journal; no commit may be in progress."""
        self._journal.close()

    def _commit_all(self) -> None:
        if not self.accepts_writes:
            self._rewrite(needed=True)
        with self.lock:
            commits, self._queue = self._queue, []
            freed = list(self.pending_frees)
        self._sync_data(commits)
        sealed = [extent for commit in commits for extent in commit.extents if extent not in commit.failed]
        groups = [group for commit in commits for group in commit.groups_of_good()]
        failure = self._write_down(freed, sealed, groups) if sealed or freed else None
        for commit in commits:
            if failure is not None:
                _fail(commit, failure)
            commit.done = True
        bound = max(self._config.min_journal_nbytes, 2 * self._rewritten_nbytes)
        if self.accepts_writes and self._journal.nbytes > bound:
            self._rewrite()

    def _sync_data(self, commits: Sequence[CommitRequest]) -> None:
        """Sync each touched segment once; fail the blocks that touch a segment whose sync fails.

        A failed sync may have discarded the bytes of other threads, too, whose own sync would succeed (fsync(2)): all
        blocks that were begun before it fail.
        """
        size = self._segments.segment_nbytes
        touched: set[int] = set()
        for commit in commits:
            for extent in commit.extents:
                first, last = extent.start // size, (extent.end - 1) // size
                touched.add(first)
                if first != last:
                    touched.update(range(first, last + 1))
        for index in sorted(touched):
            try:
                self._segments.sync(index)
            except OSError as error:
                self.num_failed_syncs += 1
                failure = io_error(f"segment {index} could not be made durable", error.errno or 0)
                self._last_failures[index] = self.num_failed_syncs, failure
            number, cause = self._last_failures.get(index, (0, None))
            if cause is not None:
                for commit in commits:
                    for extent in commit.extents:
                        began_before = extent.began_after < number
                        if began_before and index in self._segments.touched(extent.start, extent.end):
                            commit.failed[extent] = cause

    def _write_down(
        self, freed: Sequence[SsdExtent], sealed: Sequence[SsdExtent], groups: Sequence[bytes]
    ) -> SsdIoError | None:
        """Append one frame, and update the maps to match the journal. Returns the error if it failed."""
        if not self.accepts_writes:
            return SsdIoError("the SSD journal cannot be written: free space or repair the disk; each write retries")
        frame = self._journal.frame([extent.start for extent in freed], groups)
        try:
            self._journal.reserve(len(frame))
        except OSError as error:
            return io_error("cannot allocate space for the SSD journal", error.errno or 0)
        try:
            self._journal.append(frame)
        except OSError as error:
            # It is unknown how much of the frame is on the disk; a new journal without the frame resolves that.
            self._rewrite(needed=True)
            return io_error("the SSD journal could not be written", error.errno or 0)
        with self.lock:
            self._forget_durable(freed)
            for extent in sealed:
                if extent.state is ExtentState.DOOMED:
                    self.extents.remove(extent)
                    self.pending_frees.add(extent)
                else:
                    extent.state = ExtentState.SEALED
        return None

    def _forget_durable(self, freed: Sequence[SsdExtent]) -> None:
        for extent in freed:
            self.pending_frees.remove(extent)

    def _rewrite(self, *, needed: bool = False) -> None:
        """Replace the journal by a new one. If it is `needed` and fails, reject writes until a rewrite succeeds."""
        with self.lock:
            freed = list(self.pending_frees)
            sealed = [extent for extent in self.extents if extent.state is ExtentState.SEALED]
        try:
            journal = JournalWriter(self._disk, self._config, self._header, sealed)
        except OSError as error:
            _log.error("the SSD journal in %s could not be rewritten: %s", self._config.dir, error)
            self.accepts_writes = self.accepts_writes and not needed
            self._rewritten_nbytes = self._journal.nbytes  # retry when the journal has doubled
            return
        self._journal.close()
        self._journal, self._rewritten_nbytes = journal, journal.nbytes
        try:
            journal.install()
        except OSError as error:
            _log.error("the SSD journal in %s could not be replaced: %s", self._config.dir, error)
            self.accepts_writes = False
            return
        self.num_compactions += 1
        self.accepts_writes = True
        with self.lock:
            self._forget_durable(freed)
