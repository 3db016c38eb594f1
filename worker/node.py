"""A worker with its model, KV memory, slots, engine and pool. One per process.

All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpool import digest
from messenger import Messenger
from moonpool_proto.v1.common_pb2 import Role
from moonpool_proto.v1.conductor_pb2 import Node, NodeRef
from telemetry.tracing import Span
from worker.config import WorkerConfig
from worker.engine_interface import Engine, SteppedEngine
from worker.engine_loading import load_engine
from worker.engine_loop import EngineLoop
from worker.engine_node import EngineNode, SequenceRunner
from worker.grammar_matching import GrammarCompiler
from worker.kv_connector import KVConnector, PoolCallSettings
from worker.kv_receiver import KVReceiver
from worker.node_slots import NodeSlots, SlotCalls
from worker.own_blocks import OwnBlocks
from worker.parity import ParityChecker
from worker.policy import BatchLimits
from worker.prefix_blocks import PrefixSave, StoredParts
from worker.request import EngineSequence, Request
from worker.slot_memory import SlotMemory

if TYPE_CHECKING:
    from worker.sibling_reuse import SiblingKv

SWITCH_INTERVAL_S = 0.0005  # the default of 5 ms would delay I/O while the engine thread runs Python


class WorkerNode(EngineNode):
    """The components shared by all roles of a worker, with the native engine's loop over its steps.

    Subclasses replace the engine by overriding the four methods around it.
    """

    engine: SequenceRunner

    def __init__(self, config: WorkerConfig, role: Role.ValueType) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        super().__init__(config, role)
        self.model = self._load_engine()
        own, self.vocab_size = self.model.config.max_positions, self.model.config.vocab_size
        self.grammars = GrammarCompiler(
            config.model.path,
            self.vocab_size,
            self.model.config.eos_token_ids,
            self._count_grammar,
        )
        if config.engine.capacity_tokens is None:
            from worker.kv_capacity import with_capacity

            self.config = config = with_capacity(config, self.model, self._limits)
        self.max_model_len = min(own, config.engine.max_model_len or own, config.capacity_tokens)
        self.messenger = Messenger(config.messenger, node_id=config.node_id, incarnation=self.incarnation)
        self.endpoint = self.messenger.start()
        self.memory = self.model.new_memory(
            self.messenger, num_slots=config.num_slots, block_tokens=config.block_tokens, limits=self._limits
        )
        self.kv_receiver = KVReceiver(self.memory, self.messenger, self.counters)
        self.stored, provenance = self.model.new_stored(
            self.memory, self.messenger
        )  # the slots in the form that the pool stores
        self.default_sinks = self.model.default_sinks
        identity = f"{self.model.fingerprint} {self.model.computation}".strip()
        self.stored_parts = StoredParts.of(identity, self.stored.spec, provenance)
        self.namespace = self.stored_parts.kv_namespace
        pool_settings = PoolCallSettings(
            own_target=config.pool_target,
            owner=config.node_id,
            incarnation=self.incarnation,
            kv=config.kv,
        )
        self.kv_connector = KVConnector(self.stored, self.messenger, self.stored_parts, pool_settings, self.counters)
        self._siblings = self._new_siblings(pool_settings)
        self.parity = ParityChecker(self.memory, config.kv.kv_parity_sample)
        lasting, windowed = self.stored_parts.lasting, self.stored_parts.windowed
        self.own_blocks = OwnBlocks(
            lasting.kv_namespace if lasting is not None else b"",
            self.incarnation,
            window_namespace=windowed.kv_namespace if windowed is not None else b"",
        )
        self.engine = self._new_runner()
        self.slots = NodeSlots(
            config,
            (self.memory, self.stored, *self._hidden),
            self.wait_queue,
            SlotCalls(
                extend=self._extend,
                waits=lambda: self.counters.add("kv_growth_waits", 1),
                preempt=self._preempt,
                broken=self._broken_by,
            ),
            own_blocks=self.own_blocks,
            windows=self.memory.windows,
        )

    def _load_engine(self) -> Engine:
        return load_engine(self.config)

    @property
    def _limits(self) -> BatchLimits:
        engine = self.config.engine
        return BatchLimits(
            max_batch=engine.max_batch,
            chunk_tokens=engine.prefill_chunk_tokens,
            block_tokens=self.config.block_tokens,
            step_s=engine.step_budget,
            window_slots=engine.window_slots,
        )

    def _new_runner(self) -> SequenceRunner:
        assert isinstance(self.model, SteppedEngine)
        steps = self.model.steps(self.memory)
        loop = self._loop_of_steps = EngineLoop(
            steps, self._limits, self._on_step_thread, allows_long_steps=self.model.allows_long_steps
        )
        if self._siblings is not None:
            self._siblings.attach(steps, lambda function: asyncio.wrap_future(loop.between_steps(function)))
        return loop

    def _new_siblings(self, pool_settings: PoolCallSettings) -> SiblingKv | None:
        """Return the reuse of siblings' KV if a profile names this worker's model. Raises StartupError."""
        if not self.config.kv.reuse_profile:
            return None
        from worker.sibling_reuse import SiblingKv

        return SiblingKv.of(self.model, self.memory, self.config, (self.messenger, pool_settings, self.counters))

    @property
    def _hidden(self) -> list[SlotMemory]:
        return [] if self._siblings is None or self._siblings.hidden is None else [self._siblings.hidden]

    async def reuse_sibling(self, request: Request, slots: Sequence[int], blocks: range, span: Span) -> int:
        """Bring a sibling's KV of whole `blocks` of the prompt to `slots`; return the end of what is there."""
        if self._siblings is None:
            return blocks.start
        return await self._siblings.take_up(request, slots, blocks.start, blocks.stop, span)

    async def store_inputs(
        self, kept: PrefixSave, slots: Sequence[int], first: int, *, pool: NodeRef | None = None, token_s: float = 0.0
    ) -> None:
        """Store the hidden states of blocks from `first` on for the model's siblings, if it has any."""
        if self._siblings is not None:
            await self._siblings.store_inputs(kept, slots, first, pool=pool, token_s=token_s)

    async def _start_engine(self) -> None:
        """Start the engine. Raises StartupError."""
        self._loop_of_steps.start()

    async def _close_engine(self) -> None:
        """Stop the engine; on return no step is in progress."""
        await asyncio.to_thread(self._loop_of_steps.close)

    def warm_up(self) -> None:
        self.model.warm_up()
        self.grammars.warm_up()
        digest.warm_up()

    async def start(self, target: str) -> None:
        await self._start_engine()
        self.slots.start()
        await self.kv_connector.wait_for_own_pool()
        if self._siblings is not None:
            await self._siblings.start()
        self._begin_joining(target)

    def _engine_description(self) -> Node:
        lasting, windowed = self.stored_parts.lasting, self.stored_parts.windowed
        return Node(
            endpoint=self.endpoint.to_proto(),
            host_id=self.endpoint.host_id,
            pool_node_id=self.kv_connector.own_node_id,
            kv_namespace=self.namespace,
            spec=self.stored.spec.to_proto(),
            capacity_tokens=self.config.capacity_tokens,
            kv_bytes_per_token=lasting.spec.bytes_per_token if lasting is not None else 0,
            window_namespace=windowed.kv_namespace if windowed is not None else b"",
            window_blocks=self.stored_parts.window_blocks,
            window_bytes_per_token=windowed.spec.bytes_per_token if windowed is not None else 0,
            model_fingerprint=self.model.fingerprint,
            hardware=self.model.hardware,
            engine=self.model.label,
            siblings=[] if self._siblings is None else self._siblings.description(),
            reports_blocks=True,
            preempts=self.config.engine.preemption == "on",
        )

    async def close(self) -> None:
        self.own_blocks.close()
        await self._end_requests()
        await self._close_engine()
        await asyncio.to_thread(self.grammars.close)
        await self.kv_connector.close()
        await self.slots.close()
        if self._siblings is not None:
            await self._siblings.close()
        if self.stored is not self.memory:
            self.stored.close()
        self.memory.close()
        await asyncio.to_thread(self.messenger.close)
        self.kv_receiver.close()

    def check(self, request: Request) -> None:
        self.model.check(request)

    @property
    def free_tokens(self) -> int:
        return self.slots.pool.num_available * self.config.block_tokens

    @property
    def kv_nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def hidden_nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._hidden)

    def _engine_counters(self) -> dict[str, float]:
        moved = {f"messenger_{name}": count for name, count in self.messenger.reported().items()}
        return {**self.model.counters(), **moved}

    def _entered(self, sequence: EngineSequence) -> None:
        self.slots.run(sequence)

    def _stepped(self, sequence: EngineSequence) -> None:
        self.slots.stepped(sequence)

    def _left(self, sequence: EngineSequence) -> None:
        self.slots.left(sequence)

    def _extend(self, sequence: EngineSequence, slots: list[int]) -> None:
        self.engine.extend(sequence, slots)
        held = self.held.get(sequence.request.request_id)
        if held is not None:
            held.committed_tokens = len(sequence.slots) * self.config.block_tokens

    def _preempt(self, sequence: EngineSequence) -> None:
        self.counters.add("preemptions", 1)
        sequence.preempted = True
        self.engine.cancel(sequence)

    def _kv_at_rest(self) -> tuple[list[str], dict[str, float]]:
        problems = self.slots.pool.validate() + [f"messenger: {p}" for p in self.messenger.validate()]
        windows = self.slots.pool.windows
        counts: dict[str, float] = {
            **({} if windows is None else {"window_slots_reserved": windows.num_reserved}),
            "slots_held": self.slots.pool.num_held,
            "slots_quarantined": self.slots.pool.num_quarantined,
            "slot_waiters": self.slots.num_waiting,
            "growing": len(self.slots.growing),
            "receiving": len(self.kv_receiver),
            "leases": self.kv_connector.num_pinned + (self._siblings.num_pinned if self._siblings is not None else 0),
        }
        return problems, counts
