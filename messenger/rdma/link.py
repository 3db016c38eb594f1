"""A connection over lanes: frames go to the peer's inbox, data directly between the regions; the socket shows liveness.

Threads: the link has none of its own. The first thread that waits (for a frame, room or a completion) becomes the
leader: it polls the completion queues, sleeps on their channels and distributes the completions. Other waiting threads
wait for it on the condition. `cut` wakes it.

Locks:

    _changed            guards all state of the link, its ConnectionIO, LaneRepair and LivenessWatch; never held while
                        sleeping, nor in `look`, which only the leader (`_is_led`) calls
    Window._lock        one per window, which any thread may close; taken under `_changed` or alone
    Doorbell._ringing   one thread posts to a queue pair at a time; taken under the others or, by `_ring`, alone
    Device's locks      of the device's shared resources (`verbs/device.py`); taken under `_changed` or alone

Lifetimes: only a thread that is about to lead (in `_pump`, under the lock) replaces lanes; the queue pairs of an ended
link are stopped by `_end`, and freed by `close`, once no thread uses the link.
"""

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from messenger.counters import Counters
from messenger.errors import ProtocolError
from messenger.frames import Fabric, Frame, Goodbye, Message, encode
from messenger.link import BufferedLink, Link, LinkClosed
from messenger.rdma.completion_watch import CompletionWatch, WatchResult
from messenger.rdma.connection_io import ConnectionIO, Movement
from messenger.rdma.inbox import decoded
from messenger.rdma.lane import Lane, drain
from messenger.rdma.lane_repair import LaneRepair
from messenger.rdma.liveness_watch import LivenessWatch
from messenger.rdma.memory import FrameMemory
from messenger.rdma.verbs import abi
from messenger.rdma.verbs.completions import Completions
from messenger.rdma.windows import Window, Windows
from messenger.transport import NoPath
from rpc.errors import InvalidArgument

_log = logging.getLogger(__name__)

_LAST_WORD_S = 1.0
_LATECOMER_S = 1.0
"""Seconds after the first rail's answer after which a rail that has not answered is dropped."""


