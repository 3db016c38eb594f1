"""Load thread of the soak test: it owns a slot of a peer's region and checks every byte of it.

After a failed operation, each byte of the slot is either the old or the new one. The worker renews the key, so that
pending operations cannot change the slot any more, then reads and compares it. Errors are expected while a fault is
active or if the worker provoked them; any other error, or an operation that exceeds its deadline, fails the run.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from messenger import (
    InvalidArgument,
    Messenger,
    PeerLost,
    Priority,
    RemoteAccessError,
    RemoteKey,
    SharedMemory,
    TransferCancelled,
    TransferDeadlineExceeded,
    TransferError,
    TransferResult,
)
from rpc.errors import NetworkError
from tools.soak.fleet import Member, PeerGone, PeerProcess, Settings
from tools.soak.peer import SLOT, digest
from tools.soak.shapes import Bytes, Rows, applied, first_difference, random_rows

DEADLINE_S = 10.0
SLACK_S = 20.0
"""Time by which a future may complete after its deadline on a busy machine."""
PATIENCE_S = 60.0
"""Longest time for which a peer may be unusable."""
LOANS = 20
"""Largest number of consecutive loans of which none is confirmed. Deadlines and cancels of other operations close
connections, and a loan ends with its connection."""

_OF_TROUBLE = (PeerLost, TransferDeadlineExceeded, InvalidArgument)


class ContractViolated(Exception):
    """The messenger violated its contract."""


class Worker:
    def __init__(
        self,
        messenger: Messenger,
        member: Member,
        slot: int,
        settings: Settings,
        seed: Sequence[int],
        over: threading.Event,
    ) -> None:
        self.messenger = messenger
        self.member = member
        self._slot = slot
        self._room = settings.slot_nbytes
        self._patience = settings.patience
        self._over = over
        self._rng = np.random.default_rng(seed)
        self._pool: Bytes = self._rng.integers(0, 256, 4 * self._room, dtype=np.uint8)
        self._memory = SharedMemory.create(2 * self._room, f"{member.node_id}-{slot}")
        self._region = messenger.register(self._memory)
        self._began_s = 0.0
        self.waits_since_s: float | None = None
        """Start of the wait for the current operation; None if there is none."""
        self._expected: Bytes = np.zeros(self._room, dtype=np.uint8)
        self._possible: list[Bytes] = []
        self._meet(member.generation)
        self.operations: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.nbytes = 0
        self.checked_nbytes = 0
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"load-{member.node_id}-{slot}", daemon=True)

    def close(self) -> None:
        self.messenger.deregister(self._region)
        del self._region
        self._memory.close()

    def _run(self) -> None:
        actions: list[Callable[[], None]] = [
            self._write,
            self._write,
            self._write_and_tell,
            self._write_and_tell,
            self._read,
            self._read,
            self._many_at_once,
            self._borrow,
            self._hurry,
            self._change_mind,
            self._lose_the_right,
            self._look,
        ]
        try:
            while not self._over.is_set():
                action = actions[int(self._rng.integers(len(actions)))]
                self._guarded(action)
                self.operations[action.__name__.strip("_").replace("_", " ")] += 1
            self._guarded(self._look)
        except BaseException as error:
            self.failure = error
            self._over.set()

    def _guarded(self, action: Callable[[], None]) -> None:
        self._began_s = time.monotonic()
        try:
            action()
            if self._possible:
                self._recover()
        except PeerGone:
            self._meet(self.member.next_generation(self._generation, PATIENCE_S * self._patience))

    def _meet(self, generation: PeerProcess) -> None:
        """Connect to a new process, whose slot is all zeros."""
        self._generation = generation
        self._peer = self.messenger.connect(generation.endpoint)
        self._key = generation.keys[self._slot]
        self._expected[:] = 0
        self._possible.clear()

    # Actions.

    def _write(self) -> None:
        rows, after = self._fresh_rows()
        self._settle([self._begin(rows)], after)

    def _write_and_tell(self) -> None:
        rows, after = self._fresh_rows()
        future = self._peer.write_notify(
            self._key,
            self._region,
            self._remote(rows),
            SLOT.pack(self._slot),
            digest(after),
            deadline_s=self._deadline_s,
            priority=self._any_priority(),
        )
        self._settle([future], after)

    def _read(self) -> None:
        rows = random_rows(self._rng, self._room)
        wanted = applied(rows, self._expected, self._sink)
        mirrored = rows[:, [1, 0, 2]]
        mirrored[:, 0] += self._room
        mirrored[:, 1] += self._slot * self._room
        future = self._peer.read(
            self._key, self._region, mirrored, deadline_s=self._deadline_s, priority=self._any_priority()
        )
        if self._outcome(future):
            self._compare("a read", self._sink, wanted)

    def _borrow(self) -> None:
        """Borrow shared memory in place and check the confirmed bytes."""
        if self._peer.transport != "shm":
            return
        first = int(self._rng.integers(self._room))
        nbytes = int(self._rng.integers(1, self._room - first + 1))
        for _ in range(LOANS):
            try:
                loan = self._peer.borrow(
                    self._key, self._slot * self._room + first, nbytes, deadline_s=self._deadline_s
                )
            except (TransferError, InvalidArgument) as error:  # the connection broke meanwhile
                self._excuse(error)
                return
            found = loan.array.copy()
            if loan.confirm():
                self._compare("a loan", found, self._expected[first : first + nbytes])
                return
        if not self.member.was_disturbed_since(self._began_s):
            raise ContractViolated(f"{self.name}: none of {LOANS} loans was confirmed, although no fault was active")

    def _many_at_once(self) -> None:
        rows, after = self._fresh_rows()
        parts = np.array_split(rows, int(self._rng.integers(1, 65)))
        self._settle([self._begin(part) for part in parts if len(part)], after)

    def _hurry(self) -> None:
        """Use deadlines that may be too short."""
        rows, after = self._fresh_rows()
        deadline_s = float(10 ** self._rng.uniform(-4, -1.5))
        row = [[self._room, self._slot * self._room, 8]]
        futures = [
            self._begin(rows, deadline_s),
            self._peer.read(self._key, self._region, row, deadline_s=deadline_s),
        ]
        self._settle(futures, after, allowed=TransferDeadlineExceeded)

    def _change_mind(self) -> None:
        """Cancel operations that are queued, running or complete."""
        rows, after = self._fresh_rows()
        futures = [self._begin(rows) for _ in range(int(self._rng.integers(1, 9)))]
        time.sleep(float(self._rng.uniform(0, 0.003)))
        for future in futures:
            future.cancel()
        self._settle(futures, after, allowed=TransferCancelled)

    def _lose_the_right(self) -> None:
        """Check that after a revoke the owner's memory no longer changes, even with operations in flight."""
        rows, _ = self._fresh_rows()
        futures = [self._begin(rows) for _ in range(int(self._rng.integers(1, 9)))]
        value = int(self._rng.integers(256))
        try:
            self._renew(value)
            self._expected[:] = value
        finally:
            for future in futures:
                self._outcome(future, RemoteAccessError)
        self._look()

    def _look(self) -> None:
        """Check the whole slot by a read and by its owner's digest."""
        found = self._fetched()
        if found is None:
            self._possible.append(self._expected)
            return
        self._compare("the slot", found, self._expected)
        if self.member.ask(self._generation, "digest", self._slot) != digest(self._expected).hex():
            raise ContractViolated(f"{self.name}: the owner's digest of the slot differs")

    # Helpers.

    @property
    def longest_wait_s(self) -> float:
        """Seconds after which a waiting operation counts as hanging."""
        return self._deadline_s + SLACK_S * self._patience

    @property
    def name(self) -> str:
        return f"{self.member.node_id} slot {self._slot}"

    @property
    def _deadline_s(self) -> float:
        return DEADLINE_S * self._patience

    @property
    def _source(self) -> Bytes:
        return self._memory.array[: self._room]

    @property
    def _sink(self) -> Bytes:
        return self._memory.array[self._room :]

    def _fresh_rows(self) -> tuple[Rows, Bytes]:
        """Return rows within the slot, new bytes to write with them, and the slot's content afterwards."""
        first = int(self._rng.integers(len(self._pool) - self._room))
        self._source[:] = self._pool[first : first + self._room]
        rows = random_rows(self._rng, self._room)
        return rows, applied(rows, self._source, self._expected)

    def _begin(self, rows: Rows, deadline_s: float | None = None) -> Future[TransferResult]:
        return self._peer.write(
            self._key,
            self._region,
            self._remote(rows),
            deadline_s=deadline_s or self._deadline_s,
            priority=self._any_priority(),
        )

    def _remote(self, rows: Rows) -> Rows:
        moved = rows.copy()
        moved[:, 1] += self._slot * self._room
        return moved

    def _any_priority(self) -> Priority:
        return Priority(int(self._rng.integers(len(Priority))))

    def _settle(
        self, futures: Sequence[Future[TransferResult]], after: Bytes, *, allowed: type[TransferError] | None = None
    ) -> None:
        """Wait for the operations; on success the slot holds `after`, otherwise each byte is the old or the new one."""
        outcomes = [self._outcome(future, allowed) for future in futures]
        if all(outcomes):
            self._expected = after
        else:
            self._possible += [self._expected, after]

    def _outcome(self, future: Future[TransferResult], allowed: type[TransferError] | None = None) -> bool:
        self.waits_since_s = time.monotonic()
        try:
            # Without a timeout, the waiting thread itself receives replies; the main thread watches for hangs.
            limit_s = self.longest_wait_s if self._rng.random() < 0.5 else None
            self.nbytes += future.result(limit_s).nbytes
            return True
        except TransferError as error:
            if error.peer != self.member.node_id or not error.address:
                raise ContractViolated(f"{self.name}: an error without peer or address: {error}") from error
            self._excuse(error, allowed)
            return False
        except TimeoutError as error:
            raise ContractViolated(f"{self.name}: an operation exceeded its deadline") from error
        finally:
            self.waits_since_s = None

    def _excuse(self, error: NetworkError, allowed: type[TransferError] | None = None) -> None:
        """Count an error; raise ContractViolated if it was not expected."""
        name = type(error).__name__
        self.errors[name] += 1
        asked_for = allowed is not None and isinstance(error, allowed)
        excused = isinstance(error, _OF_TROUBLE) and self.member.was_disturbed_since(self._began_s)
        if not asked_for and not excused:
            lately = self.member.lately()
            raise ContractViolated(
                f"{self.name}: unexpected error (recent faults: {lately}): {name}: {error}"
            ) from error

    def _renew(self, value: int | None) -> None:
        packed = self.member.ask(self._generation, "renew", self._slot, value)
        self._key = RemoteKey.unpack(bytes.fromhex(packed))

    def _recover(self) -> None:
        """Recover after a failure: fence pending operations, then check the slot."""
        self._renew(None)
        end_s = time.monotonic() + PATIENCE_S * self._patience
        while (found := self._fetched()) is None:
            if self.member.generation is not self._generation:
                raise PeerGone(self.member.node_id)
            if time.monotonic() > end_s:
                raise ContractViolated(f"{self.name}: unusable for {PATIENCE_S * self._patience:.0f} s")
            time.sleep(0.05)
        self._compare("the slot after a failed operation", found, *self._possible)
        self._expected = found
        self._possible.clear()

    def _fetched(self) -> Bytes | None:
        """Return a copy of the slot, or None if it cannot be read now."""
        self._sink[:] = 0xA5
        row = [[self._room, self._slot * self._room, self._room]]
        future = self._peer.read(self._key, self._region, row, deadline_s=self._deadline_s)
        return self._sink.copy() if self._outcome(future) else None

    def _compare(self, what: str, found: Bytes, *allowed: Bytes) -> None:
        self.checked_nbytes += len(found)
        difference = first_difference(found, *allowed)
        if difference is not None:
            raise ContractViolated(f"{self.name}: {what}: {difference}")
