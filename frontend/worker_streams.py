"""Token streams from workers: one Attach stream per (target, incarnation), opened on demand and shared by requests.

A stream's reader appends each message's tokens to the inboxes of their attempts and never waits for any of them. When a
stream ends, every attempt on it receives WorkerDisconnected.

Everything runs on one event loop, so there are no locks. A WorkerStream owns two tasks: the reader (`_run`), which
lives as long as the stream, and the writer, which lives from the worker's first message to the stream's end. An Inbox
lives as long as its attempt; WorkerStream holds it from `subscribe` to `unsubscribe` or to the stream's end.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, NamedTuple

import grpc
import grpc.aio

from frontend.errors import WorkerLost
from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2, worker_pb2_grpc
from rpc.control import open_channel
from rpc.versions import own_software

_log = logging.getLogger(__name__)

_CLOCK_S: Final = 0.001  # resolution of the event loop's timers


class TokenReceived(NamedTuple):
    """A token read from a worker's stream at `at_s` (monotonic clock).

    A named tuple, because there are many of these events and it is created three times as fast as a frozen dataclass.
    """

    node_id: str
    token: worker_pb2.Token
    at_s: float


@dataclass(frozen=True)
class FailureReceived:
    """The worker reported that the attempt failed."""

    node_id: str
    failure: worker_pb2.Failure


@dataclass(frozen=True)
class WorkerDisconnected:
    """The worker's stream ended or the worker hangs; its part of the attempt is lost."""

    node_id: str
    reason: str


InboxEvent = TokenReceived | FailureReceived | WorkerDisconnected


