"""A request's way through a vLLM worker, from its prompt to its last token."""

from __future__ import annotations

from moonpool_proto.v1.conductor_pb2 import PHASE_ENDED, PHASE_PREFILL_STARTED
from moonpool_proto.v1.worker_pb2 import (
    AbortRequest,
    CommitReply,
    CommitRequest,
    Enlist,
    ReserveReply,
    ReserveRequest,
    Timing,
)
from telemetry import tracing
from vllm_worker.node import VllmNode
from worker.errors import RequestRefused
from worker.request import EngineSequence, Request


class VllmService:
    """Service that runs whole requests on this worker, and refuses hand-offs and prefill groups."""

    def __init__(self, node: VllmNode) -> None:
        self._node = node

    async def serve(self, request: Request) -> None:
        """Serve one request. Raises RequestRefused and RequestFailed."""
        with tracing.begin("serve", request.traceparent, **request.span_attributes) as span:
            node, report = self._node, self._node.reporter
            node.hold(request, committed_tokens=request.peak_tokens, remaining_prefill_tokens=len(request.prompt))
            try:
                # vLLM compiles grammars in its own process, which a hostile one must not reach.
                await node.matcher(request)
                with node.queued(request):
                    sequence = EngineSequence.of(request, [], num_computed=0, prefill_only=False)
                    sequence.steering = None  # logits are changed in vLLM's processes
                    node.timings[id(sequence)] = Timing()
                    node.counters.add("prompt_tokens", len(request.prompt))
                    report.progress(request.request_id, request.attempt, PHASE_PREFILL_STARTED)
                    with node.jobs.ended_by(request, lambda kept: node.end_early(sequence, kept)):
                        await node.run_in_engine(sequence)
                    if span.is_on and sequence.first_token_at:
                        span.past("queue", request.submitted, sequence.first_step_at)
                        span.past("compute", sequence.first_step_at, sequence.first_token_at)
            finally:
                report.progress(request.request_id, request.attempt, PHASE_ENDED)


class NoHandoff:
    """Answers to the calls of hand-offs and prefill groups, which conductors place on no aggregated worker."""

    def __init__(self, node: VllmNode) -> None:
        self._why = f"{node.config.node_id} is an aggregated vLLM worker: it takes part in no hand-off"

    async def reserve(self, request: Request, asked: ReserveRequest) -> ReserveReply:
        raise RequestRefused("unsupported", self._why)

    async def commit(self, asked: CommitRequest) -> CommitReply:
        return CommitReply(error=self._why)

    def abort(self, asked: AbortRequest) -> None:
        return

    async def serve(self, request: Request, enlist: Enlist, *_: object) -> None:
        raise RequestRefused("unsupported", self._why)
