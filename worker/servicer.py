"""gRPC service of every worker: token streams, submits, cancels, hand-offs and prefill groups."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, Protocol

import grpc

from moonpool_proto.v1.common_pb2 import ROLE_DECODE, JsonReply, JsonRequest
from moonpool_proto.v1.worker_pb2 import (
    AbortReply,
    AbortRequest,
    CommitReply,
    CommitRequest,
    Enlist,
    Failure,
    FrontendMessage,
    HelpReply,
    HelpRequest,
    ReserveReply,
    ReserveRequest,
    Submit,
    WorkerMessage,
)
from moonpool_proto.v1.worker_pb2_grpc import WorkerServicer
from rpc.versions import own_software, why_not_together
from rpc.waiting import LAST_WRITE_S
from worker.engine_node import EngineNode
from worker.errors import RequestFailed, RequestRefused
from worker.request import Request
from worker.streams import FIRST_WIRE_WITH_HANDOFF, FrontendStream, first_message

log = logging.getLogger(__name__)


Serve = Callable[[Request], Coroutine[Any, Any, None]]  # runs one request from Submit to its end


class HandoffReceiver(Protocol):
    """Receiving side of a hand-off from prefill to decode."""

    async def reserve(self, request: Request, asked: ReserveRequest) -> ReserveReply:
        """Reserve slots under a new epoch. Raises RequestRefused, or RequestFailed if no reservation could be made."""

    async def commit(self, asked: CommitRequest) -> CommitReply:
        """Accept the request, or return the blocks that are missing; all pushes have ended."""

    def abort(self, asked: AbortRequest) -> None:
        """Give up the reservation: the writer has stopped."""


class PrefillHelper(Protocol):
    """Helper's side of a prefill group."""

    async def serve(
        self,
        request: Request,
        enlist: Enlist,
        further: AsyncIterator[HelpRequest],
        reply: Callable[[HelpReply], Awaitable[None]],
    ) -> None:
        """Serve one call of a group's head from its first message to its end. Raises RequestRefused, RequestFailed."""


