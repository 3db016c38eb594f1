"""Scheduling of slices over the rails to one peer, and recovery when rails fail.

Events in, instructions out. The shell submits batches, posts the instructions that are `due`, and reports completions
and failures; after every event more may be due. Any thread may call, one at a time.

Order. The bytes of a batch land in any order. A batch with a frame (its notification, or the message that it is done)
has its Announce due only when nothing of it or of an earlier batch is unposted or in flight on another rail than the
one that carries the frames; work in flight on that rail precedes the frame in the same queue pair and lands first.
Announces follow the order of submission, and the frame rail changes only when it fails.

Failure. `rail_failed` queues every unfinished slice of the rail for another rail. The shell calls it only when neither
end of the queue pair can write any more, since bytes that land after their repetition would corrupt memory. If frames
were in flight on the rail, it is unknown whether the peer received them, and the peer may have reused the memory: then
nothing is due until the shell has queried the peer and calls `resolve`. A failed rail rests, longer after each failure,
is probed by the shell and returns.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from messenger.path_health import PathHealth, PathState
from messenger.rdma.policy.batch_split import CUT_NBYTES, shares, take
from messenger.rdma.policy.posting import Announce, Instruction, Limits, Post, RailSpec
from messenger.rdma.policy.rail_speed import RailSpeed
from messenger.slices import NBYTES, Rows
from rpc.errors import InvalidArgument

_SAMPLE_NBYTES: Final = 1 << 20
_SAMPLE_NS: Final = 100_000
ANNOUNCE_DELAY_NS: Final = 20_000
"""Cost of waiting for another rail's completion before a frame, by which the frame rail is preferred."""
LAG_FACTOR: Final = 6
"""A rail without a completion for this many times the expected duration of its oldest post lags."""
FRAME_RAIL_FACTOR: Final = 5
DEFAULT_GBIT: Final = 10.0
"""Assumed speed of a link that reports none."""


@dataclass(eq=False, slots=True)
class _Batch:
    number: int
    waiting: Rows
    waiting_nbytes: int
    is_unannounced: bool
    announce: Announce | None = None
    posts: dict[int, Post] = field(default_factory=dict)
    num_elsewhere: int = 0  # posts on other rails than that of the frames

    @property
    def is_done(self) -> bool:
        return not (self.posts or self.waiting_nbytes or self.is_unannounced or self.announce)

    @property
    def holds_up(self) -> bool:
        """Return True if no frame of this or a later batch may be sent."""
        return bool(self.waiting_nbytes or self.num_elsewhere)


@dataclass(eq=False, slots=True)
class _Rail:
    spec: RailSpec
    speed: RailSpeed
    health: PathHealth = field(default_factory=PathHealth)
    in_flight_nbytes: int = 0
    in_flight_rows: int = 0
    posts: dict[int, Post] = field(default_factory=dict)
    done_ns: int = 0
    sampled_nbytes: int = 0
    sampled_ns: int = 0


