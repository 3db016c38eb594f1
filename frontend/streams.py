"""Token streams from workers: one Attach stream per (target, incarnation), opened on demand, kept, shared by requests.

A reader hands each message's tokens to the inboxes of their requests and never waits for any of them. When a stream
ends, for whatever reason, every request on it is told.
"""

import asyncio
import logging
from collections import deque
from time import monotonic
from typing import Final

import grpc
import grpc.aio

from frontend.errors import WorkerLost
from frontend.inbox import AttemptFailed, Inbox, TokenArrived, WorkerGone
from moonpool_proto.v1 import conductor_pb2, worker_pb2, worker_pb2_grpc
from rpc.control import open_channel
from rpc.versions import own_software

_log = logging.getLogger(__name__)
_CLOSE_GRACE_S: Final = 1.0
_AT_ONCE: Final = 16  # tokens of a message for which requests are woken before the event loop comes round again

AttachCall = grpc.aio.StreamStreamCall[worker_pb2.FrontendMessage, worker_pb2.WorkerMessage]


class WorkerStream:
    """The stream to one incarnation of one worker. Made by WorkerStreams only."""

    def __init__(self, node: conductor_pb2.NodeRef, hello: worker_pb2.Hello) -> None:
        self.node_id = node.node_id
        self.incarnation = node.incarnation
        self.target = node.target
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
        """Return once the worker has said, by its first message, that it knows us. Raises WorkerLost when it cannot."""
        await asyncio.shield(self._attached)

    def subscribe(self, request_id: str, attempt: int, inbox: Inbox) -> None:
        """Hand this attempt's events to `inbox` until `unsubscribe`; at once, when the stream is gone already."""
        if self.ended:
            inbox.put(WorkerGone(self.node_id, f"stream to {self.node_id} at {self.target} has ended"))
            return
        self._inboxes[request_id, attempt] = inbox

    def unsubscribe(self, request_id: str, attempt: int) -> None:
        """Drop what still comes for this attempt."""
        self._inboxes.pop((request_id, attempt), None)

    def send(self, message: worker_pb2.FrontendMessage) -> None:
        """Queue a message; they go out in order. Nothing happens on an ended stream: subscribers know of that."""
        if not self.ended:
            self._outgoing.append(message)
            self._has_outgoing.set()
            self.sent.clear()

    def cancel(self, request_id: str, attempt: int, *, keep_kv: bool, kept_tokens: int = 0) -> None:
        """Tell the worker that nobody wants more of this attempt, or of an earlier one.

        With `keep_kv` what it has is a whole answer, whose KV the next turn will want: that of its first `kept_tokens`
        tokens (0: not known).
        """
        cancel = worker_pb2.Cancel(request_id=request_id, attempt=attempt, keep_kv=keep_kv, kept_tokens=kept_tokens)
        self.send(worker_pb2.FrontendMessage(cancel=cancel))

    def suspect(self) -> None:
        """The worker hangs: attempts on the stream are told, as at its end. One that was attached to stays open.

        The cancels that follow are read when the worker goes on, which is also when it may be given work again.
        """
        reason = f"{self.node_id} at {self.target} has stopped reporting to the conductor: it hangs"
        if self._attached.done():
            self._tell(reason)
        else:
            self._end(reason)
            self._task.cancel()

    @property
    def num_subscriptions(self) -> int:
        """Attempts whose events are awaited."""
        return len(self._inboxes)

    @property
    def num_outgoing(self) -> int:
        """Messages that are not sent yet."""
        return len(self._outgoing)

    async def close(self) -> None:
        """End the stream; requests on it are told."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._end("closed by the front door")  # a task cancelled before its first step never got there

    async def _run(self) -> None:
        reason = "closed by the front door"
        try:
            async with open_channel(self.target) as channel:
                call: AttachCall = worker_pb2_grpc.WorkerStub(channel).Attach()
                reason = await self._converse(call)
        except Exception as error:
            reason = str(error)
            _log.exception("stream to %s at %s broke", self.node_id, self.target)
        finally:
            self._end(reason)

    async def _converse(self, call: AttachCall) -> str:
        """Talk until the stream ends; the reason it did."""
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(worker_pb2.FrontendMessage(hello=self._hello))
            async for message in call:
                if writer is None:
                    self._attached.set_result(None)
                    writer = asyncio.create_task(self._write(call), name=f"attach writer {self.node_id}")
                await self._deliver(message)
            return "the worker ended the stream"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except asyncio.InvalidStateError:  # grpc.aio's answer to writing on a finished call
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
                    return  # the reader sees the same end and reports it
                self._outgoing.popleft()
            self.sent.set()

    async def _deliver(self, message: worker_pb2.WorkerMessage) -> None:
        now_s = monotonic()
        for number, token in enumerate(message.tokens, 1):
            if number % _AT_ONCE == 0:  # a step of a thousand sequences would hold the loop for a fifth of a second
                await asyncio.sleep(0)
            if inbox := self._inboxes.get((token.request_id, token.attempt)):
                inbox.put(TokenArrived(self.node_id, token, now_s))
        for failure in message.failures:
            if inbox := self._inboxes.get((failure.request_id, failure.attempt)):
                inbox.put(AttemptFailed(self.node_id, failure))

    def _end(self, reason: str) -> None:
        if self.ended:
            return
        self.ended = True
        self._outgoing.clear()
        self.sent.set()
        text = f"stream to {self.node_id} at {self.target} ended: {reason}"
        if not self._attached.done():
            self._attached.set_exception(WorkerLost(text))
            self._attached.exception()  # nobody may be waiting: that is no mistake
        self._tell(text)

    def _tell(self, text: str) -> None:
        """Whatever the worker had of the attempts on the stream is lost."""
        if self._inboxes:
            _log.warning("%s; %d requests were on it", text, len(self._inboxes))
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.put(WorkerGone(self.node_id, text))


class WorkerStreams:
    """All streams of one front door."""

    def __init__(self, frontend_id: str, incarnation: int, attach_timeout_s: float) -> None:
        self._hello = worker_pb2.Hello(frontend_id=frontend_id, incarnation=incarnation, software=own_software())
        self._attach_timeout_s = attach_timeout_s
        self._streams: dict[tuple[str, int], WorkerStream] = {}

    async def attach(self, node: conductor_pb2.NodeRef) -> WorkerStream:
        """The stream to this incarnation of the node, opened if need be. Raises WorkerLost within the time-out."""
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
        """This incarnation of the node hangs: its attempts are told."""
        for stream in self._streams.values():
            if (stream.node_id, stream.incarnation) == (node_id, incarnation):
                stream.suspect()

    @property
    def num_subscriptions(self) -> int:
        """Attempts whose events are awaited, over all streams."""
        return sum(stream.num_subscriptions for stream in self._streams.values())

    @property
    def num_outgoing(self) -> int:
        """Messages that are not sent yet, over all streams."""
        return sum(stream.num_outgoing for stream in self._streams.values())

    @property
    def num_open(self) -> int:
        """Streams that have not ended."""
        return sum(not stream.ended for stream in self._streams.values())

    async def close(self) -> None:
        """Send what is queued (cancels among it), for a moment at most, then end every stream."""
        try:
            async with asyncio.timeout(_CLOSE_GRACE_S):
                await asyncio.gather(*(stream.sent.wait() for stream in self._streams.values()))
        except TimeoutError:
            _log.warning("streams closed with messages still queued")
        await asyncio.gather(*(stream.close() for stream in self._streams.values()))
        self._streams.clear()
