"""A worker whose engine is vLLM, which plans its own steps and keeps KV in blocks of its own beside the slots."""

from __future__ import annotations

import asyncio

from moonpool_proto.v1.common_pb2 import Role
from moonpool_proto.v1.conductor_pb2 import Node
from vllm_worker.copy_channel import CopyReports
from vllm_worker.engine import VllmEngine, VllmMemory
from vllm_worker.engine_blocks import EngineBlocks
from vllm_worker.event_subscriber import EventSubscriber
from vllm_worker.runner import VllmRunner
from worker.config import WorkerConfig
from worker.engine_interface import Engine
from worker.engine_node import SequenceRunner
from worker.errors import StartupError
from worker.node import WorkerNode
from worker.request import EngineSequence


class VllmNode(WorkerNode):
    """The components of a worker around vLLM. All methods run on the event loop, except `warm_up`."""

    def __init__(self, config: WorkerConfig, role: Role.ValueType) -> None:
        """Raises StartupError if vLLM is not installed or refuses the configuration."""
        self._vllm: VllmRunner
        self._subscribing: asyncio.Task[None] | None = None
        super().__init__(config, role)

    def _load_engine(self) -> Engine:
        self._vllm_engine = VllmEngine(self.config)
        return self._vllm_engine

    def _new_runner(self) -> SequenceRunner:
        self._vllm = VllmRunner(self._on_step, self._on_decode)
        self._reports = CopyReports(
            self._vllm_engine.socket_path,
            num_ranks=self._vllm_engine.num_ranks,
            on_layer=self._vllm.layer_saved,
            on_end=self._vllm.copies_ended,
        )
        self._engine_blocks = EngineBlocks(self.config.block_tokens, self.own_blocks.add, self.own_blocks.discard)
        return self._vllm

    async def _start_engine(self) -> None:
        """Start vLLM, which takes from seconds to minutes."""
        assert isinstance(self.memory, VllmMemory)
        self._subscriber = EventSubscriber(
            self._vllm_engine.event_sockets, self._engine_blocks.apply, self._engine_blocks.clear
        )
        self._subscribing = asyncio.create_task(self._subscriber.run(), name="KV events of vLLM")
        self._reports.serve(self.memory.layout, self.memory.nbytes, self.memory.writable_fd)
        try:
            await self._vllm.start(self._vllm_engine.vllm_config)
        except Exception as error:
            raise StartupError(f"vLLM does not start: {error}") from error

    async def _close_engine(self) -> None:
        if self._subscribing is not None:
            self._subscribing.cancel()
            await asyncio.gather(self._subscribing, return_exceptions=True)
        await self._vllm.close()
        await self._reports.close()
        self._vllm_engine.event_sockets.remove()

    def _on_decode(self, batch: int, context_tokens: int, seconds: float) -> None:
        if self.has_started:
            self.reporter.decode(batch, context_tokens, seconds)

    def _engine_description(self) -> Node:
        description = super()._engine_description()
        description.capacity_tokens = min(description.capacity_tokens, self._vllm_tokens)
        return description

    @property
    def _vllm_tokens(self) -> int:
        """Tokens of KV that vLLM has room for."""
        blocks: int = self._vllm.config.cache_config.num_gpu_blocks
        return blocks * self.config.block_tokens

    @property
    def free_tokens(self) -> int:
        return min(super().free_tokens, int(self._vllm_tokens * (1.0 - self._vllm.usage)))

    def _engine_counters(self) -> dict[str, float]:
        own = {"preemptions": self._vllm.preemptions, "engine_held_blocks": len(self._engine_blocks)}
        return {**super()._engine_counters(), **{name: float(count) for name, count in own.items()}}

    def _stepped(self, sequence: EngineSequence) -> None:
        super()._stepped(sequence)
        timing = self.timings.get(id(sequence))
        if timing is None:
            return
        if timing.HasField("handoff"):
            missing = sequence.prompt_len - sequence.reused_tokens
            if missing > 0:
                timing.recomputed_blocks = -(-missing // self.config.block_tokens)
                self.counters.add("recomputed_blocks", timing.recomputed_blocks)
        elif sequence.reused_tokens > timing.cached_tokens:
            # vLLM still had more of the prefix than the slots.
            self.counters.add("cached_tokens", sequence.reused_tokens - timing.cached_tokens)
            timing.cached_tokens = sequence.reused_tokens