class Rails:
    """Scheduler of one connection's rails (see the module). Rails are named by their index in `specs`."""

    def __init__(self, specs: Sequence[RailSpec], limits: Limits, now_ns: int) -> None:
        if not specs:
            raise InvalidArgument("a peer needs at least one rail")
        self._limits = limits
        self._rails = [_Rail(spec, RailSpeed((spec.speed_gbit or DEFAULT_GBIT) * 1e9 / 8)) for spec in specs]
        for rail in self._rails:
            rail.health.since_ns = now_ns
        self._batches: dict[int, _Batch] = {}
        self._to_post: list[int] = []  # heaps of batch numbers; stale ones are dropped when they come up
        self._holding_up: list[int] = []
        self._to_announce: deque[int] = deque()
        self._announced: dict[int, _Batch] = {}  # by the number of the Announce that is in flight
        self._doubts: list[Announce] = []
        self._waiting_nbytes = 0
        self._num_batches = 0
        self._num_instructions = 0
        self._frame_rail: int | None = None
        self._usable: list[int] = []
        self.all_are_up = True
        """True if no rail rests or is probed."""
        self._find_usable()
        self._elect_frame_rail()

    # Queries.

    @property
    def frame_rail(self) -> int | None:
        """Rail that carries the frames; None while no rail is up."""
        return self._frame_rail

    @property
    def is_stranded(self) -> bool:
        """True if no rail is up; unfinished work then waits for a successful probe or the end of the connection."""
        return self._frame_rail is None

    @property
    def doubts(self) -> tuple[int, ...]:
        """Batches of whose frames it is unknown whether they reached the peer; nothing is due until `resolve`."""
        return tuple(announce.batch for announce in self._doubts)

    @property
    def is_held_up(self) -> bool:
        """True if something is due, or will be after a completion."""
        return bool(self._to_announce) or self._waiting_nbytes > 0

    @property
    def num_unfinished(self) -> int:
        """Number of batches that are not done."""
        return len(self._batches)

    def state(self, rail: int) -> PathState:
        return self._rails[rail].health.state

    def bytes_s(self, rail: int, now_ns: int) -> float:
        """Return the estimated speed of the rail."""
        return self._rails[rail].speed.bytes_s(now_ns)

    def in_flight_nbytes(self, rail: int) -> int:
        return self._rails[rail].in_flight_nbytes

    def lagging(self, floor_ns: int, now_ns: int) -> list[int]:
        """Return the rails that are far behind their own speed while another rail has completed work.

        A rail lags if it has completed nothing for LAG_FACTOR times the duration of its oldest post at the measured
        speed, and not for `floor_ns` either. If it carries the frames, the connection must be made again without it,
        which is worth it only if the rail is dead: both limits are FRAME_RAIL_FACTOR times as long.
        """
        measured = [one.speed.measured_bytes_s for one in self._rails]
        slowest = min((speed for speed in measured if speed is not None), default=None)
        found = []
        for index, rail in enumerate(self._rails):
            bytes_s = measured[index] or slowest
            if not rail.posts or bytes_s is None or rail.health.state is not PathState.UP:
                continue
            oldest = next(iter(rail.posts.values()))
            since_ns = max(rail.done_ns, oldest.posted_ns)
            limit_ns = max(floor_ns, int(LAG_FACTOR * oldest.nbytes / bytes_s * 1e9))
            if index == self._frame_rail:
                limit_ns *= FRAME_RAIL_FACTOR
            is_alone = all(other is rail or other.done_ns <= since_ns for other in self._rails)
            if now_ns - since_ns > limit_ns and not is_alone:
                found.append(index)
        return found

    # Events.

    def submit(self, rows: Rows, *, announce: bool) -> int:
        """Add a batch and return its number. `rows` are int64 [n, 3], as in `messenger.slices`, without empty ones.

        A batch without rows is a frame alone. Raises InvalidArgument for an empty batch.
        """
        nbytes = _total(rows)
        if not (nbytes or announce):
            raise InvalidArgument("a batch needs slices, or something to announce")
        self._num_batches += 1
        batch = _Batch(self._num_batches, rows, nbytes, is_unannounced=announce)
        self._batches[batch.number] = batch
        self._waiting_nbytes += nbytes
        if nbytes:
            heapq.heappush(self._to_post, batch.number)
            heapq.heappush(self._holding_up, batch.number)
        if announce:
            self._to_announce.append(batch.number)
        return batch.number

    def due(self, now_ns: int) -> list[Instruction]:
        """Return the instructions to post now, in this order; they count as in flight from then on."""
        instructions: list[Instruction] = []
        if self._doubts or self._frame_rail is None:
            return instructions
        while (batch := self._first(self._to_post)) is not None:
            self._announce(instructions)
            if not self._post(batch, instructions, now_ns):
                break
        self._announce(instructions)
        return instructions

    def completed(self, number: int, rail: int, now_ns: int) -> int | None:
        """Process the completion of an instruction. Returns its batch if that is done, otherwise None.

        Raises InvalidArgument if the instruction is not in flight.
        """
        post = self._rails[rail].posts.get(number)
        if post is not None:
            batch = self._batches[post.batch]
            self._release(post)
            self._sample(self._rails[rail], post, now_ns)
        elif number in self._announced and not self._doubts:
            batch = self._announced.pop(number)
            batch.announce = None
        else:
            raise InvalidArgument(f"instruction {number} is not in flight on rail {self._rails[rail].spec.name}")
        return self._finish(batch)

    def rail_failed(self, rail: int, now_ns: int) -> None:
        """Process the failure of a rail, stopped at both ends, or of its probe: requeue its work and let it rest."""
        failed = self._rails[rail]
        failed.health.failed(now_ns)
        for post in list(failed.posts.values()):
            self._release(post)
            self._give_back(self._batches[post.batch], post)
        self._find_usable()
        if rail == self._frame_rail:
            self._doubts = [batch.announce for batch in self._announced.values() if batch.announce is not None]
            self._elect_frame_rail()

    def resolve(self, last_delivered: int) -> list[int]:
        """Resolve the doubtful batches: the peer has received the frames up to batch `last_delivered` (0: none).

        The other frames are sent again. Returns the batches that are done. Raises InvalidArgument for a batch that is
        not in doubt.
        """
        if last_delivered and last_delivered not in self.doubts:
            raise InvalidArgument(f"batch {last_delivered} is not in doubt")
        for announce in reversed(self._doubts):
            batch = self._announced.pop(announce.number)
            batch.announce, batch.is_unannounced = None, True
            self._to_announce.appendleft(batch.number)
        self._doubts = []
        # All batches submitted before a frame had landed when the frame was sent.
        done = [number for number in self._batches if number <= last_delivered]
        for number in done:
            batch = self._batches.pop(number)
            assert not batch.posts
            self._waiting_nbytes -= batch.waiting_nbytes
        return done

    def probes_due(self, now_ns: int) -> list[int]:
        """Return the rails whose rest is over. The caller rebuilds each and calls `rail_returned` or `rail_failed`."""
        rested = [rail for rail, each in enumerate(self._rails) if each.health.is_rested(now_ns)]
        for rail in rested:
            self._rails[rail].health.probe(now_ns)
        return rested

    def next_probe_ns(self) -> int | None:
        """Return the time at which the next rest ends; None if no rail rests."""
        resting = [rail.health for rail in self._rails if rail.health.state is PathState.RESTING]
        return min((health.rested_ns for health in resting), default=None)

    def rail_returned(self, rail: int, now_ns: int) -> None:
        """Use the rail again after a successful probe."""
        returned = self._rails[rail]
        if returned.health.state is not PathState.PROBING:
            raise InvalidArgument(f"rail {returned.spec.name} was not being probed")
        returned.health.returned(now_ns)
        returned.speed.forget()
        returned.sampled_nbytes = returned.sampled_ns = 0
        self._find_usable()
        if self._frame_rail is None:
            self._elect_frame_rail()

    def validate(self) -> None:
        """Raise AssertionError if the internal state is inconsistent: for tests, and when idle."""
        for index, rail in enumerate(self._rails):
            assert rail.in_flight_nbytes == sum(post.nbytes for post in rail.posts.values())
            assert rail.in_flight_rows == sum(len(post.rows) for post in rail.posts.values())
            assert rail.health.state is PathState.UP or not rail.posts
            assert all(self._batches[post.batch].posts[post.number] is post for post in rail.posts.values())
            assert all(post.rail == index for post in rail.posts.values())
        assert self.all_are_up == all(rail.health.state is PathState.UP for rail in self._rails)
        assert self._waiting_nbytes == sum(batch.waiting_nbytes for batch in self._batches.values())
        for batch in self._batches.values():
            assert not batch.is_done
            elsewhere = sum(post.rail != self._frame_rail for post in batch.posts.values())
            assert batch.num_elsewhere == elsewhere
            assert batch.waiting_nbytes == int(batch.waiting[:, NBYTES].sum())
            assert batch.announce is None or not batch.holds_up or self._doubts
        assert all(batch.announce is not None for batch in self._announced.values())

    # Posting.

    def _post(self, batch: _Batch, instructions: list[Instruction], now_ns: int) -> bool:
        """Post the batch's slices for which there is room. Returns False if some must wait."""
        up = self._usable
        served = [(up[0], batch.waiting_nbytes)] if len(up) == 1 else self._spread(batch, now_ns)
        spilt = 0  # bytes left over by cutting slices at whole pages, which go to the next rail
        for rail, nbytes in served:
            left = min(nbytes + spilt, batch.waiting_nbytes)
            spilt = 0
            while left > 0 and (room := self._room(rail, left)):
                if left < CUT_NBYTES and left < batch.waiting_nbytes:
                    spilt = left
                    break
                post = self._begin(batch, rail, min(room, left), now_ns)
                instructions.append(post)
                left -= post.nbytes
        return not batch.waiting_nbytes

    def _spread(self, batch: _Batch, now_ns: int) -> list[tuple[int, int]]:
        """Return (rail, bytes) for the waiting part of the batch."""
        up = self._usable
        speeds = [self._rails[rail].speed.bytes_s(now_ns) for rail in up]
        delay_ns = ANNOUNCE_DELAY_NS if batch.is_unannounced else 0
        backlogs = [
            self._rails[rail].in_flight_nbytes + int(speed * delay_ns / 1e9 if rail != self._frame_rail else 0)
            for rail, speed in zip(up, speeds, strict=True)
        ]
        # If a post for every rail is queued behind the batch, smaller posts cost time and end nothing earlier.
        is_plenty = self._waiting_nbytes - batch.waiting_nbytes >= len(up) * self._limits.post_nbytes
        least_nbytes = self._limits.post_nbytes if is_plenty else self._limits.least_share_nbytes
        wanted = shares(batch.waiting_nbytes, backlogs, speeds, least_nbytes)
        return [(rail, nbytes) for rail, nbytes in zip(up, wanted, strict=True) if nbytes]

    def _room(self, rail: int, nbytes: int) -> int:
        """Return the number of bytes, of `nbytes`, that may be posted on the rail in one Post; 0 means wait."""
        limits, state = self._limits, self._rails[rail]
        room = min(limits.window_nbytes - state.in_flight_nbytes, limits.post_nbytes)
        has_rows = state.in_flight_rows < limits.window_rows
        return room if has_rows and room >= min(nbytes, limits.least_share_nbytes) else 0

    def _begin(self, batch: _Batch, rail: int, nbytes: int, now_ns: int) -> Post:
        state = self._rails[rail]
        max_rows = min(self._limits.post_rows, self._limits.window_rows - state.in_flight_rows)
        if nbytes >= batch.waiting_nbytes and len(batch.waiting) <= max_rows:
            rows, batch.waiting, nbytes = batch.waiting, batch.waiting[:0], batch.waiting_nbytes
        else:
            rows, batch.waiting = take(batch.waiting, nbytes, max_rows)
            nbytes = _total(rows)
        self._num_instructions += 1
        post = Post(self._num_instructions, batch.number, rail, rows, nbytes, now_ns)
        batch.waiting_nbytes -= post.nbytes
        self._waiting_nbytes -= post.nbytes
        batch.posts[post.number] = state.posts[post.number] = post
        batch.num_elsewhere += rail != self._frame_rail
        state.in_flight_nbytes += post.nbytes
        state.in_flight_rows += len(rows)
        return post

    def _announce(self, instructions: list[Instruction]) -> None:
        """Add the instructions for frames that need not wait any more."""
        while self._to_announce:
            number = self._to_announce[0]
            batch = self._batches.get(number)
            holding_up = self._first(self._holding_up)
            if batch is not None and holding_up is not None and holding_up.number <= number:
                break
            self._to_announce.popleft()
            if batch is not None and self._frame_rail is not None:
                self._num_instructions += 1
                batch.announce = Announce(self._num_instructions, number, self._frame_rail)
                batch.is_unannounced = False
                self._announced[batch.announce.number] = batch
                instructions.append(batch.announce)

    def _first(self, heap: list[int]) -> _Batch | None:
        """Return the oldest batch of the heap that still belongs there."""
        while heap:
            batch = self._batches.get(heap[0])
            belongs = batch is not None and (batch.waiting_nbytes > 0 if heap is self._to_post else batch.holds_up)
            if belongs:
                return batch
            heapq.heappop(heap)
        return None

    # Accounting.

    def _release(self, post: Post) -> None:
        rail, batch = self._rails[post.rail], self._batches[post.batch]
        del rail.posts[post.number], batch.posts[post.number]
        rail.in_flight_nbytes -= post.nbytes
        rail.in_flight_rows -= len(post.rows)
        batch.num_elsewhere -= post.rail != self._frame_rail

    def _give_back(self, batch: _Batch, post: Post) -> None:
        batch.waiting = np.concatenate((post.rows, batch.waiting)) if batch.waiting_nbytes else post.rows
        batch.waiting_nbytes += post.nbytes
        self._waiting_nbytes += post.nbytes
        heapq.heappush(self._to_post, batch.number)
        heapq.heappush(self._holding_up, batch.number)

    def _finish(self, batch: _Batch) -> int | None:
        if not batch.is_done:
            return None
        del self._batches[batch.number]
        return batch.number

    def _sample(self, rail: _Rail, post: Post, now_ns: int) -> None:
        """Sample the speed. Bytes and busy time are accumulated, because completions may be found together."""
        rail.sampled_ns += max(0, now_ns - max(post.posted_ns, rail.done_ns))
        rail.sampled_nbytes += post.nbytes
        rail.done_ns = now_ns
        if rail.sampled_nbytes >= _SAMPLE_NBYTES and rail.sampled_ns >= _SAMPLE_NS:
            rail.speed.sample(rail.sampled_nbytes, rail.sampled_ns, now_ns)
            rail.sampled_nbytes = rail.sampled_ns = 0

    def _find_usable(self) -> None:
        """Update the usable rails: those that are up, spares only if no other is."""
        up = [rail for rail, each in enumerate(self._rails) if each.health.state is PathState.UP]
        self.all_are_up = len(up) == len(self._rails)
        self._usable = [rail for rail in up if not self._rails[rail].spec.is_spare] or up

    def _elect_frame_rail(self) -> None:
        self._frame_rail = next(iter(self._usable), None)
        for batch in self._batches.values():
            batch.num_elsewhere = sum(post.rail != self._frame_rail for post in batch.posts.values())
            if batch.num_elsewhere:
                heapq.heappush(self._holding_up, batch.number)


def _total(rows: Rows) -> int:
    """Return the bytes of the rows. Fast for the frequent cases of no row and one row."""
    if len(rows) == 1:
        return int(rows[0, NBYTES])
    return int(rows[:, NBYTES].sum()) if len(rows) else 0
