"""What the driver of a request and the conductor say to each other: schedule, refuse, complete."""

import asyncio
from time import monotonic
from typing import Final

from frontend.avoiding import Avoided
from frontend.conductor import ConductorClient
from frontend.errors import (
    ApiError,
    ContextLengthExceeded,
    GenerationFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    ServiceUnavailable,
)
from frontend.line import Line
from frontend.request import Facts, GenerationRequest
from moonpool_proto.v1 import conductor_pb2
from telemetry import RequestMetrics
from telemetry.tracing import Span

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0
_REASONS: Final = frozenset(
    {"ttft", "tbt", "decode_capacity", "queue", "no_nodes", "unknown_model", "unknown_class", "too_long", "endless"}
)
_FINAL_REASONS: Final = frozenset({"unknown_model", "unknown_class", "too_long"})


class Placer:
    """One request's placements. `grace_s` is how long a request that lost its worker waits for another place."""

    def __init__(
        self,
        conductor: ConductorClient,
        metrics: RequestMetrics,
        request: GenerationRequest,
        facts: Facts,
        avoided: Avoided,
        *,
        frontend_id: str,
        grace_s: float,
    ) -> None:
        self.is_known = False  # whether the conductor may hold something for the request
        self._conductor = conductor
        self._metrics = metrics
        self._request = request
        self._facts = facts
        self._avoided = avoided
        self._frontend_id = frontend_id
        self._grace_s = grace_s
        self._asked_s: float | None = None  # when first asked for a placement
        self._line: Line | None = None  # to the conductor that answered; None while any of them may have
        self._attempt = 0  # number of the last one asked for: 0, 1, ...

    async def place(self, *, deadline_s: float, span: Span) -> conductor_pb2.Placement:
        """The next attempt's placement, asked for within `span`; counts the attempt.

        Raises ApiError when there is none by `deadline_s` (the monotonic clock), or at all.
        """
        started_s, pause_s = monotonic(), _FIRST_PAUSE_S
        self._attempt = self._facts.attempts
        self._asked_s = started_s if self._asked_s is None else self._asked_s
        excluded = self._avoided.nodes()
        while True:
            self.is_known, self._line = True, None
            with span.child("schedule", "client") as asking:
                asked = self._schedule(excluded, asking.traceparent)
                reply, self._line = await self._conductor.schedule(asked, deadline_s=deadline_s)
            if isinstance(reply, conductor_pb2.Placement):
                break
            self.is_known = False
            if not self._may_wait(reply) or monotonic() + pause_s > started_s + self._grace_s:
                raise self._refused(reply)
            await asyncio.sleep(pause_s)
            # There is nobody else: those that failed may be asked again, but not in a row.
            excluded = self._avoided.held_off(monotonic())
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if not reply.HasField("prefill"):
            raise GenerationFailed("the conductor's placement names no prefill node", code="bad_placement")
        facts = self._facts
        facts.schedule_s += monotonic() - started_s
        facts.attempts = self._attempt + 1
        facts.prefill_node = reply.prefill.node_id
        facts.decode_node = reply.decode.node_id if reply.HasField("decode") else reply.prefill.node_id
        self._metrics.attempts.inc()
        return reply

    async def complete(self, outcome: str) -> None:
        """Tell the conductor what became of the request ("finished", "failed", "cancelled") or attempt ("retry")."""
        request, facts = self._request, self._facts
        # A prompt's further answers wait for its first one: that is not the cluster's time, nor was it predicted.
        since_s = self._asked_s if request.sampling.choice and self._asked_s is not None else request.arrival_s
        ttft_s = 0.0 if facts.first_token_s is None else facts.first_token_s - since_s
        await self._conductor.complete(
            conductor_pb2.CompleteRequest(
                request_id=request.request_id,
                attempt=self._attempt,
                outcome=outcome,
                ttft_s=ttft_s,
                mean_tbt_s=facts.mean_tbt_s,
                slow_tbt_s=facts.slow_tbt_s,
                generated=len(facts.token_ids),
                cached_tokens=facts.cached_tokens,
            ),
            self._line,
        )
        self.is_known = False

    def _schedule(self, excluded: list[str], traceparent: str) -> conductor_pb2.ScheduleRequest:
        request, generated = self._request, self._facts.token_ids
        ids, chain = request.extended(generated)
        return conductor_pb2.ScheduleRequest(
            request_id=request.request_id,
            attempt=self._attempt,
            frontend_id=self._frontend_id,
            model=request.model,
            prompt_tokens=len(ids),
            max_new_tokens=request.sampling.max_tokens - len(generated),
            chain=chain,
            generated=len(generated),
            exclude_nodes=excluded,
            ttft_objective_s=request.ttft_objective_s,
            tpot_objective_s=request.tpot_objective_s,
            tenant=request.tenant,
            slo_class=request.slo_class,
            priority=request.priority,
            waited_s=max(0.0, monotonic() - request.arrival_s),
            endless=request.idle_s > 0,
            traceparent=traceparent,
        )

    def _may_wait(self, rejection: conductor_pb2.Rejection) -> bool:
        """A request that was accepted once is not refused for load, and a lost worker is soon replaced.

        A new one waits where workers that are silent, restarting or still to join are all that is missing.
        """
        if rejection.reason in _FINAL_REASONS:
            return False
        if self._request.sampling.choice:  # the prompt's first answer is on its way to the client
            return True
        if self._facts.attempts == 0:
            return rejection.may_return
        return bool(self._facts.token_ids) or rejection.reason == "no_nodes"

    def _refused(self, rejection: conductor_pb2.Rejection) -> ApiError:
        reason, text = rejection.reason, rejection.message or f"refused by the conductor: {rejection.reason}"
        self._metrics.rejected(reason if reason in _REASONS else "other")
        if reason == "too_long":
            return ContextLengthExceeded(text)
        if reason == "unknown_class":
            return InvalidRequest(text, param="slo_class", code="unknown_class")
        if reason == "unknown_model":
            return ModelNotFound(text, param="model")
        if reason == "no_nodes":
            return ServiceUnavailable(text, code="no_nodes", retry_after_s=rejection.retry_after_s or 1.0)
        return Overloaded(text, code=reason or None, retry_after_s=rejection.retry_after_s)
