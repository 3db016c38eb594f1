"""Attempts of one request: how many it gets, which nodes it avoids, the order of its tokens, and its placement.

`RetryBudget` and `AvoidedNodes` are pure and take the time as an argument. `Placer` talks to the conductor.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Final

from frontend.conductor import ConductorClient, ConductorStream
from frontend.errors import (
    ApiError,
    ContextLengthExceeded,
    Forbidden,
    GenerationFailed,
    InvalidRequest,
    ModelNotServed,
    Overloaded,
    ServiceUnavailable,
)
from frontend.request import AttemptRecord, GenerationRequest, RequestStats
from frontend.worker_streams import FailureReceived, Inbox, InboxEvent, TokenReceived, WorkerDisconnected, WorkerStream
from moonpool_proto.v1 import conductor_pb2
from telemetry import RequestMetrics
from telemetry.tracing import OFF, Span

# The worker, or the decode worker of a prefill worker, could not be reached or serves no request now.
_UNREACHED_CODES: Final = frozenset({"decode_unreachable", "starting", "draining"})
# Of a prefill worker whose KV did not reach its decode worker intact: the path between both may be the cause.
_PATH_CODES: Final = frozenset({"push", "unverified"})


class RetryBudget:
    """Limit on the attempts of one request: a request that crashes workers must not be retried indefinitely.

    An attempt counts once its workers have accepted the request, unless it was preempted. Attempts that did not reach
    one of their workers, or that found it starting or draining, are free for `grace_s`, because the conductor needs
    some seconds to detect a dead or hanging node, and a partition may heal; each of them runs on another node or after
    a pause.
    """

    def __init__(self, max_tries: int, grace_s: float) -> None:
        self._max_tries = max_tries
        self._grace_s = grace_s
        self._num_unreached = 0
        self._num_preempted = 0
        self._unreached_since_s: float | None = None

    def record_unreachable(self, now_s: float) -> None:
        """Record that the last attempt could not reach one of its workers."""
        self._num_unreached += 1
        self._unreached_since_s = now_s if self._unreached_since_s is None else self._unreached_since_s

    def record_preempted(self) -> None:
        """Record that the last attempt gave way to a more urgent request."""
        self._num_preempted += 1

    def record_reached(self) -> None:
        """Record that the last attempt's workers received the request."""
        self._unreached_since_s = None

    def is_exhausted(self, num_attempts: int, now_s: float) -> bool:
        """Return True if no further attempt is allowed after `num_attempts`, including those that did not count."""
        since_s = self._unreached_since_s
        # The conductor has had enough time to detect dead nodes, and still no worker could be reached.
        grace_is_over = since_s is not None and now_s >= since_s + self._grace_s
        failed = num_attempts - self._num_preempted - (0 if grace_is_over else self._num_unreached)
        return failed >= self._max_tries


_UNKNOWN: Final = 0  # incarnation of a node that is not in the cluster's last state


@dataclass(frozen=True, slots=True)
class _Failure:
    incarnation: int
    count: int  # how often this incarnation failed the request
    until_s: float  # the node is not used before this time, even if it is the only one
    is_sender: bool  # perhaps only its path to the other node of the attempt failed


class AvoidedNodes:
    """Nodes that failed one request. A node may be used again once its process was replaced, or if it is the only one.

    In the latter case it is held off for a pause that doubles from `hold_off_s` to `longest_s` with each failure:
    otherwise a hanging process would fail one attempt after the other. The sender of KV that did not arrive intact is
    held off for twice as long as its receiver, so that the receiver is next used with another sender: the path between
    both may be the cause.
    """

    def __init__(self, hold_off_s: float, longest_s: float, incarnation_of: Callable[[str], int]) -> None:
        """`incarnation_of(node_id)` returns the node's current incarnation, or 0 if it is unknown."""
        self._hold_off_s = hold_off_s
        self._longest_s = longest_s
        self._incarnation_of = incarnation_of
        self._failures: dict[str, _Failure] = {}

    def add(self, node_id: str, incarnation: int, now_s: float, *, is_sender: bool = False) -> None:
        """Record that the node failed the request; `incarnation` is 0 if unknown."""
        former = self._failures.get(node_id)
        count = former.count + 1 if former is not None and former.incarnation == incarnation else 1
        is_sender = is_sender and (former is None or former.is_sender)  # else it has failed by itself
        pause_s = min(self._hold_off_s * 2 ** (count - 1 + is_sender), self._longest_s)
        self._failures[node_id] = _Failure(incarnation, count, now_s + pause_s, is_sender)

    def nodes(self, *, with_senders: bool = True) -> list[str]:
        """Return the nodes that failed the request and are not known to have been replaced, sorted."""
        return sorted(
            node_id
            for node_id, failure in self._failures.items()
            if (with_senders or not failure.is_sender) and not self._is_replaced(node_id, failure)
        )

    def held_off(self, now_s: float) -> list[str]:
        """Return those of `nodes()` whose pause has not ended at `now_s`."""
        return [node_id for node_id in self.nodes() if now_s < self._failures[node_id].until_s]

    def _is_replaced(self, node_id: str, failure: _Failure) -> bool:
        current = self._incarnation_of(node_id)
        return _UNKNOWN not in (current, failure.incarnation) and current != failure.incarnation