class Inbox:
    """Bounded event queue of one attempt whose writers never wait.

    At `capacity` events it overflows once and drops all further tokens. Failures are always queued; an attempt has at
    most a few. There is one reader; call `close` when it stops reading.
    """

    def __init__(self, capacity: int, on_overflow: Callable[[], None]) -> None:
        self._events: list[InboxEvent] = []
        self._capacity = capacity
        self._on_overflow = on_overflow
        self._waiter: asyncio.Future[None] | None = None
        # Setting a timer for each wait would cost more than the wait itself. One timer is left running across waits and
        # is set again if it fires before the current wait's deadline.
        self._timer: asyncio.Handle | None = None
        self._timer_s = self._until_s = math.inf
        self.overflowed = False

    def put(self, event: InboxEvent) -> None:
        """Append an event."""
        if type(event) is TokenReceived:
            if self.overflowed:
                return
            if len(self._events) >= self._capacity:
                self.overflowed = True
                self._on_overflow()
                self._wake()
                return
        self._events.append(event)
        self._wake()

    async def take(self, until_s: float = math.inf) -> list[InboxEvent]:
        """Return all queued events; wait for one if there are none. Empty only if the inbox overflowed.

        Raises TimeoutError at `until_s` (monotonic clock) and when it is interrupted.
        """
        if not self._events and not self.overflowed:
            self._waiter = asyncio.get_running_loop().create_future()
            self._set_timer(until_s)
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    def interrupt(self) -> None:
        """Make a waiting `take` raise TimeoutError."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(TimeoutError())

    def close(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _set_timer(self, until_s: float) -> None:
        self._until_s = until_s
        if self._timer is not None and self._timer_s > until_s:
            self.close()
        if self._timer is None and until_s < math.inf:
            self._timer, self._timer_s = asyncio.get_running_loop().call_at(until_s, self._on_timer), until_s

    def _on_timer(self) -> None:
        self._timer = None
        if self._waiter is None:
            return  # the next wait sets the timer
        if asyncio.get_running_loop().time() + _CLOCK_S >= self._until_s:
            self.interrupt()
        else:
            self._set_timer(self._until_s)


_CLOSE_GRACE_S: Final = 1.0
_TOKENS_PER_ITERATION: Final = 16  # requests that are woken in one iteration of the event loop

AttachCall = grpc.aio.StreamStreamCall[worker_pb2.FrontendMessage, worker_pb2.WorkerMessage]


class WorkerStream:
    """Attach stream to one incarnation of one worker. Only WorkerStreams creates it."""

    def __init__(self, node: conductor_pb2.NodeRef, hello: worker_pb2.Hello) -> None:
        self.node_id = node.node_id
        self.incarnation = node.incarnation
        self.target = node.target
        self.software = common_pb2.Software()  # of the worker, once it is attached
        self.ended = False
        self._hello = hello
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._outgoing: deque[worker_pb2.FrontendMessage] = deque()
        self._has_outgoing = asyncio.Event()
        self.sent = asyncio.Event()  # set while nothing is queued
        self.sent.set()
        self._attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"attach {self.node_id}")

    async def attached(self) -> None:
        """Wait for the worker's first message, which confirms the attachment.

        Raises WorkerLost if the stream ends first.
        """
        await asyncio.shield(self._attached)

    def subscribe(self, request_id: str, attempt: int, inbox: Inbox) -> None:
        """Deliver this attempt's events to `inbox` until `unsubscribe`.

        An ended stream delivers WorkerDisconnected now.
        """
        if self.ended:
            inbox.put(WorkerDisconnected(self.node_id, f"stream to {self.node_id} at {self.target} has ended"))
            return
        self._inboxes[request_id, attempt] = inbox

    def unsubscribe(self, request_id: str, attempt: int) -> None:
        """Drop all further events of this attempt."""
        self._inboxes.pop((request_id, attempt), None)

    def send(self, message: worker_pb2.FrontendMessage) -> None:
        """Queue a message; messages are sent in order. Ignored on an ended stream, whose subscribers were notified."""
        if not self.ended:
            self._outgoing.append(message)
            self._has_outgoing.set()
            self.sent.clear()

    def cancel(self, request_id: str, attempt: int, *, keep_kv: bool, kept_tokens: int = 0) -> None:
        """Cancel this attempt, and any earlier one of the request, on the worker.

        With `keep_kv` the answer is complete and its KV is stored for the conversation's next turn: that of its first
        `kept_tokens` tokens (0: unknown).
        """
        cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt, keep_kv=keep_kv, kept_tokens=kept_tokens)
        self.send(worker_pb2.FrontendMessage(cancel=cancel))

    def suspect(self) -> None:
        """Notify all attempts that the worker hangs, as at the stream's end. An attached stream stays open.

        The worker reads the cancels that follow once it continues, before it can receive new work.
        """
        reason = f"{self.node_id} at {self.target} hangs: it has stopped reporting to the conductor"
        if self._attached.done():
            self._notify(reason)
        else:
            self._end(reason)
            self._task.cancel()

    @property
    def num_subscriptions(self) -> int:
        """Number of attempts that are subscribed."""
        return len(self._inboxes)

    @property
    def num_outgoing(self) -> int:
        """Number of messages that are not sent yet."""
        return len(self._outgoing)

    async def close(self) -> None:
        """End the stream and notify the requests on it."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end("closed by the frontend")  # a task that is cancelled before its first step never runs its own code

    async def _run(self) -> None:
        reason = "closed by the frontend"
        try:
            async with open_channel(self.target) as channel:
                call: AttachCall = worker_pb2_grpc.WorkerStub(channel).Attach()
                reason = await self._exchange(call)
        except Exception as error:
            reason = str(error)
            _log.exception("stream to %s at %s broke", self.node_id, self.target)
        finally:
            self._end(reason)

    async def _exchange(self, call: AttachCall) -> str:
        """Exchange messages until the stream ends; return the reason for the end."""
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(worker_pb2.FrontendMessage(hello=self._hello))
            async for message in call:
                if writer is None:
                    self.software = message.software
                    self._attached.set_result(None)
                    writer = asyncio.create_task(self._write(call), name=f"attach writer {self.node_id}")
                await self._deliver(message)
            return "the worker ended the stream"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.InvalidStateError:  # raised by grpc.aio for writing on a finished call
            return f"{(await call.code()).name}: {await call.details()}"
        finally:
            call.cancel()
            if writer is not None:
                writer.cancel()
                await asyncio.gather(writer, return_exceptions=True)

    async def _write(self, call: AttachCall) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outgoing:
                try:
                    await call.write(self._outgoing[0])
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the reader detects the same end and reports it
                self._outgoing.popleft()
            self.sent.set()

    async def _deliver(self, message: worker_pb2.WorkerMessage) -> None:
        now_s = monotonic()
        for number, token in enumerate(message.tokens, 1):
            # Waking the requests of a thousand sequences at once would block the loop for a fifth of a second.
            if number % _TOKENS_PER_ITERATION == 0:
                await asyncio.sleep(0)
            if inbox := self._inboxes.get((token.request_id, token.attempt)):
                inbox.put(TokenReceived(self.node_id, token, now_s))
        for failure in message.failures:
            if inbox := self._inboxes.get((failure.request_id, failure.attempt)):
                inbox.put(FailureReceived(self.node_id, failure))

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._outgoing.clear()
        self.sent.set()
        text = f"stream to {self.node_id} at {self.target} ended: {reason}"
        if not self._attached.done():
            self._attached.set_exception(WorkerLost(text))
            self._attached.exception()  # mark it as retrieved: there may be no waiter
        self._notify(text)

    def _notify(self, text: str) -> None:
        """Notify all subscribed attempts that the worker's part of them is lost."""
        if self._inboxes:
            _log.warning("%s; %d requests were on it", text, len(self._inboxes))
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(WorkerDisconnected(self.node_id, text))


