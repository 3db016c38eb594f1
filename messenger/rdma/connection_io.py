"""Input and output of one connection over its lanes: batches, frames, credits and completions.

Every method is called with the link's lock held, and none blocks. The policy (rdma/policy/rails.py) decides which
slices go on which rail and when a frame may be sent; this module posts them.

A batch: submit ── slices posted on lanes ── completions ── its frame sent in fragments, each with a credit ── done
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from messenger.counters import Counters, Direction, Flow
from messenger.rdma.inbox import PLACE_NBYTES, Assembly, Fragment, fragments, limit_only
from messenger.rdma.lane import Lane
from messenger.rdma.memory import SHARE, FrameMemory
from messenger.rdma.policy.credits import ReceiveCredits, SendCredits
from messenger.rdma.policy.posting import Announce, Limits, Post, RailSpec
from messenger.rdma.policy.rails import Rails
from messenger.rdma.verbs import abi
from messenger.rdma.verbs.completions import Completions
from messenger.rdma.work import Work
from messenger.slices import Rows

_MAX_UNSENT_FRAMES = 256
_MAX_MOVING_NBYTES = 32 << 20
_NO_ROWS: Rows = np.empty((0, 3), dtype=np.int64)


@dataclass(eq=False, slots=True)
class Movement:
    """Bytes to move between a local and a remote region. `keys` are (lkey, rkey) per lane, of one `generation`."""

    rows: Rows
    nbytes: int
    opcode: int
    local_address: int
    remote_address: int
    keys: Sequence[tuple[int, int]]
    generation: int
    held: object = None
    """Objects that must stay alive until the hardware has finished with the memory."""
    left_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.left_nbytes = self.nbytes


@dataclass(eq=False, slots=True)
class _PostedBatch:
    movement: Movement | None
    frame: bytes | None


class ConnectionIO:
    """Sending and receiving over the lanes of one connection.

    `inbox_address` is the start of the peer's inbox, equal on every rail. `on_trouble(lane, status)` is called when a
    request on a lane fails.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        memory: FrameMemory,
        inbox_address: int,
        counters: Counters,
        on_trouble: Callable[[int, int], None],
    ) -> None:
        depth = min(lane.pair.depth for lane in lanes)
        self.lanes = list(lanes)
        self.arrived: deque[bytes] = deque()
        """Complete received frames; `taken` must be called for each one removed."""
        self.unsent_frames = 0
        self.num_unframed = 0
        """Unfinished movements without a frame: only their completions report them."""
        self.rails = Rails(
            [RailSpec(lane.rail.name, lane.rail.speed_gbit, lane.is_spare) for lane in lanes],
            Limits(window_rows=depth // 2, post_rows=depth // 4),
            time.monotonic_ns(),
        )
        self._memory = memory
        self._inbox_address = inbox_address
        self._counters = counters
        self._on_trouble = on_trouble
        self._batches: dict[int, _PostedBatch] = {}
        self._posts: dict[int, Post] = {}
        self._flows: dict[tuple[int, int], Flow] = {}  # by rail and opcode; the stream counts the same bytes by peer
        self._moving_nbytes = 0
        self._leaving: deque[tuple[Announce | None, deque[Fragment]]] = deque()
        self._num_sent = 0
        self._send_credits = SendCredits(SHARE)
        self._receive_credits = ReceiveCredits(SHARE)
        self._assembly = Assembly()

    @property
    def has_room(self) -> bool:
        """True if another batch may be submitted."""
        return self.unsent_frames < _MAX_UNSENT_FRAMES and self._moving_nbytes < _MAX_MOVING_NBYTES

    @property
    def is_held_up(self) -> bool:
        """True if unsent work waits for a completion or a credit."""
        return bool(self._leaving) or self.rails.is_held_up

    @property
    def moving(self) -> list[int]:
        """Numbers of the batches with unfinished bytes, in order."""
        return [number for number, batch in self._batches.items() if batch.movement and batch.movement.left_nbytes]

    def submit(self, movement: Movement | None, frame: bytes | None) -> None:
        """Submit a batch: move the bytes, then send the frame. At least one of the two must be given.

        Frames are sent in the order of submission.
        """
        number = self.rails.submit(_NO_ROWS if movement is None else movement.rows, announce=frame is not None)
        self._batches[number] = _PostedBatch(movement, frame)
        if frame is None:
            self.num_unframed += 1
        else:
            self.unsent_frames += 1
        self._moving_nbytes += 0 if movement is None else movement.nbytes
        self.drive()

    def submit_at_once(self, frame: bytes) -> None:
        """Submit a frame that does not wait for the bytes of earlier batches."""
        self._leaving.append((None, fragments(frame)))
        self.unsent_frames += 1
        self.drive()

    def taken(self) -> None:
        """Release the inbox place of a frame that was removed from `arrived`."""
        self._receive_credits.freed()

    def drive(self) -> None:
        """Post everything that may be posted. Raises OSError when a queue pair rejects it."""
        if self.rails.is_held_up:
            for instruction in self.rails.due(time.monotonic_ns()):
                if isinstance(instruction, Post):
                    self._post(instruction)
                else:
                    frame = self._batches[instruction.batch].frame
                    assert frame is not None
                    self._leaving.append((instruction, fragments(frame)))
        if self._leaving:
            self._send_fragments()
        if self._receive_credits.owes and self._frame_lane() is not None and self._send_credits.try_take_last():
            self._send_fragment(limit_only())

    def take(self, index: int, completions: Completions) -> None:
        """Process a lane's completions. Raises ProtocolError or InvalidArgument if the peer violates the protocol."""
        lane = self.lanes[index]
        received = [number for number, _, _ in completions].count(abi.RECEIVE_ID)
        if received:
            # First, because the rest may raise: the receive requests are shared by all connections.
            lane.device.receive_again(received)
        for number, status, nbytes in completions:
            if number == abi.RECEIVE_ID:
                if status == abi.WC_SUCCESS:
                    self._take_fragment(nbytes)
            else:
                if number > lane.pair.done:
                    lane.pair.done = number
                if status != abi.WC_SUCCESS:
                    self._on_trouble(index, status)
        if lane.pending and not lane.pair.failed:
            self._complete(index, lane)

    def lane_lost(self, index: int) -> None:
        """Reassign the lane's unfinished work to the other lanes; its queue pairs must have failed at both ends."""
        for _, number in self.lanes[index].pending:
            self._posts.pop(number, None)
        self.lanes[index].pending.clear()
        self.rails.rail_failed(index, time.monotonic_ns())

    def _complete(self, index: int, lane: Lane) -> None:
        now_ns = 0
        done, pending = lane.pair.done, lane.pending
        while pending and pending[0][0] <= done:
            _, instruction = pending.popleft()
            post = self._posts.pop(instruction, None)
            now_ns = now_ns or time.monotonic_ns()
            if post is not None:
                self._done(post, now_ns)
            batch = self.rails.completed(instruction, index, now_ns)
            if batch is not None and self._batches.pop(batch).frame is None:
                self.num_unframed -= 1

    def _done(self, post: Post, now_ns: int) -> None:
        movement = self._batches[post.batch].movement
        assert movement is not None
        movement.left_nbytes -= post.nbytes
        self._moving_nbytes -= post.nbytes
        self._count(post, movement.opcode, now_ns)

    def _count(self, post: Post, opcode: int, now_ns: int) -> None:
        flow = self._flows.get((post.rail, opcode))
        if flow is None:
            rail = self.lanes[post.rail].rail.name
            direction: Direction = "read" if opcode == abi.WR_RDMA_READ else "written"
            flow = self._flows[post.rail, opcode] = self._counters.flow(
                peer="", transport="rdma", rail=rail, direction=direction
            )
        flow.add(post.nbytes, len(post.rows), (now_ns - post.posted_ns) / 1e9)

    def _take_fragment(self, nbytes: int) -> None:
        self._receive_credits.received()
        place = self._memory.inbox_place(self._assembly.num_fragments)
        limit, frame, _ = self._assembly.take(place, nbytes)
        self._send_credits.apply_limit(limit)
        if frame is None:
            self._receive_credits.freed()
        else:
            self.arrived.append(frame)  # its last place is freed by `taken`

    def _post(self, post: Post) -> None:
        lane = self.lanes[post.rail]
        movement = self._batches[post.batch].movement
        assert movement is not None
        lkey, rkey = movement.keys[post.rail]
        if len(post.rows) == 1:
            local, remote, nbytes = post.rows[0].tolist()
            number = lane.pair.post_one(
                (movement.local_address + local, nbytes, lkey),
                opcode=movement.opcode,
                signalled=True,
                remote_address=movement.remote_address + remote,
                rkey=rkey,
            )
        else:
            number = lane.pair.post(
                Work.moves(
                    post.rows,
                    opcode=movement.opcode,
                    local_address=movement.local_address,
                    lkey=lkey,
                    remote_address=movement.remote_address,
                    rkey=rkey,
                    max_sge=lane.device.limits.max_sge,
                )
            )
        lane.pending.append((number, post.number))
        self._posts[post.number] = post

    def _send_fragments(self) -> None:
        while self._leaving:
            announce, pieces = self._leaving[0]
            number = 0
            while pieces:
                if self._frame_lane() is None or not self._send_credits.try_take():
                    return
                number = self._send_fragment(pieces.popleft())
            if announce is not None:
                self.lanes[announce.rail].pending.append((number, announce.number))
            self._leaving.popleft()
            self.unsent_frames -= 1

    def _frame_lane(self) -> Lane | None:
        """Return the lane on which a frame can be sent now."""
        rail = self.rails.frame_rail
        return self.lanes[rail] if rail is not None and self.lanes[rail].pair.room > 0 else None

    def _send_fragment(self, fragment: Fragment) -> int:
        lane = self._frame_lane()
        assert lane is not None
        place, address = self._memory.outbox_place(self._num_sent)
        nbytes = fragment.pack(place, self._num_sent, self._receive_credits.take_limit())
        number = self._num_sent
        self._num_sent += 1
        return lane.pair.post_one(
            (address, nbytes, lane.lkey),
            opcode=abi.WR_RDMA_WRITE_WITH_IMM,
            solicited=True,
            imm=number,
            remote_address=self._inbox_address + number % SHARE * PLACE_NBYTES,
            rkey=lane.remote_rkey,
        )
