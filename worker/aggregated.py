"""Both phases of a request in one engine loop (merged steps): what aggregated workers do, or any that is asked to."""

from __future__ import annotations

from moonpool_proto.v1.conductor_pb2 import PHASE_ENDED, PHASE_PREFILL_STARTED
from telemetry import tracing
from telemetry.tracing import Span
from worker.node import WorkerNode
from worker.prepare import keep, load, prepared, sequence_of, trace_answer, trace_prompt
from worker.request import Request


class AggregatedService:
    """Takes a request from prompt to last token."""

    def __init__(self, node: WorkerNode) -> None:
        self._node = node

    async def serve(self, request: Request) -> None:
        with tracing.begin("serve", request.traceparent, **request.about) as span:
            await self._serve(request, span)

    async def _serve(self, request: Request, span: Span) -> None:
        node = self._node
        report = node.reporter
        held = node.hold(request, remaining_prefill_tokens=len(request.prompt))
        try:
            matcher = await node.matcher(request)  # while it holds nothing that others wait for
            with node.queued(request):
                async with prepared(node, request, peak_tokens=request.peak_tokens) as work:
                    held.committed_tokens = len(work.slots) * node.config.block_tokens
                    await load(node, work, span)
                    sequence = sequence_of(node, work, matcher, prefill_only=False)
                    report.progress(request.request_id, request.attempt, PHASE_PREFILL_STARTED)
                    with node.jobs.ended_by(request, lambda kept: node.end_early(sequence, kept)):
                        await node.run_in_engine(sequence)
                        trace_prompt(span, sequence, work)
                        trace_answer(span, sequence)
                        await keep(node, work, sequence)
        finally:
            report.progress(request.request_id, request.attempt, PHASE_ENDED)