@dataclass(frozen=True)
class AttemptFailure:
    """Reason why an attempt cannot continue. `suspect` is the node that the next attempt avoids."""

    suspect: str
    code: str
    message: str
    retryable: bool
    is_unreached: bool = False  # a worker of the attempt could not be reached, or serves no request now
    sender: str = ""  # node whose KV did not reach the suspect intact; avoided, too, if others can serve

    @property
    def is_preemption(self) -> bool:
        """True if the attempt gave way to a more urgent request: nothing is wrong with its nodes."""
        return self.code == "preempted"


@dataclass
class Attempt:
    """Workers, inbox and token order of one attempt. Token indices count over all attempts of the request."""

    number: int
    placement: conductor_pb2.Placement
    inbox: Inbox
    first_index: int
    prefill: WorkerStream | None = None
    decode: WorkerStream | None = None  # None: the prefill worker decodes too
    span: Span = OFF
    num_duplicates: int = 0
    next_index: int = field(init=False)
    _decode_spoke: bool = False
    _early: dict[int, TokenReceived] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.next_index = self.first_index

    def take(self, events: list[InboxEvent]) -> tuple[list[TokenReceived], AttemptFailure | None]:
        """Return the tokens that are next, in order, and the failure that ends the attempt, if any.

        The first token comes from the prefill worker and later tokens from the decode worker. They arrive on two
        connections, so one may overtake the other.
        """
        tokens: list[TokenReceived] = []
        for event in events:
            match event:
                case TokenReceived():
                    self._decode_spoke |= self.decode is not None and event.node_id == self.decode.node_id
                    tokens.extend(self._in_order(event))
                case FailureReceived(node_id, failure) if self._needs(node_id):
                    suspect = failure.suspect_node_id or node_id
                    is_unreached = failure.code in _UNREACHED_CODES
                    sender = node_id if failure.code in _PATH_CODES and suspect != node_id else ""
                    return tokens, AttemptFailure(
                        suspect, failure.code, failure.message, failure.retryable, is_unreached, sender
                    )
                case WorkerDisconnected(node_id, reason) if self._needs(node_id):
                    return tokens, AttemptFailure(node_id, "worker_lost", reason, retryable=True)
        return tokens, None

    @property
    def decoding_node(self) -> str:
        """Node that generates the tokens after the first one."""
        placement = self.placement
        return placement.decode.node_id if placement.HasField("decode") else placement.prefill.node_id

    def incarnation_of(self, node_id: str) -> int:
        """Return the incarnation of a node that the placement names; 0 for other nodes."""
        placement = self.placement
        refs = (placement.prefill, placement.decode, *(holder.pool for holder in placement.holders))
        return next((ref.incarnation for ref in refs if ref.node_id == node_id), 0)

    @property
    def streams(self) -> list[WorkerStream]:
        """Worker streams that the attempt is subscribed to."""
        return [stream for stream in (self.prefill, self.decode) if stream is not None]

    def older_than(self, wire: int) -> WorkerStream | None:
        """Return the stream to a worker whose protocol is older than `wire`; None if there is none.

        By the stream's first message, which wire 3 introduced: the conductor's list of nodes may lag behind.
        """
        return next((stream for stream in self.streams if stream.software.wire < wire), None)

    def _in_order(self, event: TokenReceived) -> list[TokenReceived]:
        index = event.token.index
        if index == self.next_index and not self._early:  # nearly always
            self.next_index += 1
            return [event]
        if index < self.next_index or index in self._early:
            self.num_duplicates += 1
            return []
        self._early[index] = event
        ready: list[TokenReceived] = []
        while (token := self._early.pop(self.next_index, None)) is not None:
            ready.append(token)
            self.next_index += 1
        return ready

    def _needs(self, node_id: str) -> bool:
        # The prefill worker is no longer needed once its token has arrived and the decode worker, which then has all of
        # the KV, has sent a token.
        if self.decode is None or self.prefill is None or node_id != self.prefill.node_id:
            return True
        return not (self._decode_spoke and self.next_index > self.first_index)


