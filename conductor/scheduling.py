"""Scheduling calls of frontends, one stream per frontend: placement of requests, and their completion."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from conductor import wire
from conductor.core import Core
from conductor.directory import WindowedBlocks
from conductor.errors import FrontendRefused, MalformedCall
from conductor.frontend_streams import FrontendStreams
from conductor.policy.decisions import Admissible, Copy, Decision, Place, Reject
from conductor.policy.events import AdmissionAsked, FrontendLost, RequestArrived, SiblingMatch
from conductor.pools import PoolNodes
from conductor.registry import Registry
from conductor.worker_memory import WorkerMemory
from kvpool import KvPoolError, short_keys_from_bytes
from moonpool_proto.v1 import conductor_pb2
from rpc.versions import own_software, why_not_together
from telemetry import logs, tracing

__all__ = ["Scheduling"]

log = logging.getLogger(__name__)
_AT_ONCE: Final = 16  # calls answered before yielding to the event loop


class Scheduling:
    """Handler of scheduling calls. Each decision is made synchronously, without awaiting."""

    def __init__(self, core: Core, registry: Registry, pools: PoolNodes, workers: WorkerMemory) -> None:
        self._core = core
        self._registry = registry
        self._pools = pools
        self._workers = workers
        self.frontends = FrontendStreams(self._lost)

    async def serve(
        self,
        calls: AsyncIterator[conductor_pb2.FrontendCalls],
        write: Callable[[conductor_pb2.ConductorAnswers], Awaitable[None]],
    ) -> None:
        """Serve one stream until it ends. Raises FrontendRefused."""
        await write(conductor_pb2.ConductorAnswers())
        first = await anext(calls, None)
        if first is None:
            return
        _check_software(first)
        if first.frontend_id:
            self.frontends.opened(first.frontend_id, first.incarnation)
        try:
            await self._answer_all(first, write)
            async for message in calls:
                await self._answer_all(message, write)
        finally:
            if first.frontend_id:
                self.frontends.closed(first.frontend_id, first.incarnation)

    async def _answer_all(
        self,
        message: conductor_pb2.FrontendCalls,
        write: Callable[[conductor_pb2.ConductorAnswers], Awaitable[None]],
    ) -> None:
        answers = conductor_pb2.ConductorAnswers()
        for call in message.calls:
            if len(answers.answers) == _AT_ONCE:
                await write(answers)
                answers = conductor_pb2.ConductorAnswers()
            self._answer(call, answers.answers.add(number=call.number))
        await write(answers)

    def _lost(self, frontend_id: str) -> None:
        if released := self._core.handle(FrontendLost(frontend_id)):
            log.warning("frontend %s is lost: its %d requests are released", frontend_id, len(released))

    def schedule(self, request: conductor_pb2.ScheduleRequest, reply: conductor_pb2.ScheduleReply) -> None:
        """Decide on a request and fill the empty reply. Raises MalformedCall."""
        logs.attempt(request.request_id, request.attempt)
        event, keys = self._event_of(request)
        with tracing.begin(
            "place", request.traceparent, request_id=request.request_id, attempt=request.attempt
        ) as span:
            decisions = self._core.handle(event, keys)
            if request.wants_receipt and isinstance(decisions[0], Place):
                self._name_decision(reply.placement)
            self._carry_out(decisions, request)
            self._write(decisions, reply)
            if span.is_on:
                span.note(**wire.decision_fields(reply))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("decided", extra=wire.decision_fields(reply))

    def preview(self, request: conductor_pb2.ScheduleRequest) -> conductor_pb2.PreviewReply:
        """Judge a request without placing it. Raises MalformedCall."""
        logs.attempt(request.request_id, request.attempt)
        event, _ = self._event_of(request)
        match self._core.handle(AdmissionAsked(event)):
            case [Admissible(_, reuse_blocks, ttft_s, tbt_s)]:
                found = conductor_pb2.Prediction(ttft_s=ttft_s, tbt_s=tbt_s, reuse_blocks=reuse_blocks)
                return conductor_pb2.PreviewReply(admitted=found)
            case [Reject() as reject]:
                return conductor_pb2.PreviewReply(rejection=wire.rejection(reject))
            case other:
                raise AssertionError(f"unexpected decision on a preview: {other}")

    def _event_of(self, request: conductor_pb2.ScheduleRequest) -> tuple[RequestArrived, NDArray[np.uint64]]:
        """Return the request with what the directories hold of its prompt, and its keys. Raises MalformedCall."""
        try:
            keys = short_keys_from_bytes(request.chain)
        except KvPoolError as error:
            raise MalformedCall(str(error)) from error
        peer = self._registry.worker_of(request.model)
        problem = _malformed(request, len(keys), peer.spec.block_tokens if peer is not None else 1)
        if problem:
            raise MalformedCall(problem)
        kv_namespace = peer.kv_namespace if peer is not None else b""
        windows = _windows_of(peer) if peer is not None else None
        matches = self._pools.match(kv_namespace, keys, windows) if peer is not None else None
        own = self._workers.match(kv_namespace, keys, windows) if peer is not None else None
        replicas = self._pools.replicas.within(kv_namespace, keys)
        siblings = self._siblings(peer.siblings, keys) if peer is not None else ()
        return wire.request_arrived(request, kv_namespace, matches, keys, replicas, own, siblings), keys

    def _siblings(
        self, siblings: Iterable[conductor_pb2.Sibling], keys: NDArray[np.uint64]
    ) -> tuple[SiblingMatch, ...]:
        """Return which leading blocks of the prompt other models' KV covers."""
        found = (wire.sibling_match(each, lambda namespace: self._pools.match(namespace, keys)) for each in siblings)
        return tuple(each for each in found if each is not None)

    def _complete(self, request: conductor_pb2.CompleteRequest) -> None:
        logs.attempt(request.request_id, request.attempt)
        self._core.handle(wire.request_completed(request))
        log.debug("request %s", request.outcome)

    def _answer(self, call: conductor_pb2.FrontendCall, answer: conductor_pb2.ConductorAnswer) -> None:
        """Answer one call; an error in it does not affect the other calls of the stream."""
        kind = call.WhichOneof("call")
        try:
            if kind == "schedule":
                self.schedule(call.schedule, answer.schedule)
            elif kind == "complete":
                self._complete(call.complete)
                answer.complete.SetInParent()
            else:
                raise MalformedCall("unknown kind of call: expected schedule or complete")
        except MalformedCall as error:
            answer.refused = str(error)
        except Exception as error:
            log.exception("a scheduling call failed")
            answer.refused = f"internal error: {type(error).__name__}"

    def _write(self, decisions: list[Decision], reply: conductor_pb2.ScheduleReply) -> None:
        match decisions[0]:
            case Place() as place:
                wire.write_placement(reply.placement, place, self._registry.nodes, self._registry.refs)
                reply.placement.keep_fetched = any(isinstance(each, Copy) and each.keeps_fetched for each in decisions)
            case Reject() as reject:
                reply.rejection.CopyFrom(wire.rejection(reject))
            case other:
                raise AssertionError(f"unexpected decision on a request: {other}")

    def _name_decision(self, placement: conductor_pb2.Placement) -> None:
        """Add the version of the objectives, and the place of the decision just made in the event log."""
        placement.slo_version = self._core.policy.slo.version
        if (logged := self._core.last_event) is not None:
            placement.decision.run, placement.decision.number = logged

    def _carry_out(self, decisions: list[Decision], request: conductor_pb2.ScheduleRequest) -> None:
        for decision in decisions:
            if isinstance(decision, Copy):
                peer = self._registry.worker_of(request.model)
                assert peer is not None
                self._pools.start_copy(decision, peer.kv_namespace, request.chain, _windows_of(peer))


def _windows_of(worker: conductor_pb2.Node) -> WindowedBlocks | None:
    namespace = worker.window_namespace
    return WindowedBlocks(namespace, worker.window_blocks) if namespace else None


def _check_software(first: conductor_pb2.FrontendCalls) -> None:
    if problem := why_not_together(first.software, "this frontend", own_software(), "the conductor"):
        raise FrontendRefused(problem)


def _malformed(request: conductor_pb2.ScheduleRequest, num_keys: int, block_tokens: int) -> str:
    if not request.request_id:
        return "request_id is empty"
    prompt_tokens, max_new_tokens = request.prompt_tokens, request.max_new_tokens
    if prompt_tokens < 1 or max_new_tokens < 1:
        return f"prompt_tokens {prompt_tokens} and max_new_tokens {max_new_tokens} must be positive"
    if num_keys * block_tokens > prompt_tokens:
        return f"{num_keys} keys of blocks of {block_tokens} tokens: more than {prompt_tokens} prompt tokens"
    return ""
