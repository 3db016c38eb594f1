"""The driver of one request: places it, submits it, follows its tokens, and places it again when a worker is lost."""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

from frontend.accepting import Turnstile
from frontend.attempt import Attempt, Setback
from frontend.avoiding import Avoided
from frontend.cluster import ClusterWatch
from frontend.conductor import ConductorClient
from frontend.config import FrontendConfig
from frontend.console.memory import RequestMemory
from frontend.ending import Outcome, tell_end
from frontend.errors import ApiError, ClientTooSlow, GenerationFailed, InvalidRequest, RequestDeadline, WorkerLost
from frontend.inbox import Inbox, TokenArrived
from frontend.output import FinishReason, Output, Step
from frontend.placing import Placer
from frontend.request import Facts, GenerationRequest
from frontend.streams import WorkerStream, WorkerStreams
from frontend.timing import Handoff, Ttft
from frontend.tries import Tries
from moonpool_proto.v1 import conductor_pb2, worker_pb2
from telemetry import RequestMetrics, logs

_log = logging.getLogger(__name__)
_FINISH: Final[dict[int, FinishReason]] = {
    worker_pb2.FINISH_STOP: "stop",
    worker_pb2.FINISH_LENGTH: "length",
    worker_pb2.FINISH_COMPLETE: "stop",
}
_DEADLINE_CODES: Final = frozenset({"deadline", "deadline_exceeded", "timeout"})
_CLIENTS_CODES: Final = frozenset({"bad_grammar", "grammar", "unsupported"})


@dataclass(frozen=True)
class DriverContext:
    """What all drivers of a model share. `spawn` runs a coroutine that outlives its request; `remember` is told the
    ids and the text of each answer that ended well, and says how many of its ids will come back as history (0: it does
    not know)."""

    config: FrontendConfig
    conductor: ConductorClient
    cluster: ClusterWatch
    streams: WorkerStreams
    turnstile: Turnstile
    metrics: RequestMetrics
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    remember: Callable[[GenerationRequest, Sequence[int], str], int]
    memory: RequestMemory