class WorkerService(WorkerServicer):
    """gRPC service of a worker. Every worker can serve any request: its role matters only to itself and the conductor.

    A request whose placement names a decode node is prefilled here and handed off; any other is served to its end. A
    decode node hands nothing off: nodes with pages held for prompts wait for decode nodes, so a decode node must not
    wait for any other node.
    """

    def __init__(
        self, node: EngineNode, *, prefill: Serve, whole: Serve, decode: HandoffReceiver, helper: PrefillHelper
    ) -> None:
        self.node = node
        self._prefill = prefill
        self._whole = whole
        self._decode = decode
        self._helping = helper
        self._background: set[asyncio.Task[None]] = set()

    async def Attach(  # type: ignore[override] # it writes instead of yielding: an abort is noticed at once
        self,
        request_iterator: AsyncIterator[FrontendMessage],
        context: grpc.aio.ServicerContext[FrontendMessage, WorkerMessage],
    ) -> None:
        first = await first_message(request_iterator)
        if first is None or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of Attach must be `hello`")
        hello = first.hello
        if problem := why_not_together(
            hello.software, f"frontend {hello.frontend_id!r}", own_software(), f"node {self.node.config.node_id!r}"
        ):
            log.warning("refused: %s", problem)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        knows_handoff = hello.software.wire >= FIRST_WIRE_WITH_HANDOFF
        stream = self.node.streams.attach(hello.frontend_id, hello.incarnation, knows_handoff=knows_handoff)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await self.node.jobs.cancel_frontend(stream.frontend_id)  # requests of its earlier stream
            log.info("frontend %s attached", stream.frontend_id)
            tasks.append(asyncio.create_task(self._read(stream, request_iterator)))
            tasks.append(asyncio.create_task(self._write(stream, context)))
            await stream.closed.wait()
            await asyncio.wait(tasks[1:], timeout=LAST_WRITE_S)
            if not tasks[1].done():  # if the frontend does not read, a write never ends and no status can be sent
                raise asyncio.CancelledError
        finally:
            for task in tasks:
                task.cancel()
            if self.node.streams.detach(stream):
                self._spawn(self.node.jobs.cancel_frontend(stream.frontend_id))
            for end in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(end, Exception):
                    log.warning("the stream of frontend %s broke: %r", stream.frontend_id, end, exc_info=end)

    async def _write(
        self, stream: FrontendStream, context: grpc.aio.ServicerContext[FrontendMessage, WorkerMessage]
    ) -> None:
        try:
            await context.write(WorkerMessage(software=own_software()))  # confirms the attachment
            async for message in stream.messages():
                await context.write(message)
        finally:
            stream.close()

    async def _read(self, stream: FrontendStream, messages: AsyncIterator[FrontendMessage]) -> None:
        try:
            async for message in messages:
                if message.HasField("submit"):
                    self._submit(message.submit)
                elif message.HasField("cancel"):
                    cancel = message.cancel
                    self.node.jobs.cancel(
                        cancel.request_id, cancel.attempt, keep_kv=cancel.keep_kv, kept_tokens=cancel.kept_tokens
                    )
        finally:
            stream.close()

    def _submit(self, submit: Submit) -> None:
        try:
            self.accept(self.checked(submit))
        except RequestRefused as error:
            self.node.streams.send_failure(
                submit.frontend_id,
                Failure(
                    request_id=submit.request_id,
                    attempt=submit.attempt,
                    code=error.code,
                    message=str(error),
                    retryable=error.code in ("draining", "starting"),
                ),
            )

    def accept(self, request: Request) -> None:
        """Start to serve a request submitted by a frontend. Raises RequestRefused."""
        hands_over = request.placement.HasField("decode")
        if hands_over and self.node.role.role == ROLE_DECODE:
            # Placed before the role switch. A decode node must not wait for pages of another node, which may have
            # switched in the opposite direction and have prompts that wait for pages here.
            raise RequestRefused(
                "draining", f"{self.node.config.node_id} is now a decode node and cannot hand off prompts"
            )
        serve = self._prefill if hands_over else self._whole
        self.node.jobs.run(request, serve(request))

    def checked(self, submit: Submit) -> Request:
        """Parse a submit. Raises RequestRefused if this node cannot serve it now."""
        node = self.node
        if not node.has_started:
            raise RequestRefused("starting", f"{node.config.node_id} starts: it waits for its pool node")
        if node.draining.is_set():
            raise RequestRefused("draining", f"{node.config.node_id} is draining")
        if submit.model != node.config.model.name:
            raise RequestRefused(
                "unknown_model",
                f"model must be {node.config.model.name!r} on {node.config.node_id}, got {submit.model!r}",
            )
        request = Request.from_proto(
            submit,
            vocab_size=node.vocab_size,
            max_model_len=node.max_model_len,
            block_tokens=node.config.block_tokens,
            default_sinks=node.default_sinks,
        )
        node.check(request)
        return request

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def Reserve(
        self, request: ReserveRequest, context: grpc.aio.ServicerContext[ReserveRequest, ReserveReply]
    ) -> ReserveReply:
        try:
            return await self._decode.reserve(self.checked(request.request), request)
        except RequestRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{error.code}: {error}")
        except RequestFailed as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))

    async def Commit(self, request: CommitRequest, context: object) -> CommitReply:
        return await self._decode.commit(request)

    async def Abort(self, request: AbortRequest, context: object) -> AbortReply:
        self._decode.abort(request)
        return AbortReply()

    async def Help(  # type: ignore[override]  # as Attach
        self, request_iterator: AsyncIterator[HelpRequest], context: grpc.aio.ServicerContext[HelpRequest, HelpReply]
    ) -> None:
        first = await first_message(request_iterator)
        if first is None or not first.HasField("enlist"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message of Help must be `enlist`")
        try:
            request = self.checked(first.enlist.request)
            await self._helping.serve(request, first.enlist, request_iterator, context.write)
        except RequestRefused as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{error.code}: {error}")
        except RequestFailed as error:
            await context.abort(grpc.StatusCode.ABORTED, f"{error.code}: {error}")

    async def State(self, request: JsonRequest, context: object) -> JsonReply:
        return JsonReply(json=json.dumps(self.node.state()))

    async def Validate(self, request: JsonRequest, context: object) -> JsonReply:
        problems, counts = self.node.validate()
        return JsonReply(json=json.dumps({"ok": not problems, "problems": problems, "counts": counts}))