_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 1.0
_REASONS: Final = frozenset(
    {
        "ttft",
        "tbt",
        "decode_capacity",
        "queue",
        "no_nodes",
        "unknown_model",
        "unknown_class",
        "denied_class",
        "too_long",
        "endless",
    }
)
_FINAL_REASONS: Final = frozenset({"unknown_model", "unknown_class", "denied_class", "too_long"})


class Placer:
    """Placements of one request. A request that lost its worker waits up to `grace_s` for another placement."""

    def __init__(
        self,
        conductor: ConductorClient,
        metrics: RequestMetrics,
        request: GenerationRequest,
        stats: RequestStats,
        avoided: AvoidedNodes,
        *,
        frontend_id: str,
        grace_s: float,
    ) -> None:
        self.is_known = False  # True while the conductor may hold resources for the request
        self._conductor = conductor
        self._metrics = metrics
        self._request = request
        self._facts = stats
        self._avoided_nodes = avoided
        self._frontend_id = frontend_id
        self._grace_s = grace_s
        self._first_call_s: float | None = None  # time of the first call to the conductor
        self._stream: ConductorStream | None = None  # to the conductor that answered; None while any may have placed it
        self._attempt = 0  # number of the last attempt that was scheduled: 0, 1, ...

    async def place(self, *, deadline_s: float, span: Span) -> conductor_pb2.Placement:
        """Return the placement of the next attempt and count the attempt; the call is traced under `span`.

        Raises ApiError if there is no placement by `deadline_s` (monotonic clock) or if the request is rejected.
        """
        started_s, pause_s = monotonic(), _FIRST_PAUSE_S
        self._attempt = self._facts.attempts
        self._first_call_s = started_s if self._first_call_s is None else self._first_call_s
        avoided = self._avoided_nodes
        excluded = avoided.nodes()
        without_senders = avoided.nodes(with_senders=False)
        fallbacks = [without_senders] if without_senders != excluded else []
        while True:
            self.is_known, self._stream = True, None
            with span.child("schedule", "client") as asking:
                requested = schedule_request(
                    self._request,
                    self._frontend_id,
                    attempt=self._attempt,
                    token_ids=self._facts.token_ids,
                    excluded=excluded,
                    traceparent=asking.traceparent,
                )
                reply, self._stream = await self._conductor.schedule(requested, deadline_s=deadline_s)
            if isinstance(reply, conductor_pb2.Placement):
                break
            self.is_known = False
            if not self._may_wait(reply) or monotonic() + pause_s > started_s + self._grace_s:
                self._metrics.rejected(reply.reason if reply.reason in _REASONS else "other")
                raise rejection_error(reply)
            await asyncio.sleep(pause_s)
            # No other node can take the request: senders may be used with other receivers, and then all failed nodes
            # again, but each only after its pause.
            excluded = fallbacks.pop() if fallbacks else avoided.held_off(monotonic())
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if not reply.HasField("prefill"):
            raise GenerationFailed("the conductor's placement names no prefill node", code="bad_placement")
        stats = self._facts
        stats.schedule_s += monotonic() - started_s
        stats.attempts = self._attempt + 1
        if self._request.wants_receipt:
            stats.placements.append(AttemptRecord(reply, len(stats.token_ids)))
        stats.prefill_node = reply.prefill.node_id
        stats.decode_node = reply.decode.node_id if reply.HasField("decode") else reply.prefill.node_id
        self._metrics.attempts.inc()
        return reply

    @property
    def ttft_s(self) -> float:
        """Measured TTFT, to compare with the predicted one, in seconds; 0 before the first token."""
        request, first_token_s = self._request, self._facts.first_token_s
        if first_token_s is None:
            return 0.0
        # Further choices wait for the first choice's first token. That wait is not part of the predicted TTFT.
        since_s = self._first_call_s if request.sampling.choice else request.arrival_s
        return first_token_s - (request.arrival_s if since_s is None else since_s)

    async def complete(self, outcome: str) -> None:
        """Report the outcome of the request ("finished", "failed", "cancelled") or attempt ("retry") to the
        conductor.
        """
        request, stats = self._request, self._facts
        is_placed = stats.attempts == self._attempt + 1
        await self._conductor.complete(
            conductor_pb2.CompleteRequest(
                request_id=request.request_id,
                attempt=self._attempt,
                outcome=outcome,
                ttft_s=self.ttft_s,
                mean_tbt_s=stats.mean_tbt_s,
                slow_tbt_s=stats.intervals.slow_s,
                generated=len(stats.token_ids),
                cached_tokens=stats.cached_tokens,
                kv=stats.placements[-1].kv if stats.placements and is_placed else None,
            ),
            self._stream,
        )
        self.is_known = False

    def _may_wait(self, rejection: conductor_pb2.Rejection) -> bool:
        """Return True if the request should wait and ask again instead of failing.

        A request whose client has tokens is not rejected for load; one that lost its worker before may be, since fewer
        workers are left. A lost worker is soon replaced. A new request waits only if it could be served but for workers
        that are silent, restarting or joining.
        """
        if rejection.reason in _FINAL_REASONS:
            return False
        if self._request.sampling.choice:  # the client already receives the first choice
            return True
        if self._facts.attempts == 0:
            return rejection.may_return
        return bool(self._facts.token_ids) or rejection.reason == "no_nodes"


