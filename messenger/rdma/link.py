"""A connection over rails: frames in the peer's inbox, data straight between the regions; the socket tells of life.

There is no thread of its own. Whoever waits for something (a frame, room, a completion) and finds nobody at it becomes
the leader: it polls the completion queues, sleeps on their channels, and hands what it found to everybody. `cut` wakes
it. All state is under one lock, which nobody holds while it sleeps.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from messenger.buffered import BufferedLink
from messenger.counters import Counters, Direction, Flow
from messenger.errors import InvalidArgument, ProtocolError
from messenger.frames import Goodbye, Message, decode_body, decode_prefix, encode
from messenger.framing import PREFIX
from messenger.link import Link, LinkClosed
from messenger.rdma.inbox import PLACE_NBYTES, Assembly, Fragment, fragments, limit_only
from messenger.rdma.lane import Lane
from messenger.rdma.memory import SHARE, FrameMemory
from messenger.rdma.policy.credits import ReceiveCredits, SendCredits
from messenger.rdma.policy.posting import Announce, Limits, Post, RailSpec
from messenger.rdma.policy.rails import Rails
from messenger.rdma.verbs import abi
from messenger.rdma.verbs.completions import Completions
from messenger.rdma.verbs.queue_pair import DEPTH
from messenger.rdma.windows import Window
from messenger.rdma.work import Work
from messenger.slices import Rows
from messenger.transport import NoPath

_MAX_UNSENT_FRAMES = 256
_MAX_MOVING_NBYTES = 32 << 20
_SPINS = 20
_LAST_WORD_S = 1.0
_DRAIN_S = 2.0
_LIMITS = Limits(window_rows=DEPTH // 2, post_rows=DEPTH // 4)
_NO_ROWS: Rows = np.empty((0, 3), dtype=np.int64)


@dataclass(eq=False)
class Movement:
    """Bytes between a local region and a remote one. `keys`: (lkey, rkey) for each lane."""

    rows: Rows
    nbytes: int
    opcode: int
    local_address: int
    remote_address: int
    keys: Sequence[tuple[int, int]]
    held: object = None
    """What must live until the hardware is done with it."""
    left_nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.left_nbytes = self.nbytes


@dataclass(eq=False)
class _Batch:
    movement: Movement | None
    frame: bytes


class RdmaLink(Link):
    """`far_address` is where the peer's inbox begins, on every rail alike."""

    def __init__(
        self, sock: BufferedLink, lanes: Sequence[Lane], memory: FrameMemory, far_address: int, counters: Counters
    ) -> None:
        self.address = sock.address
        self.lanes = tuple(lanes)
        self._sock = sock
        self._memory = memory
        self._far_address = far_address
        self._counters = counters
        self._changed = threading.Condition()
        self._is_led = False
        self._rails = Rails(
            [RailSpec(lane.rail.name, lane.rail.speed_gbit, lane.rail.is_spare) for lane in lanes],
            _LIMITS,
            time.monotonic_ns(),
        )
        self._batches: dict[int, _Batch] = {}
        self._posts: dict[int, Post] = {}
        self._flows: dict[tuple[int, int], Flow] = {}  # by rail and opcode; the stream counts the same bytes by peer
        self._unsent_frames = 0
        self._moving_nbytes = 0
        self._leaving: deque[tuple[Announce, deque[Fragment]]] = deque()
        self._num_sent = 0
        self._send_credits = SendCredits(SHARE)
        self._receive_credits = ReceiveCredits(SHARE)
        self._assembly = Assembly()
        self._arrived: deque[bytes] = deque()
        self._windows: list[Window] = []
        self._failure: Exception | None = None
        self._peer_left = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._epoll.register(sock.fileno(), select.EPOLLRDHUP)
        for lane in lanes:
            self._epoll.register(lane.queue.fd, select.EPOLLIN)

    # What a Link is.

    def set_timeout(self, timeout_s: float | None) -> None:
        self._sock.set_timeout(timeout_s)

    def send(self, message: Message, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        assert not views
        assert fd is None
        self.move(None, message)
        if isinstance(message, Goodbye):
            self._wait_sent()

    def receive(self) -> Message:
        with self._changed:
            while not self._arrived:
                self._check()
                self._pump()
            frame = self._arrived.popleft()
            self._receive_credits.freed()
            unsent_frames = self._unsent_frames
            self._drive()
            if self._unsent_frames < unsent_frames:
                self._tell()
        kind, length = decode_prefix(frame[: PREFIX.size])
        if length != len(frame) - PREFIX.size:
            raise ProtocolError(f"a frame of {len(frame)} bytes that announces {length}")
        return decode_body(kind, memoryview(frame)[PREFIX.size :])

    def peer_is_gone(self) -> bool:
        return self._failure is not None or self._sock.peer_is_gone()

    def cut(self) -> None:
        # The peer learns of it before anything else, and delivers nothing of this link from then on.
        self._sock.cut()
        with self._changed:
            self._end(LinkClosed(f"the connection to {self.address} was cut"))

    def close(self, *, reset: bool = False) -> None:
        with self._changed:
            self._end(LinkClosed(f"the connection to {self.address} was closed"))
            self._drain()
        for window in self._windows:
            window.close()
        for lane in self.lanes:
            lane.close()
        self._epoll.close()
        os.close(self._wake)
        self._sock.close(reset=reset)

    # What the two sides of the transport need beside it.

    def has_room(self) -> bool:
        """Whether `move` would not block."""
        return self._unsent_frames < _MAX_UNSENT_FRAMES and self._moving_nbytes < _MAX_MOVING_NBYTES

    def move(self, movement: Movement | None, message: Message) -> None:
        """Move the bytes, then send the frame, which the peer gets when they are there (or were read)."""
        frame = encode(message)
        with self._changed:
            self._wait_for(self.has_room)
            rows = _NO_ROWS if movement is None else movement.rows
            number = self._rails.submit(rows, announce=True)
            self._batches[number] = _Batch(movement, frame)
            self._unsent_frames += 1
            self._moving_nbytes += 0 if movement is None else movement.nbytes
            self._drive()

    def finish(self, movement: Movement) -> None:
        """Wait until the hardware is done with the movement's local memory. Raises OSError when the link ended."""
        with self._changed:
            self._wait_for(lambda: not movement.left_nbytes)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until a message that the receiving thread handled made it true (see `wake`). Raises OSError."""
        with self._changed:
            self._wait_for(condition)

    def probe(self, timeout_s: float) -> None:
        """Have an empty write answered on every lane. Raises NoPath, naming those on which none was in time."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            marks = [lane.pair.drain_mark() for lane in self.lanes]
            while silent := [
                lane.rail.name for lane, mark in zip(self.lanes, marks, strict=True) if lane.pair.done < mark
            ]:
                if time.monotonic() > deadline_s or self._failure is not None or self._peer_left:
                    reason = self._failure or f"no answer within {timeout_s:.3g} s"
                    raise NoPath(f"no way to {self.address} by {', '.join(silent)}: {reason}")
                self._pump(max(0.0, deadline_s - time.monotonic()))

    def wake(self) -> None:
        """What somebody waits for may be true now."""
        with self._changed:
            self._tell()

    def bind(self, registrations: Sequence[Any], address: int, nbytes: int, access: int) -> Window:
        """A window for the peer, on every lane, done when the hardware has it. Raises OSError."""
        with self._changed:
            self._check()
            window = Window()
            self._windows = [one for one in self._windows if not one.is_closed]
            self._windows.append(window)
            marks = []
            for lane, registration in zip(self.lanes, registrations, strict=True):
                self._wait_for(lambda lane=lane: lane.pair.room > 0)  # type: ignore[misc]
                marks.append(window.open_on(lane, registration, address, nbytes, access))
            self._wait_for(lambda: all(lane.pair.done >= mark for lane, mark in zip(self.lanes, marks, strict=True)))
            return window

    # Waiting, with the lock held.

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._peer_left:
            raise LinkClosed(f"{self.address} closed the connection")

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        while True:
            self._check()
            if condition():
                return
            self._pump()

    def _wait_sent(self) -> None:
        """The last word has reached the peer, or there is no more time for it."""
        deadline_s = time.monotonic() + _LAST_WORD_S
        with self._changed:
            lane = self.lanes[0]
            mark = lane.pair.drain_mark() if not self._unsent_frames else 0
            while self._unsent_frames or lane.pair.done < mark:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or self._failure is not None or self._peer_left:
                    return
                self._pump(left_s)
                if not self._unsent_frames and not mark:
                    mark = lane.pair.drain_mark()

    def _tell(self) -> None:
        """Let everybody look again, the leader too, which may wait for what another thread just did."""
        self._changed.notify_all()
        if self._is_led:
            os.eventfd_write(self._wake, 1)

    def _pump(self, timeout_s: float | None = None) -> None:
        """Let something happen: as the leader, or by waiting for the one there is."""
        if self._is_led:
            self._changed.wait(timeout_s)
            return
        self._is_led = True
        self._changed.release()
        found: list[tuple[int, Completions]] = []
        trouble: Exception | None = None
        try:
            found = self._look(timeout_s)
        except OSError as error:
            trouble = error
        finally:
            self._changed.acquire()
            self._is_led = False
            try:
                for index, completions in found:
                    self._take(index, completions)
                if trouble is not None:
                    raise trouble
                self._drive()
            except (OSError, ProtocolError, InvalidArgument) as error:
                self._end(error if isinstance(error, OSError) else ProtocolError(f"{self.address}: {error}"))
            finally:
                self._changed.notify_all()

    def _look(self, timeout_s: float | None) -> list[tuple[int, Completions]]:
        """What completed by now, or until something does; without the lock."""
        for _ in range(_SPINS):
            found = self._poll()
            if found:
                return found
        for lane in self.lanes:
            lane.queue.arm()
        found = self._poll()
        if found:
            return found
        ready = {fd for fd, _ in self._epoll.poll(timeout_s)}
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for lane in self.lanes:
            if lane.queue.fd in ready:
                lane.queue.take_event()
        found = self._poll()
        # What arrived before the peer left still counts.
        if self._sock.fileno() in ready and not found:
            self._peer_left = True
        return found

    def _poll(self) -> list[tuple[int, Completions]]:
        polled = ((index, lane.queue.poll()) for index, lane in enumerate(self.lanes))
        return [(index, completions) for index, completions in polled if len(completions)]

    # Completions, with the lock held.

    def _take(self, index: int, completions: Completions) -> None:
        lane = self.lanes[index]
        received = 0
        for number, status, _, _, nbytes, _, _ in completions.tolist():
            if number == abi.RECEIVE_ID:
                received += 1
                if status == abi.WC_SUCCESS and self._failure is None:
                    self._take_fragment(nbytes)
            else:
                lane.pair.done = max(lane.pair.done, number)
                if status != abi.WC_SUCCESS and self._failure is None:
                    self._end(LinkClosed(f"rail {lane.rail.name} to {self.address}: {abi.status_name(status)}"))
                    self._counters.add("rdma_rail_errors")
        if received:
            lane.device.receive_again(received)
        if self._failure is None:
            self._complete(index, lane)

    def _complete(self, index: int, lane: Lane) -> None:
        now_ns = time.monotonic_ns()
        while lane.pending and lane.pending[0][0] <= lane.pair.done:
            _, instruction = lane.pending.popleft()
            post = self._posts.pop(instruction, None)
            if post is not None:
                self._done(post)
            batch = self._rails.completed(instruction, index, now_ns)
            if batch is not None:
                self._batches.pop(batch)

    def _done(self, post: Post) -> None:
        movement = self._batches[post.batch].movement
        assert movement is not None
        movement.left_nbytes -= post.nbytes
        self._moving_nbytes -= post.nbytes
        self._count(post, movement.opcode)

    def _count(self, post: Post, opcode: int) -> None:
        flow = self._flows.get((post.rail, opcode))
        if flow is None:
            rail = self.lanes[post.rail].rail.name
            direction: Direction = "read" if opcode == abi.WR_RDMA_READ else "written"
            flow = self._flows[post.rail, opcode] = self._counters.flow(
                peer="", transport="rdma", rail=rail, direction=direction
            )
        flow.add(post.nbytes, len(post.rows), (time.monotonic_ns() - post.posted_ns) / 1e9)

    def _take_fragment(self, nbytes: int) -> None:
        self._receive_credits.received()
        place = self._memory.inbox_place(self._assembly.num_fragments)
        limit, frame, _ = self._assembly.take(place, nbytes)
        self._send_credits.told(limit)
        if frame is None:
            self._receive_credits.freed()
        else:
            self._arrived.append(frame)  # its last place is free when it was taken

    # Posting, with the lock held.

    def _drive(self) -> None:
        """Post all that may be posted."""
        if self._failure is not None:
            return
        for instruction in self._rails.due(time.monotonic_ns()):
            if isinstance(instruction, Post):
                self._post(instruction)
            else:
                self._leaving.append((instruction, deque(fragments(self._batches[instruction.batch].frame))))
        self._send_fragments()
        if self._receive_credits.owes and self._room_for_frame() and self._send_credits.try_take_last():
            self._send_fragment(limit_only())

    def _post(self, post: Post) -> None:
        lane = self.lanes[post.rail]
        movement = self._batches[post.batch].movement
        assert movement is not None
        lkey, rkey = movement.keys[post.rail]
        work = Work.moves(
            post.rows,
            opcode=movement.opcode,
            local_address=movement.local_address,
            lkey=lkey,
            remote_address=movement.remote_address,
            rkey=rkey,
            max_sge=lane.device.limits.max_sge,
        )
        lane.pending.append((lane.pair.post(work), post.number))
        self._posts[post.number] = post

    def _send_fragments(self) -> None:
        while self._leaving:
            announce, pieces = self._leaving[0]
            while pieces:
                if not self._room_for_frame() or not self._send_credits.try_take():
                    return
                number = self._send_fragment(pieces.popleft())
            self.lanes[announce.rail].pending.append((number, announce.number))
            self._leaving.popleft()
            self._unsent_frames -= 1

    def _room_for_frame(self) -> bool:
        rail = self._rails.frame_rail
        return rail is not None and self.lanes[rail].pair.room > 0

    def _send_fragment(self, fragment: Fragment) -> int:
        rail = self._rails.frame_rail
        assert rail is not None
        lane = self.lanes[rail]
        place, address = self._memory.outbox_place(self._num_sent)
        nbytes = fragment.pack(place, self._num_sent, self._receive_credits.tell())
        work = Work.frame(
            address=address,
            nbytes=nbytes,
            lkey=lane.lkey,
            remote_address=self._far_address + self._num_sent % SHARE * PLACE_NBYTES,
            rkey=lane.far_rkey,
            number=self._num_sent,
        )
        self._num_sent += 1
        return lane.pair.post(work)

    # The end, with the lock held.

    def _end(self, failure: Exception) -> None:
        """The hardware moves nothing of this link any more when this returns."""
        if self._failure is None:
            self._failure = failure
            self._sock.cut()
        for lane in self.lanes:
            lane.pair.fail()
        self._tell()

    def _drain(self) -> None:
        """Wait until everything posted came back; destroying the queue pairs does the rest."""
        deadline_s = time.monotonic() + _DRAIN_S
        try:
            marks = [lane.pair.drain_mark() if lane.pair.room else lane.pair.posted for lane in self.lanes]
        except OSError:
            return
        while any(lane.pair.done < mark for lane, mark in zip(self.lanes, marks, strict=True)):
            for index, completions in self._poll():
                self._take(index, completions)
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.0005)