class Generation:
    """One request in the cluster. Call `next` until a step has a finish reason; call `close` in any case."""

    def __init__(
        self, context: DriverContext, request: GenerationRequest, output: Output, leader: "Generation | None" = None
    ) -> None:
        """`leader`: the first answer to the same prompt, whose first token this one waits for."""
        self.request = request
        self.leader = leader
        self.facts = Facts()
        # Done as soon as the client is too slow, whether or not it asks for more.
        self.overflowed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context
        self._output = output
        config = context.config
        self._avoided = Avoided(config.hold_off_s, config.replace_grace_s / 2, context.cluster.incarnation)
        self._tries = Tries(config.max_attempts, config.replace_grace_s)
        self._placer = Placer(
            context.conductor,
            context.metrics,
            request,
            self.facts,
            self._avoided,
            frontend_id=config.node_id,
            grace_s=config.replace_grace_s,
        )
        self._attempt: Attempt | None = None
        self._setback: Setback | None = None  # why there is no attempt now
        self._outcome: Outcome = "cancelled"
        self._finish_reason: FinishReason | None = None
        self._told: list[str] = []
        self._closed = False
        self._asked_s = 0.0  # when `next` was called last
        self._placed_s = 0.0  # the last attempt
        self._began_s: float | None = None
        self._ended_by: ApiError | None = None
        self._limit: asyncio.Timeout | None = None  # of the attempt that begins now

    def read_prompt(self) -> None:
        """As Output.read_prompt; before the first `next`."""
        self._output.read_prompt()

    @property
    def was_refused(self) -> bool:
        """Whether it failed before it had a token."""
        return self._outcome == "failed" and self.facts.last_token_s is None

    @property
    def used_tokens(self) -> int:
        """Of the prompt, which its first answer counts, and of the answer so far; none if it was refused."""
        if self.was_refused:
            return 0
        prompt_tokens = 0 if self.request.sampling.choice else len(self.request.prompt_ids)
        return prompt_tokens + (0 if self.facts.last_token_s is None else 1 + len(self.facts.intervals_s))

    @property
    def may_begin(self) -> bool:
        """Whether the prompt's KV is there to be reused, where another answer makes it."""
        return self.leader is None or bool(self.leader.facts.token_ids)

    @property
    def deadline_s(self) -> float:
        """When it is given up (the monotonic clock). An endless one's recedes with each token, and each time that more
        is asked for."""
        last_s, idle_s = self.facts.last_token_s, self.request.idle_s
        return self.request.deadline_s if not idle_s or last_s is None else max(last_s, self._asked_s) + idle_s

    async def next(self) -> Step:
        """The next tokens. Raises ApiError; after that, and after a finish reason, only `close` may be called."""
        if self._ended_by is not None:
            raise self._ended_by
        try:
            self._asked_s = monotonic()
            while True:
                attempt = self._attempt if self._attempt is not None else await self._begin_in_time()
                if attempt is not None and (step := await self._follow(attempt)) is not None:
                    return step
        except TimeoutError as error:
            self._outcome = "failed"
            raise (self._ended_by or RequestDeadline(self._deadline_text())) from error
        except ApiError:
            self._outcome = "failed"
            raise

    def end(self, error: ApiError) -> None:
        """Make `next`, whether it waits now or is called later, raise `error`."""
        self._ended_by, self._outcome = error, "failed"
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())
        if self._attempt is not None:
            self._attempt.inbox.interrupt()

    def close(self) -> None:
        """Tell workers and conductor what became of the request, and count it. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._attempt is not None:
            self._leave(self._attempt, cancel=True)
            self._attempt = None
        if self._placer.is_known:
            self._context.spawn(self._placer.complete(self._outcome))
        tell_end(self.request, self.facts, self._context.metrics, self._outcome, self._finish_reason)
        self._context.memory.ended(self.request, self.facts, self._outcome)

    # -- one attempt ---------------------------------------------------------------------------------------------------

    async def _begin_in_time(self) -> Attempt | None:
        """As `_begin`. Raises TimeoutError at the request's deadline."""
        try:
            async with asyncio.timeout_at(self.deadline_s) as self._limit:
                return await self._begin()
        finally:
            self._limit = None

    async def _begin(self) -> Attempt | None:
        """Place the request, attach to its workers, submit it. None when a worker cannot be reached."""
        await self._context.turnstile.take()
        if self._setback is not None:
            self._raise_if_final(self._setback)
            self._context.metrics.retries.inc()
            await self._placer.complete("retry")
            self._setback = None
            self.facts.lost_s += monotonic() - self._placed_s
        elif self._began_s is None:
            self._began_s = monotonic()
        logs.attempt(self.request.request_id, self.facts.attempts)
        span = self.request.span.child("attempt", number=self.facts.attempts, choice=self.request.sampling.choice)
        try:
            placement = await self._placer.place(deadline_s=self.deadline_s, span=span)
        except BaseException as error:
            span.end_by(error)
            raise
        self._placed_s = monotonic()
        inbox = Inbox(self._context.config.client_buffer_tokens, self._on_overflow)
        attempt = self._attempt = Attempt(
            self.facts.attempts - 1, placement, inbox, len(self.facts.token_ids), span=span
        )
        span.note(prefill_node=self.facts.prefill_node, decode_node=self.facts.decode_node)
        # The decode worker's stream first: it must know where to send tokens before it can have any.
        if placement.HasField("decode"):
            attempt.decode = await self._attach(attempt, placement.decode)
            if attempt.decode is None:
                return None
        attempt.prefill = await self._attach(attempt, placement.prefill)
        if attempt.prefill is None:
            return None
        self._tries.reached()
        attempt.prefill.send(worker_pb2.FrontendMessage(submit=self._submit(attempt)))
        return attempt

    async def _attach(self, attempt: Attempt, node: conductor_pb2.NodeRef) -> WorkerStream | None:
        try:
            stream = await self._context.streams.attach(node)
        except WorkerLost as error:
            self._tries.unreached(monotonic())
            self._set_back(attempt, Setback(node.node_id, "worker_lost", str(error), retryable=True))
            return None
        stream.subscribe(self.request.request_id, attempt.number, attempt.inbox)
        return stream

    def _submit(self, attempt: Attempt) -> worker_pb2.Submit:
        request, generated = self.request, self.facts.token_ids
        ids, chain = request.extended(generated)
        return worker_pb2.Submit(
            request_id=request.request_id,
            attempt=attempt.number,
            frontend_id=self._context.config.node_id,
            model=request.model,
            prompt_ids=ids.astype("<i4", copy=False).tobytes(),
            generated=len(generated),
            chain=chain,
            chain_seed=request.chain_seed,
            sampling=request.sampling.to_proto(),
            placement=attempt.placement,
            timeout_s=max(0.001, self.deadline_s - monotonic()),
            idle_s=request.idle_s,
            traceparent=attempt.span.traceparent,
        )

    async def _follow(self, attempt: Attempt) -> Step | None:
        """Wait for the attempt's next events and take them; None when they bring no token.

        Raises TimeoutError at the request's deadline, and when `end` was called.
        """
        if self._ended_by is not None:  # while the attempt began, too late for the limit on that
            raise TimeoutError
        idle_s, deadline_s = self._context.config.idle_timeout_s, self.deadline_s
        # No idle limit before an attempt's first token: a long queue and a long prompt are no faults.
        idle_until_s = monotonic() + idle_s if attempt.next_index > attempt.first_index else math.inf
        try:
            events = await attempt.inbox.take(min(deadline_s, idle_until_s))
        except TimeoutError:
            if self._ended_by is not None or deadline_s <= idle_until_s:
                raise
            node_id = attempt.decoding_node
            self._set_back(attempt, Setback(node_id, "idle", f"no token for {idle_s:g} s", retryable=True))
            return None
        if attempt.inbox.overflowed:
            behind = self._context.config.client_buffer_tokens
            raise ClientTooSlow(f"the client fell {behind} tokens behind; its request was cancelled")
        num_duplicates = attempt.num_duplicates
        tokens, setback = attempt.take(events)
        if attempt.num_duplicates > num_duplicates:
            self._context.metrics.duplicate_tokens.inc(attempt.num_duplicates - num_duplicates)
        pieces: list[Step] = []
        for arrived in tokens:
            piece = self._accept(arrived)
            self._told.append(piece.text)
            pieces.append(piece)
            if piece.finish_reason is not None:
                kept = self._context.remember(self.request, self.facts.token_ids, "".join(self._told))
                # A stop string is found here, not by the worker, which goes on until told.
                goes_on = arrived.token.finish == worker_pb2.FINISH_NONE
                self._leave(attempt, cancel=goes_on, keep_kv=True, kept_tokens=kept)
                self._attempt, self._outcome, self._finish_reason = None, "finished", piece.finish_reason
                return Step.joined(pieces)
        if setback is not None:
            self._set_back(attempt, setback)
        return Step.joined(pieces) if pieces else None

    def _accept(self, arrived: TokenArrived) -> Step:
        facts, metrics, token = self.facts, self._context.metrics, arrived.token
        if facts.last_token_s is None:
            facts.first_token_s = arrived.at_s
            facts.ttft = self._ttft(arrived)
            self.request.span.event("first token")
            metrics.began(facts.ttft.whole_s, facts.ttft.parts())
            metrics.prompt_tokens.inc(len(self.request.prompt_ids))
        else:
            metrics.itl.observe(arrived.at_s - facts.last_token_s)
            facts.intervals_s.append(arrived.at_s - facts.last_token_s)
        facts.last_token_s = arrived.at_s
        facts.token_ids.append(token.token_id)
        metrics.generation_tokens.inc()
        if token.HasField("timing"):
            self._note(token.timing)
        # A newer worker's reason that is not known here ends the answer all the same.
        finish = None if token.finish == worker_pb2.FINISH_NONE else _FINISH.get(token.finish, "length")
        if finish is None and len(facts.token_ids) >= self.request.sampling.max_tokens:
            finish = "length"
        if token.HasField("prompt_logprobs"):
            facts.prompt_logprobs = token.prompt_logprobs
        prompt = facts if self.leader is None else self.leader.facts
        return self._output.feed(token, finish, prompt.prompt_logprobs)

    def _ttft(self, first: TokenArrived) -> Ttft:
        request, facts = self.request, self.facts
        whole_s = first.at_s - request.arrival_s
        began_s = request.arrival_s + request.tokenize_s if self.leader is None else self._began_s or first.at_s
        return Ttft.of(
            whole_s,
            first.token.timing,
            tokenize_s=request.tokenize_s,
            sibling_s=began_s - request.arrival_s - request.tokenize_s,
            schedule_s=facts.schedule_s,
            lost_s=facts.lost_s,
        )

    def _note(self, timing: worker_pb2.Timing) -> None:
        """Count a prefill, or a hand-off, of which this comes with the token after.

        `usage` speaks of the first prefill: what a further attempt reuses was the request's own.
        """
        facts, metrics = self.facts, self._context.metrics
        if timing.HasField("handoff"):
            facts.handoff = Handoff.of(facts.intervals_s[-1], timing.handoff)
            metrics.handed_over(facts.handoff.whole_s, facts.handoff.parts())
            return
        metrics.queue.observe(timing.queue_s)
        metrics.prefill.observe(timing.prefill_s)
        facts.approximate_tokens = max(facts.approximate_tokens, timing.approximate_tokens)  # of whichever attempt
        if facts.has_timing:
            return
        facts.has_timing = True
        facts.cached_tokens = min(timing.cached_tokens, len(self.request.prompt_ids))
        facts.cached_dram_tokens, facts.cached_ssd_tokens = timing.cached_dram_tokens, timing.cached_ssd_tokens
        facts.cached_remote_tokens = timing.cached_remote_tokens
        facts.queue_s, facts.load_s, facts.prefill_s = timing.queue_s, timing.load_s, timing.prefill_s
        metrics.prefix_cache_queries.inc(len(self.request.prompt_ids))
        metrics.prefix_cache_hits.inc(facts.cached_tokens)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def _leave(self, attempt: Attempt, *, cancel: bool, keep_kv: bool = False, kept_tokens: int = 0) -> None:
        attempt.inbox.close()
        attempt.span.end()
        for stream in attempt.streams:
            stream.unsubscribe(self.request.request_id, attempt.number)
            if cancel:
                stream.cancel(self.request.request_id, attempt.number, keep_kv=keep_kv, kept_tokens=kept_tokens)

    def _set_back(self, attempt: Attempt, setback: Setback) -> None:
        """The attempt is over; `next` decides about another one after the tokens that came before are told."""
        logs.attempt(self.request.request_id, attempt.number)  # it may have begun in another task
        _log.warning("attempt ended: %s", setback.message, extra={"suspect": setback.suspect})
        attempt.span.fail(setback.message)
        self._leave(attempt, cancel=True)
        self._attempt, self._setback = None, setback
        self._avoided.add(setback.suspect, attempt.incarnation_of(setback.suspect), monotonic())

    def _raise_if_final(self, setback: Setback) -> None:
        text = f"{setback.suspect}: {setback.message}"
        if setback.code in _DEADLINE_CODES:
            raise RequestDeadline(f"{self._deadline_text()} ({text})")
        if setback.code in _CLIENTS_CODES:  # what only a worker can tell of what was asked for
            raise InvalidRequest(text, code=setback.code)
        if not setback.retryable:
            raise GenerationFailed(text, code=setback.code or None)
        if self._tries.are_over(self.facts.attempts, monotonic()):
            raise GenerationFailed(f"given up after {self.facts.attempts} attempts; the last one's end: {text}")

    def _deadline_text(self) -> str:
        request = self.request
        limit_s = request.deadline_s - request.arrival_s
        where = f"on {self.facts.prefill_node} and {self.facts.decode_node}" if self.facts.attempts else "unplaced"
        num_tokens = len(self.facts.token_ids)
        if request.idle_s and num_tokens:
            return f"no token for {request.idle_s:g} s: {num_tokens} tokens generated, {where}"
        return f"the request did not end within {limit_s:g} s: {num_tokens} tokens generated, {where}"

    def _on_overflow(self) -> None:
        self._context.metrics.slow_clients.inc()
        self._outcome = "failed"
        if self._attempt is not None:
            self._leave(self._attempt, cancel=True)
        if not self.overflowed.done():
            self.overflowed.set_result(None)