class RdmaLink(Link):
    """Link over RDMA lanes. `inbox_address` is the start of the peer's inbox, equal on every rail."""

    def __init__(
        self,
        sock: BufferedLink,
        lanes: Sequence[Lane],
        memory: FrameMemory,
        inbox_address: int,
        counters: Counters,
        *,
        caller: bool,
    ) -> None:
        self.address = sock.address
        self.generation = 0
        """Generation of keys; increased when earlier windows and their keys no longer match the lanes."""
        self._sock = sock
        self._counters = counters
        self._changed = threading.Condition()
        self._is_led = False
        self._num_waiting = 0
        self._hears_frames_only = False
        self._sleeps_on = False  # the leader, for as long as nothing happens
        self._overslept = False
        self._io = ConnectionIO(lanes, memory, inbox_address, counters, self._trouble)
        self._repairs = LaneRepair(self._io, memory, self, counters, self._renewed, leads=caller)
        self._liveness = LivenessWatch(self._io, self._fails)
        self._windows = Windows()
        self._failure: Exception | None = None
        self._peer_left = False
        self._watch = CompletionWatch(sock.fileno())
        for lane in lanes:
            self.watch(lane)

    # The interface of Link.

    def set_timeout(self, timeout_s: float | None) -> None:
        self._sock.set_timeout(timeout_s)

    def send(self, message: Message | Frame, views: Sequence[memoryview] = (), fd: int | None = None) -> None:
        assert not views
        assert fd is None
        self.move(None, message)
        if isinstance(message, Goodbye):
            self._wait_sent()

    def receive(self) -> Message:
        message = self.receive_unless(_never)
        assert message is not None
        return message

    def try_receive(self) -> Message | None:
        return self.receive_unless(_always) if self._io.arrived else None

    def receive_unless(self, is_over: Callable[[], bool]) -> Message | None:
        """Receive a frame as `receive` does, or return None once a completion makes the condition true."""
        while True:
            frame = self._receive_frame(is_over)
            self._ring()
            if frame is None:
                return None
            message = decoded(frame)
            if not isinstance(message, Fabric):
                return message
            with self._changed:
                self._repairs.receive(message)
                self._notify()

    def peer_is_gone(self) -> bool:
        return self._failure is not None or self._sock.peer_is_gone()

    def cut(self) -> None:
        # First, so that the peer delivers nothing more of this link.
        self._sock.cut()
        with self._changed:
            self._end(LinkClosed(f"the connection to {self.address} was cut"))

    def close(self, *, reset: bool = False) -> None:
        with contextlib.ExitStack() as rest:
            rest.callback(self._sock.close, reset=reset)
            rest.callback(self._watch.close)
            for lane in self.lanes:
                rest.callback(lane.close)
            rest.callback(self._windows.close)
            with self._changed:
                self._end(LinkClosed(f"the connection to {self.address} was closed"))
                drain(self.lanes)

    # For the two sides of the transport.

    @property
    def lanes(self) -> Sequence[Lane]:
        return self._io.lanes

    def has_room(self) -> bool:
        """Return True if `move` would not block."""
        return self._io.has_room

    def move(self, movement: Movement | None, message: Message | Frame | None) -> bool:
        """Move the bytes, then send the frame, if any; the peer receives it after the bytes have landed (or were read).

        Blocks while there is no room. Returns False, having done nothing, if a lane was rebuilt for which the movement
        has no key. Raises OSError if the link has ended.
        """
        frame = None if message is None else encode(message)
        with self._changed:
            self._wait_for(self.has_room)
            if movement is not None and movement.generation != self.generation:
                return False
            self._io.submit(movement, frame)
            self._listen_for_all()
        self._ring()
        return True

    def send_soon(self, message: Message) -> None:
        """Queue a frame, on any thread and without waiting. Does nothing if the link has ended."""
        with self._changed:
            if self._failure is None:
                self._act(lambda: self._io.submit_at_once(encode(message)))
                self._listen_for_all()
        self._ring()

    def finish(self, movement: Movement) -> None:
        """Wait until the hardware has finished with the movement's local memory. Raises OSError if the link ends."""
        if movement.left_nbytes:
            self.wait_for(lambda: not movement.left_nbytes)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition is true; a thread that makes it true must call `wake`.

        Raises OSError if the link has ended.
        """
        with self._changed:
            self._wait_for(condition)
        self._ring()

    def wake(self) -> None:
        """Make waiting threads check their conditions again."""
        with self._changed:
            self._notify()

    def probe(self, timeout_s: float) -> None:
        """Test every lane with an empty write and drop those that do not answer. Raises NoPath if none does."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            marks = [lane.pair.drain_mark() for lane in self.lanes]
            while silent := [index for index, lane in enumerate(self.lanes) if lane.pair.done < marks[index]]:
                now_s = time.monotonic()
                if len(silent) < len(marks):
                    deadline_s = min(deadline_s, now_s + _LATECOMER_S)
                if now_s >= deadline_s or self._failure is not None or self._peer_left:
                    break
                self._pump(deadline_s - now_s)
            if len(silent) == len(marks) or self._failure is not None or self._peer_left:
                rails = ", ".join(lane.rail.name for lane in self.lanes)
                raise NoPath(f"cannot reach {self.address} by {rails}: {self._failure or 'no answer'}")
            for index in silent:
                self._repairs.give_up(index)
        self._ring()

    def bind(self, registrations: Sequence[Any], address: int, nbytes: int, access: int) -> Window:
        """Open a window for the peer on every working lane and wait until the hardware has it. Raises OSError."""
        with self._changed:
            self._check()
            window = self._windows.open()
            marks: list[tuple[Lane, int]] = []
            for lane, registration in zip(list(self.lanes), registrations, strict=True):
                self._wait_for(lambda lane=lane: not lane.pair.is_usable or lane.pair.room > 0)  # type: ignore[misc]
                if not lane.pair.is_usable:
                    window.rkeys.append(0)
                    continue
                marks.append((lane, window.open_on(lane, registration, address, nbytes, access)))
            self._wait_for(lambda: all(not lane.pair.is_usable or lane.pair.done >= mark for lane, mark in marks))
        self._ring()
        return window

    def watch(self, lane: Lane) -> None:
        """Include the lane's completions."""
        self._watch.add(lane)

    def unwatch(self, lane: Lane) -> None:
        """Exclude the lane, which is about to be closed."""
        self._windows.close_on(lane)
        self._watch.remove(lane)

    # Posted work is handed to the device without the lock, because soft devices send within the call.

    def _ring(self) -> None:
        """Hand posted work to the device. If others keep adding work, the leader or the next waiting thread goes on."""
        while self._is_left_by_a_round():
            with self._changed:
                if self._is_led:
                    self._watch.wake()
                    return

    def _is_left_by_a_round(self) -> bool:
        is_left = False
        for lane in self._io.lanes:
            try:
                if lane.pair.unrung and lane.pair.ring():
                    is_left = True
            except OSError as error:
                with self._changed:
                    self._end(error)
        return is_left

    # Waiting, with the lock held.

    def _receive_frame(self, is_over: Callable[[], bool]) -> bytes | None:
        io = self._io
        with self._changed:
            while not io.arrived:
                if is_over():
                    return None
                self._check()
                self._pump(frames_only=True)
            frame = io.arrived.popleft()
            io.taken()
            if self._failure is None:
                unsent_frames = io.unsent_frames
                io.drive()
                self._listen_for_all()
                if io.unsent_frames < unsent_frames:
                    self._notify()
            return frame

    def _check(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)  # a copy, since a raised exception keeps its traceback's frames alive
        if self._peer_left:
            raise LinkClosed(f"{self.address} closed the connection")

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._check()
        if condition():
            return
        self._num_waiting += 1
        try:
            self._listen_for_all()
            while not condition():
                self._pump()
                self._check()
        finally:
            self._num_waiting -= 1

    def _wait_sent(self) -> None:
        """Wait until the last frame has reached the peer, at most 1 s."""
        deadline_s = time.monotonic() + _LAST_WORD_S
        mark = 0
        with self._changed:
            while self._failure is None and not self._peer_left and (left_s := deadline_s - time.monotonic()) > 0:
                rail = self._io.rails.frame_rail
                if rail is None:
                    return
                pair = self.lanes[rail].pair
                if not self._io.unsent_frames:
                    mark = mark or pair.drain_mark()
                    if pair.done >= mark:
                        return
                self._pump(left_s)

    def _notify(self) -> None:
        """Wake every waiting thread, the leader included, because its condition may have changed."""
        self._changed.notify_all()
        if self._is_led:
            self._watch.wake()

    def _needs_all(self) -> bool:
        """Return True if a thread waits for completions of sent work."""
        return self._num_waiting > 0 or self._io.num_unframed > 0 or self._io.is_held_up

    def _listen_for_all(self) -> None:
        """Wake a leader that sleeps for frames only, or indefinitely, so that it also waits for the new work."""
        if self._sleeps_on or (self._hears_frames_only and self._needs_all()):
            self._watch.wake()

    def _pump(self, timeout_s: float | None = None, *, frames_only: bool = False) -> None:
        """Make progress, as the leader or by waiting for the current leader.

        `frames_only` means that the caller waits for a frame.
        """
        if self._is_led:
            self._changed.wait(timeout_s)
            return
        self._act(self._keep_up)
        if self._failure is not None:
            return
        for wait_s in self._repairs.wait_s(), self._liveness.wait_s():
            timeout_s = wait_s if timeout_s is None or (wait_s is not None and wait_s < timeout_s) else timeout_s
        self._hears_frames_only = frames_only and not self._overslept and not self._needs_all()
        self._is_led, self._sleeps_on = True, timeout_s is None
        self._changed.release()
        seen = WatchResult([])
        trouble: OSError | None = None
        try:
            limit_s = 0.0 if self._is_left_by_a_round() else timeout_s
            seen = self._watch.look(self.lanes, limit_s, frames_only=self._hears_frames_only)
        except OSError as error:
            trouble = error
        finally:
            self._changed.acquire()
            self._is_led = self._hears_frames_only = self._sleeps_on = False
        self._overslept = seen.overslept
        self._peer_left = self._peer_left or seen.peer_left
        self._act(lambda: self._digest(seen.found, trouble))
        self._changed.notify_all()

    def _keep_up(self) -> None:
        self._repairs.work()
        self._liveness.look()

    def _act(self, action: Callable[[], None]) -> None:
        """Run an action; the link ends if it fails."""
        try:
            action()
        except (ProtocolError, InvalidArgument) as error:
            self._end(ProtocolError(f"{self.address}: {error}"))
        except OSError as error:
            self._end(error)

    def _digest(self, found: list[tuple[int, Completions]], trouble: OSError | None) -> None:
        for index, completions in found:
            self._io.take(index, completions)
        if trouble is not None:
            raise trouble
        if self._failure is None:
            self._io.drive()

    # Ends, with the lock held.

    def _trouble(self, index: int, status: int) -> None:
        lane = self.lanes[index]
        if self._failure is not None or lane.pair.failed:
            return  # flushed after the failure
        self._fails(index, abi.status_name(status), is_denied=status == abi.WC_REM_ACCESS_ERR)

    def _fails(self, index: int, reason: str, *, is_denied: bool = False) -> None:
        """Handle the failure of a lane. With `is_denied`, the peer denied the access, and the link ends."""
        self._counters.add("rdma_rail_errors")
        if is_denied or not self._repairs.failed(index, reason):
            self._end(LinkClosed(f"rail {self.lanes[index].rail.name} to {self.address}: {reason}"))

    def _renewed(self) -> None:
        self.generation += 1

    def _end(self, failure: Exception) -> None:
        """End the link. The hardware moves nothing of it afterwards; if the device fails, not before `close`."""
        if self._failure is None:
            self._failure = copy.copy(failure)
            self._sock.cut()
        for lane in self.lanes:
            try:
                lane.pair.fail()
            except OSError as error:
                _log.error("the connection to %s ends, but %s", self.address, str(error))
        self._notify()


def _never() -> bool:
    return False


def _always() -> bool:
    return True