class WorkerStreams:
    """All worker streams of one frontend."""

    def __init__(self, frontend_id: str, incarnation: int, attach_timeout_s: float) -> None:
        self._hello = worker_pb2.Hello(frontend_id=frontend_id, incarnation=incarnation, software=own_software())
        self._attach_timeout_s = attach_timeout_s
        self._streams: dict[tuple[str, int], WorkerStream] = {}

    async def attach(self, node: conductor_pb2.NodeRef) -> WorkerStream:
        """Return the stream to this incarnation of the node; open it if needed.

        Raises WorkerLost if there is none within the timeout.
        """
        for key in [key for key, stream in self._streams.items() if stream.ended]:
            del self._streams[key]
        key = node.target, node.incarnation
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = WorkerStream(node, self._hello)
        try:
            async with asyncio.timeout(self._attach_timeout_s):
                await stream.attached()
        except TimeoutError as error:
            raise WorkerLost(
                f"no stream to {node.node_id} at {node.target} within {self._attach_timeout_s:g} s"
            ) from error
        return stream

    def suspect(self, node_id: str, incarnation: int) -> None:
        """Notify all attempts on this incarnation of the node that it hangs."""
        for stream in self._streams.values():
            if (stream.node_id, stream.incarnation) == (node_id, incarnation):
                stream.suspect()

    @property
    def num_subscriptions(self) -> int:
        """Number of subscribed attempts over all streams."""
        return sum(stream.num_subscriptions for stream in self._streams.values())

    @property
    def num_outgoing(self) -> int:
        """Number of unsent messages over all streams."""
        return sum(stream.num_outgoing for stream in self._streams.values())

    @property
    def num_open(self) -> int:
        """Number of streams that have not ended."""
        return sum(not stream.ended for stream in self._streams.values())

    async def close(self) -> None:
        """Send queued messages (such as cancels) for a short grace period, then end every stream."""
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await asyncio.gather(*(stream.sent.wait() for stream in self._streams.values()))
        except TimeoutError:
            _log.warning("streams closed with messages still queued")
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))
        self._streams.clear()
