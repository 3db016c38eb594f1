"""Composition of a worker: model, KV memory, slots, engine loop, token streams, reports. One per process.

All methods run on the event loop, except `_on_step_thread`, which the engine thread calls after each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sys
import time
from collections.abc import Iterator

from kvpool import digest, kv_namespace
from messenger import Messenger
from messenger.frames import VERSION as KV_WIRE
from moonpool_proto.v1.common_pb2 import ROLE_DECODE, Role
from moonpool_proto.v1.conductor_pb2 import PHASE_PREFILL_ENDED, Held, Node, NodeCommand, NodeReport
from moonpool_proto.v1.worker_pb2 import Timing
from rpc.metric_samples import node_sample
from rpc.versions import own_software
from telemetry import NodeSample, tracing
from worker.config import WorkerConfig
from worker.counters import WorkerCounters
from worker.engine_interface import Engine
from worker.engine_loading import load_engine
from worker.engine_loop import EngineLoop, StepResult
from worker.errors import GrammarError, GrammarLost, RequestFailed, RequestRefused, WorkerError
from worker.grammar_matching import GrammarCompiler, GrammarMatcher
from worker.jobs import RequestJobs
from worker.kv_connector import KVConnector, PoolCallSettings
from worker.kv_receiver import KVReceiver
from worker.node_slots import NodeSlots
from worker.parity import ParityChecker
from worker.policy import BatchLimits, EngineHealth
from worker.policy.scheduling_order import WaitQueue
from worker.reporter import ConductorReporter
from worker.request import EngineSequence, Request, queue_entry_to_proto
from worker.role_switch import RoleSwitch
from worker.shielded_wait import in_thread, shielded
from worker.streams import TokenStreams

log = logging.getLogger(__name__)

COUNT_EVERY_S = 0.5  # the age of the counters in a report, at most
SWITCH_INTERVAL_S = 0.0005  # the default of 5 ms would delay I/O while the engine thread runs Python


class WorkerNode:
    """The components shared by all roles of a worker, and the state of its requests."""

    def __init__(self, config: WorkerConfig, role: Role.ValueType) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.config = config
        self.incarnation = secrets.randbits(63)
        self.model: Engine = load_engine(config)
        own = self.model.config.max_positions
        self.grammars = GrammarCompiler(
            config.model.path,
            self.model.config.vocab_size,
            self.model.config.eos_token_ids,
            self._count_grammar,
        )
        self.max_model_len = min(own, config.engine.max_model_len or own, config.engine.capacity_tokens)
        self.messenger = Messenger(config.messenger, node_id=config.node_id, incarnation=self.incarnation)
        self.endpoint = self.messenger.start()
        self.memory = self.model.new_memory(
            self.messenger, num_slots=config.num_slots, block_tokens=config.block_tokens
        )
        self.counters = WorkerCounters(lambda path, nbytes, seconds: self.reporter.transfer(path, nbytes, seconds))
        self.kv_receiver = KVReceiver(self.memory, self.messenger, self.counters)
        self.stored, provenance = self.model.new_stored(
            self.memory, self.messenger
        )  # the slots in the form that the pool stores
        self.namespace = kv_namespace(self.model.fingerprint, self.stored.spec, provenance)
        pool_settings = PoolCallSettings(
            own_target=config.pool_target,
            owner=config.node_id,
            incarnation=self.incarnation,
            kv=config.kv,
        )
        self.kv_connector = KVConnector(self.stored, self.messenger, self.namespace, pool_settings, self.counters)
        self.parity = ParityChecker(self.memory, config.kv.kv_parity_sample)
        self.streams = TokenStreams()
        limits = BatchLimits(config.engine.max_batch, config.engine.prefill_chunk_tokens, config.block_tokens)
        self.engine = EngineLoop(
            self.model.steps(self.memory),
            limits,
            self._on_step_thread,
            allows_long_steps=self.model.allows_long_steps,
        )
        self.draining = asyncio.Event()
        self.broken: asyncio.Future[str] = (
            asyncio.get_running_loop().create_future()
        )  # set to the reason once the engine fails every step
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
        self.slots = NodeSlots(
            config,
            (self.memory, self.stored),
            self.wait_queue,
            extend=self._extend,
            waits=lambda: self.counters.add("kv_growth_waits", 1),
            broken=self._broken_by,
        )
        self._loop = asyncio.get_running_loop()
        self._reporting: asyncio.Task[None] | None = None
        self._counted, self._counted_s = b"", -COUNT_EVERY_S  # serialised counters of the reports, and their time
        self.reporter: ConductorReporter

    def warm_up(self) -> None:
        """Compile, or load from the cache, all kernels, so that the first request does not wait for it."""
        self.model.warm_up()
        self.grammars.warm_up()
        digest.warm_up()

    async def start(self, target: str) -> None:
        """Start the engine and begin to join the conductors as the node at `target`."""
        self.engine.start()
        self.slots.start()
        await self.kv_connector.wait_for_own_pool()
        self.target = target
        self.reporter = ConductorReporter(
            self._description(), self.config.conductor_targets, self._fill_report, self._on_command
        )
        self._reporting = asyncio.create_task(self.reporter.run())

    @property
    def has_started(self) -> bool:
        """True once `start` has found the pool node, so that requests can be served."""
        return self._reporting is not None

    def _description(self) -> Node:
        return Node(
            node_id=self.config.node_id,
            role=self.role.role,
            incarnation=self.incarnation,
            target=self.target,
            endpoint=self.endpoint.to_proto(),
            host_id=self.endpoint.host_id,
            pool_node_id=self.kv_connector.own_node_id,
            model=self.config.model.name,
            kv_namespace=self.namespace,
            spec=self.stored.spec.to_proto(),
            capacity_tokens=self.config.engine.capacity_tokens,
            max_model_len=self.max_model_len,
            max_batch=self.config.engine.max_batch,
            prefill_chunk_tokens=self.config.engine.prefill_chunk_tokens,
            kv_bytes_per_token=self.stored.spec.bytes_per_token,
            model_fingerprint=self.model.fingerprint,
            hardware=self.model.hardware,
            engine=self.model.label,
            software=own_software(kv_wire=KV_WIRE),
        )

    def _on_command(self, command: NodeCommand) -> None:
        if command.HasField("drain"):
            self.draining.set()
        elif command.HasField("switch_role"):
            self.role.begin(command.switch_role.role)

    async def close(self) -> None:
        """Cancel all remaining work and release everything."""
        self.draining.set()
        await self.role.close()
        await self.jobs.cancel_all()
        if self._reporting is not None:
            self._reporting.cancel()
            await asyncio.gather(self._reporting, return_exceptions=True)
        self.streams.close()
        await asyncio.to_thread(self.engine.close)
        await asyncio.to_thread(self.grammars.close)
        await self.kv_connector.close()
        await self.slots.close()
        if self.stored is not self.memory:
            self.stored.close()
        self.memory.close()
        await asyncio.to_thread(self.messenger.close)
        self.kv_receiver.close()

    def hold(
        self, request: Request, *, committed_tokens: int = 0, remaining_prefill_tokens: int = 0, decode_node: str = ""
    ) -> Held:
        """Return a message that reports the request as held here until its job ends; the caller may change it."""
        held = self.held[request.request_id] = Held(
            request_id=request.request_id,
            attempt=request.attempt,
            committed_tokens=committed_tokens,
            remaining_prefill_tokens=remaining_prefill_tokens,
            prompt_tokens=len(request.prompt),
            max_new_tokens=request.max_tokens - request.generated,
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

    def _extend(self, sequence: EngineSequence, slots: list[int]) -> None:
        self.engine.extend(sequence, slots)
        held = self.held.get(sequence.request.request_id)
        if held is not None:
            held.committed_tokens = len(sequence.slots) * self.config.block_tokens

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
        self.slots.growing.run(sequence)
        try:
            await asyncio.shield(leaving)
        except asyncio.CancelledError:
            self.engine.cancel(sequence)
            with contextlib.suppress(asyncio.CancelledError, WorkerError):
                await shielded(leaving)
            raise
        finally:
            del self._leaving[id(sequence)]
            self.slots.left(sequence)
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
                self.slots.growing.stepped(sequence)
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
        if is_alone and not (sequence.is_beside_decodes and self.role.role == ROLE_DECODE):
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
        report.free_tokens = self.slots.pool.num_available * self.config.block_tokens
        report.draining = self.draining.is_set() or self.role.is_switching
        report.held.extend(self.held.values())
        now_s = time.monotonic()
        for held in report.held:
            if (key := (held.request_id, held.attempt)) in self.wait_queue:
                held.turn.CopyFrom(queue_entry_to_proto(self.wait_queue.entry(key), now_s))

    def _fill_counters(self, report: NodeReport) -> None:
        for name, value in self.counters.snapshot().items():
            report.counters[name] = value
        for name, value in self.model.counters().items():
            report.counters[name] = value
        for name, count in self.messenger.reported().items():
            report.counters[f"messenger_{name}"] = count
        for result, count in tracing.counts().items():
            report.counters[f"trace_spans_{result}"] = count

    def validate(self) -> tuple[list[str], dict[str, float]]:
        """Return (problems, counts); at rest there are no problems and all counts are zero."""
        problems = self.slots.pool.validate() + [f"messenger: {p}" for p in self.messenger.validate()]
        counts: dict[str, float] = {
            "jobs": len(self.jobs),
            "slots_held": self.slots.pool.num_held,
            "slots_quarantined": self.slots.pool.num_quarantined,
            "slot_waiters": self.slots.num_waiting,
            "growing": len(self.slots.growing),
            "receiving": len(self.kv_receiver),
            "in_line": len(self.wait_queue),
            "engine_sequences": self.engine.num_sequences,
            "leases": self.kv_connector.num_pinned,
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
            "kv_bytes": self.memory.nbytes,
            "counters": dict(self.counters.snapshot()),
            "counts": self.validate()[1],
        }
