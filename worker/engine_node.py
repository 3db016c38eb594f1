"""Base of every worker, whatever its engine: the jobs of its requests, token streams, wait queue, role and reports.

`WorkerNode` adds a native engine with its slots and KV; other packages add engines that keep their own KV. All methods
run on the event loop, except `_on_step_thread`, which the engine calls after each step from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from engine.rolling import DEFAULT_SINKS
from messenger.frames import VERSION as KV_WIRE
from moonpool_proto.v1.common_pb2 import ROLE_DECODE, Role
from moonpool_proto.v1.conductor_pb2 import PHASE_PREFILL_ENDED, Held, Node, NodeCommand, NodeReport
from moonpool_proto.v1.worker_pb2 import Timing
from rpc.metric_samples import node_sample
from rpc.versions import own_software
from telemetry import NodeSample, tracing
from worker.config import WorkerConfig
from worker.counters import WorkerCounters
from worker.engine_loop import LayerHook, StepResult
from worker.errors import GrammarError, GrammarLost, RequestFailed, RequestRefused, WorkerError
from worker.grammar_matching import GrammarCompiler, GrammarMatcher
from worker.jobs import RequestJobs
from worker.policy import EngineHealth
from worker.policy.scheduling_order import WaitQueue
from worker.reporter import ConductorReporter
from worker.request import EngineSequence, Request, queue_entry_to_proto
from worker.role_switch import RoleSwitch
from worker.shielded_wait import in_thread, shielded
from worker.streams import TokenStreams

COUNT_EVERY_S = 0.5  # the age of the counters in a report, at most


class SequenceRunner(Protocol):
    """An engine that runs sequences and reports each step as a StepResult."""

    computes_in_slots: bool
    """True if a sequence's KV is computed in its slots: then the engine can wait for single layers of them, and for
    more slots while an answer grows. Otherwise KV is copied from the slots before the sequence is computed, and to
    them afterwards."""

    def submit(self, sequence: EngineSequence) -> None:
        """Pass a sequence to the engine, which owns it until a StepResult lists it in `left`."""

    def cancel(self, sequence: EngineSequence) -> None:
        """Request the removal of a sequence; it is reported as left."""

    def extend(self, sequence: EngineSequence, slots: list[int]) -> None:
        """Add slots to a sequence."""

    def wake(self) -> None:
        """Look again at sequences that wait for layers: some have arrived."""

    def on_layer(self, hook: LayerHook) -> None:
        """Set `hook(layer, chunks)`; call before the engine starts. One thread calls it when a layer's KV is in the
        slots, with the chunks (sequence, start, end) of the step whose sequences leave with their first token."""

    @property
    def num_sequences(self) -> int:
        """Number of submitted sequences that have not left."""

    @property
    def step_in_progress(self) -> int:
        """Number of the step that computes now; 0 if none does, or if it is not known."""


class EngineNode(ABC):
    """State of the requests on one worker, and what it reports. One per process."""

    engine: SequenceRunner
    grammars: GrammarCompiler
    max_model_len: int
    vocab_size: int
    default_sinks = DEFAULT_SINKS  # of endless requests with a window that do not say so

    def __init__(self, config: WorkerConfig, role: Role.ValueType) -> None:
        self.config = config
        self.incarnation = secrets.randbits(63)
        self.counters = WorkerCounters(lambda path, nbytes, seconds: self.reporter.transfer(path, nbytes, seconds))
        self.streams = TokenStreams()
        self.draining = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.broken: asyncio.Future[str] = self._loop.create_future()  # the reason, once the engine fails every step
        self._health = EngineHealth()
        self.held: dict[str, Held] = {}
        self.timings: dict[int, Timing] = {}
        self.jobs = RequestJobs(
            lambda request, failure: self.streams.send_failure(request.frontend_id, failure), self._job_over
        )
        self.role = RoleSwitch(
            role,
            self.jobs,
            grace_s=config.engine.worker_drain_grace_s,
            news=lambda: self.reporter.hurry(),
            done=lambda: self.reporter.announce(self._description()),
        )
        self.target = ""  # target that others dial, set by `start`
        self._leaving: dict[int, asyncio.Future[None]] = {}
        self.wait_queue = WaitQueue()  # requests that wait for slots or for their first token
        self._reporting: asyncio.Task[None] | None = None
        self._counted, self._counted_s = b"", -COUNT_EVERY_S  # serialised counters of the reports, and their time
        self.reporter: ConductorReporter

    @abstractmethod
    def warm_up(self) -> None:
        """Prepare everything that the first request would otherwise wait for. Blocks."""

    @abstractmethod
    async def start(self, target: str) -> None:
        """Start the engine and begin to join the conductors as the node at `target`, by `_begin_joining`."""

    @abstractmethod
    async def close(self) -> None:
        """Cancel all remaining work and release everything."""

    @abstractmethod
    def _engine_description(self) -> Node:
        """Return the description of the engine and its KV; the rest is the same for all workers."""

    @property
    @abstractmethod
    def free_tokens(self) -> int:
        """Tokens whose KV could be taken now."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise RequestRefused for a request that the engine cannot compute."""

    @abstractmethod
    def _engine_counters(self) -> dict[str, float]:
        """Return the counters of the engine and its KV, for reports."""

    @property
    @abstractmethod
    def kv_nbytes(self) -> int:
        """Size of the engine's KV cache."""

    @property
    def hidden_nbytes(self) -> int:
        """Host memory for hidden states that siblings reuse, in bytes; none is taken on the engine's device."""
        return 0

    @abstractmethod
    def _kv_at_rest(self) -> tuple[list[str], dict[str, float]]:
        """Return (problems, counts) of the engine's KV, as `validate`."""

    def _description(self) -> Node:
        config = self.config
        node = Node(
            node_id=config.node_id,
            role=self.role.role,
            incarnation=self.incarnation,
            target=self.target,
            model=config.model.name,
            max_model_len=self.max_model_len,
            max_batch=config.engine.max_batch,
            prefill_chunk_tokens=config.engine.prefill_chunk_tokens,
            software=own_software(kv_wire=KV_WIRE),
        )
        node.MergeFrom(self._engine_description())
        return node

    def _begin_joining(self, target: str) -> None:
        self.target = target
        self.reporter = ConductorReporter(
            self._description(), self.config.conductor_targets, self._fill_report, self._on_command
        )
        self._reporting = asyncio.create_task(self.reporter.run())

    @property
    def has_started(self) -> bool:
        """True once `start` has ended, so that requests can be served."""
        return self._reporting is not None

    def _on_command(self, command: NodeCommand) -> None:
        if command.HasField("drain"):
            self.draining.set()
        elif command.HasField("switch_role"):
            self.role.begin(command.switch_role.role)

    async def _end_requests(self) -> None:
        """Cancel all jobs and stop reporting."""
        self.draining.set()
        await self.role.close()
        await self.jobs.cancel_all()
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
        self.streams.close()

    def hold(
        self, request: Request, *, committed_tokens: int = 0, remaining_prefill_tokens: int = 0, decode_node: str = ""
    ) -> Held:
        """Return a message that reports the request as held here until its job ends; the caller may change it."""
        held = self.held[request.request_id] = Held(
            request_id=request.request_id,
            attempt=request.attempt,
            committed_tokens=committed_tokens,
            remaining_prefill_tokens=remaining_prefill_tokens,
            prompt_tokens=request.most_held(len(request.prompt)),
            max_new_tokens=request.most_held(len(request.prompt) + request.max_tokens - request.generated)
            - request.most_held(len(request.prompt)),
            decode_node=decode_node,
        )
        self.reporter.request_accepted()
        return held

    def _job_over(self, request: Request) -> None:
        held = self.held.get(request.request_id)
        if held is not None and held.attempt == request.attempt:
            del self.held[request.request_id]

    @contextlib.contextmanager
    def queued(self, request: Request) -> Iterator[None]:
        """Keep the request in the wait queue, until its first token at the latest."""
        self.wait_queue.add(request.key, request.queue_entry)
        try:
            yield
        finally:
            self.wait_queue.remove(request.key)

    def _count_grammar(self, what: str) -> None:
        if what == "refused":
            self.counters.add("grammars_refused", 1)
        else:
            self.counters.add("grammar_processes_killed", 1)

    def begin_grammar(self, request: Request) -> asyncio.Task[None]:
        """Compile the request's grammar, if it has one, in the background until the task is cancelled."""
        sampling = request.sampling
        return asyncio.create_task(self.grammars.begin(sampling.grammar, request.queue_entry.account))

    async def matcher(self, request: Request) -> GrammarMatcher | None:
        """Return the request's grammar matcher, advanced by its generated ids; None without a grammar.

        Raises RequestRefused and RequestFailed.
        """
        return await self.grammars.matcher(request.sampling.grammar, request.generated_ids, request.queue_entry.account)

    def _entered(self, sequence: EngineSequence) -> None:  # noqa: B027  # optional, as are the next two
        """Note that the engine has a sequence."""

    def _stepped(self, sequence: EngineSequence) -> None:  # noqa: B027
        """Note that a sequence has another token."""

    def _left(self, sequence: EngineSequence) -> None:  # noqa: B027
        """Note that the engine no longer has a sequence."""

    async def run_in_engine(self, sequence: EngineSequence) -> None:
        """Run a sequence in the engine until it leaves: finished, handed over, or cancelled with the caller.

        On return, also by an exception, the engine no longer uses its slots. Raises RequestFailed for an engine error,
        and the error of the sequence itself.
        """
        try:
            await self._run_in_engine(sequence)
        except GrammarLost as lost:
            cause = await in_thread(lost.judge)
            if isinstance(cause, GrammarError):
                raise RequestRefused("bad_grammar", str(cause)) from cause
            raise RequestFailed(lost.code, str(cause)) from cause

    async def _run_in_engine(self, sequence: EngineSequence) -> None:
        leaving: asyncio.Future[None] = self._loop.create_future()
        self._leaving[id(sequence)] = leaving
        self.engine.submit(sequence)
        self._entered(sequence)
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            self.engine.cancel(sequence)
            with contextlib.suppress(asyncio.CancelledError, WorkerError):
                await shielded(leaving)
            raise
        finally:
            del self._leaving[id(sequence)]
            self._left(sequence)
            self.timings.pop(id(sequence), None)

    def end_early(self, sequence: EngineSequence, kept_tokens: int) -> None:
        """End a sequence whose answer is complete; its first `kept_tokens` tokens are saved (0: all)."""
        if kept_tokens:
            sequence.kept_tokens = sequence.prompt_len - sequence.request.generated + kept_tokens
        self.engine.cancel(sequence)

    def _on_step_thread(self, result: StepResult) -> None:
        self._loop.call_soon_threadsafe(self._on_step, result)

    def _on_step(self, result: StepResult) -> None:
        if result.tokens:
            timings: dict[str, Timing] = {}
            for generated in result.tokens:
                sequence = generated.sequence
                self._stepped(sequence)
                if sequence.request.idle_s:
                    self.jobs.renew(sequence.request)
                timing = self.timings.pop(id(sequence), None) if self.timings else None  # present until the first token
                if timing is None:
                    continue
                timings[sequence.request.request_id] = timing
                if timing.HasField("handoff"):
                    sequence.joined_at = sequence.first_token_at - result.seconds
                    timing.handoff.join_s = sequence.joined_at - sequence.committed_at
                    timing.handoff.step_s = result.seconds
                else:
                    timing.queue_s = sequence.first_step_at - sequence.request.submitted - timing.load_s
                    timing.prefill_s = sequence.first_token_at - sequence.first_step_at - sequence.waited_s
                    timing.load_s += sequence.waited_s
                    self._report_prefill(sequence, timing)
            self.streams.send_tokens(result.tokens, timings)
            self.counters.add("generation_tokens", len(result.tokens))
        self._judge_health(result)
        if result.decode_batch and not result.prefill_tokens:
            self.reporter.decode(result.decode_batch, result.decode_context, result.seconds)
        for sequence in result.left:
            leaving = self._leaving.get(id(sequence))
            if leaving is None or leaving.done():
                continue
            if result.error is not None:
                leaving.set_exception(RequestFailed("engine", f"the engine failed: {result.error}"))
            elif sequence.error is not None:
                leaving.set_exception(sequence.error)
            else:
                leaving.set_result(None)

    def _judge_health(self, result: StepResult) -> None:
        if result.divisions:
            self.counters.add("divided_steps", 1)
        if result.error is not None:
            self.counters.add("failed_steps", 1)
            self._health.failed()
        elif result.decode_batch or result.prefill_tokens:
            self._health.succeeded()
        if self._health.is_broken or result.is_end:
            how = "its thread ended" if result.is_end else f"{self._health.num_failed} consecutive steps failed"
            self._broken_by(f"{how}, the last with {type(result.error).__name__}: {result.error}")

    def _broken_by(self, reason: str) -> None:
        if not self.broken.done():
            self.broken.set_result(reason)

    def _report_prefill(self, sequence: EngineSequence, timing: Timing) -> None:
        request = sequence.request
        self.wait_queue.remove(request.key)
        cached = timing.cached_tokens
        is_alone = (
            sequence.computed_tokens == len(request.prompt) - cached
        )  # otherwise a group computed it, and its time does not describe a single node
        # The same holds for prompts that a decode node computes beside its batch.
        # Nor does the time of a prompt in which a window slides follow the formula.
        if is_alone and not sequence.slid and not (sequence.is_beside_decodes and self.role.role == ROLE_DECODE):
            self.reporter.prefill(len(request.prompt) - cached, cached, sequence.compute_s)
        self.reporter.progress(request.request_id, request.attempt, PHASE_PREFILL_ENDED)

    def sample(self) -> NodeSample:
        """Return the node's own metrics, those of a report to the conductor."""
        report = NodeReport()
        self._fill_load(report)
        self._fill_counters(report)
        return node_sample(self._description(), report)

    def _fill_report(self, report: NodeReport) -> None:
        self._fill_load(report)
        # Every request causes reports, but nobody reads the counters as often: they are collected now and then.
        if (now_s := time.monotonic()) >= self._counted_s + COUNT_EVERY_S:
            counted = NodeReport()
            self._fill_counters(counted)
            self._counted, self._counted_s = counted.SerializeToString(), now_s
        report.MergeFromString(self._counted)

    def _fill_load(self, report: NodeReport) -> None:
        report.num_running = self.engine.num_sequences
        report.num_waiting = max(0, len(self.jobs) - self.engine.num_sequences)
        report.free_tokens = self.free_tokens
        report.draining = self.draining.is_set() or self.role.is_switching
        report.held.extend(self.held.values())
        now_s = time.monotonic()
        for held in report.held:
            if (key := (held.request_id, held.attempt)) in self.wait_queue:
                held.turn.CopyFrom(queue_entry_to_proto(self.wait_queue.entry(key), now_s))

    def _fill_counters(self, report: NodeReport) -> None:
        for name, value in self.counters.snapshot().items():
            report.counters[name] = value
        for name, value in self._engine_counters().items():
            report.counters[name] = value
        for result, count in tracing.counts().items():
            report.counters[f"trace_spans_{result}"] = count

    def validate(self) -> tuple[list[str], dict[str, float]]:
        """Return (problems, counts); at rest there are no problems and all counts are zero."""
        problems, kv_counts = self._kv_at_rest()
        counts: dict[str, float] = {
            "jobs": len(self.jobs),
            **kv_counts,
            "in_line": len(self.wait_queue),
            "engine_sequences": self.engine.num_sequences,
            "held": len(self.held),
        }
        problems += [f"{name} = {count} at rest" for name, count in counts.items() if count]
        return problems, counts

    def state(self) -> dict[str, object]:
        """Return the state that the State call reports."""
        return {
            "node_id": self.config.node_id,
            "incarnation": self.incarnation,
            "role": Role.Name(self.role.role),
            "model": self.config.model.name,
            "frontends": len(self.streams),
            "draining": self.draining.is_set(),
            "time": time.time(),
            "kv_bytes": self.kv_nbytes,
            "hidden_bytes": self.hidden_nbytes,
            "counters": dict(self.counters.snapshot()),
            "counts": self.validate()[1],
        }
