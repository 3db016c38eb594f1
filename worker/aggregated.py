"""Service of whole requests, prefill and decode in one engine loop: used by aggregated workers and for colocated
prefill.
"""

from __future__ import annotations

from moonpool_proto.v1.conductor_pb2 import PHASE_ENDED, PHASE_PREFILL_STARTED
from telemetry import tracing
from telemetry.tracing import Span
from worker.errors import Preempted
from worker.node import WorkerNode
from worker.prepare import compute, load, prepared, save_prefix, sequence_of, trace_answer, trace_prompt
from worker.request import Request


class AggregatedService:
    """Service that runs a request from its prompt to its last token on this worker."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node

    async def serve(self, request: Request) -> None:
        """Serve one request. Raises RequestRefused and RequestFailed."""
        with tracing.begin("serve", request.traceparent, **request.span_attributes) as span:
            await self._serve(request, span)

    async def _serve(self, request: Request, span: Span) -> None:
        node = self._node
        report = node.reporter
        held = node.hold(request, remaining_prefill_tokens=request.expected_new_tokens(node.config.block_tokens))
        try:
            matcher = await node.matcher(request)  # compiled before the request holds anything
            with node.queued(request):
                async with prepared(node, request, peak_tokens=request.peak_tokens) as work:
                    held.committed_tokens = len(work.slots) * node.config.block_tokens
                    await load(node, work, span)
                    sequence = sequence_of(node, work, matcher, prefill_only=False)
                    report.progress(request.request_id, request.attempt, PHASE_PREFILL_STARTED)
                    with node.jobs.ended_by(request, lambda kept: node.end_early(sequence, kept)):
                        await compute(node, work, sequence)
                        trace_prompt(span, sequence, work)
                        trace_answer(span, sequence)
                        await save_prefix(node, work, sequence)
                    if sequence.has_yielded:
                        raise Preempted
        finally:
            report.progress(request.request_id, request.attempt, PHASE_ENDED)
