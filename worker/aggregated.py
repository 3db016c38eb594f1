"""The aggregated worker: both phases in one engine loop (merged steps). The baseline of every live comparison."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from messenger.control import start_server
from moonpool_proto.v1.common_pb2 import ROLE_AGGREGATED
from moonpool_proto.v1.conductor_pb2 import PHASE_ENDED, PHASE_PREFILL_STARTED
from moonpool_proto.v1.worker_pb2_grpc import add_WorkerServicer_to_server
from worker.config import WorkerConfig
from worker.node import WorkerNode
from worker.prepare import keep, load, prepared, sequence_of
from worker.request import Request
from worker.servicer import WorkerFace
from worker.serving import serve_until


class AggregatedFace(WorkerFace):
    """Takes a request from prompt to last token."""

    def accept(self, request: Request) -> None:
        self.node.jobs.run(request, self._serve(request))

    async def _serve(self, request: Request) -> None:
        node = self.node
        report = node.reporter
        held = node.hold(request, remaining_prefill_tokens=len(request.prompt))
        try:
            matcher = await node.matcher(request)  # while it holds nothing that others wait for
            with node.in_line(request):
                async with prepared(node, request, peak_tokens=request.peak_tokens) as work:
                    held.committed_tokens = len(work.slots) * node.config.block_tokens
                    await load(node, work)
                    sequence = sequence_of(node, work, matcher, prefill_only=False)
                    report.progress(request.request_id, request.attempt, PHASE_PREFILL_STARTED)
                    with node.jobs.ended_by(request, lambda kept: node.end_early(sequence, kept)):
                        await node.run_in_engine(sequence)
                        await keep(node, work, sequence)
        finally:
            report.progress(request.request_id, request.attempt, PHASE_ENDED)


async def serve_aggregated(config: WorkerConfig, stop: asyncio.Event, on_ready: Callable[[str], None]) -> bool:
    """Run an aggregated worker until `stop`, or until it is drained: whether it was."""
    node = WorkerNode(config, ROLE_AGGREGATED)
    face = AggregatedFace(node)
    server = await start_server(config.listen, lambda s: add_WorkerServicer_to_server(face, s))
    return await serve_until(node, server, stop, on_ready)