def schedule_request(
    request: GenerationRequest,
    frontend_id: str,
    *,
    attempt: int = 0,
    token_ids: Sequence[int] = (),
    excluded: Sequence[str] = (),
    traceparent: str = "",
) -> conductor_pb2.ScheduleRequest:
    """Return the call that asks for a placement of an attempt; `token_ids`: those that the client has received."""
    ids, chain = request.extended(token_ids)
    session = None
    if request.session or request.parent_session:
        session = conductor_pb2.Session(id=request.session, parent_id=request.parent_session)
    return conductor_pb2.ScheduleRequest(
        request_id=request.request_id,
        attempt=attempt,
        frontend_id=frontend_id,
        model=request.model,
        prompt_tokens=len(ids),
        max_new_tokens=request.sampling.max_tokens - len(token_ids),
        chain=chain,
        generated=len(token_ids),
        exclude_nodes=excluded,
        ttft_objective_s=request.ttft_objective_s,
        tpot_objective_s=request.tpot_objective_s,
        tenant=request.tenant,
        slo_class=request.slo_class,
        priority=request.priority,
        waited_s=max(0.0, monotonic() - request.arrival_s),
        endless=request.idle_s > 0,
        traceparent=traceparent,
        allowed_classes=request.allowed_classes,
        previous_tokens=request.previous_tokens,
        wants_receipt=request.wants_receipt,
        hints=request.hints.to_proto(),
        session=session,
        window_tokens=request.rolling.window + request.block_tokens if request.rolling is not None else 0,
    )


def rejection_error(rejection: conductor_pb2.Rejection) -> ApiError:
    """Return the client's error for a rejection by the conductor."""
    reason, text = rejection.reason, rejection.message or f"rejected by the conductor: {rejection.reason}"
    if reason == "too_long":
        return ContextLengthExceeded(text)
    if reason == "unknown_class":
        return InvalidRequest(text, param="slo_class", code="unknown_class")
    if reason == "denied_class":
        return Forbidden(text, param="slo_class", code="denied_class")
    if reason == "unknown_model":
        return ModelNotServed(text, param="model")
    if reason == "no_nodes":
        return ServiceUnavailable(text, code="no_nodes", retry_after_s=rejection.retry_after_s or 1.0)
    return Overloaded(text, code=reason or None, retry_after_s=rejection.retry_after_s)
