"""The engine that computes: a loaded model behind the workers' seam."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

import torch

from engine import EngineError, ForwardBatch, Model, PagedCache, SequenceChunk, load_model
from kvpool import Provenance
from messenger import Messenger
from worker.choosing import choose, score_prompts
from worker.chosen import Chosen
from worker.engine_memory import EngineMemory
from worker.engines import Engine, OnLayer
from worker.errors import StartupError
from worker.hardware import hardware_name
from worker.kv_memory import KvMemory
from worker.policy import PrefillChunk
from worker.quantised import QuantisedMemory
from worker.request import Request, Sequence
from worker.slot_memory import SlotMemory

if TYPE_CHECKING:
    from worker.config import WorkerConfig


class ModelSteps:
    """Runs a model's forward over its paged cache, and samples."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache

    @torch.inference_mode()
    def run(
        self, decoding: Rows[Sequence], chunks: Rows[tuple[Sequence, PrefillChunk]], on_layer: OnLayer | None
    ) -> list[Chosen | None]:
        batch = ForwardBatch(
            [self._chunk(s, s.num_computed, s.num_tokens, True) for s in decoding]
            + [self._chunk(s, c.start, c.end, c.last) for s, c in chunks]
        )
        logits = self._model.forward(batch, self._cache, on_layer)
        rows = [*decoding, *(s for s, c in chunks if c.last)]
        return choose(score_prompts(logits, len(decoding), chunks), rows)

    def _chunk(self, sequence: Sequence, start: int, end: int, want_logits: bool) -> SequenceChunk:
        used = -(-end // self._cache.block_tokens)
        return SequenceChunk(
            token_ids=sequence.tokens[start:end],
            start=start,
            slot_tables=(sequence.table[:used],) * len(self._model.kv_groups),
            want_logits=want_logits or sequence.prompt_scores is not None,
            every=sequence.prompt_scores is not None and start < sequence.prompt_len,
        )


class Transformer(Engine):
    """A model on a device."""

    def __init__(self, model: Model, kv_storage: str, hardware: str = "") -> None:
        self.model = model
        self.config = model.config
        self.fingerprint = model.fingerprint
        self.hardware = hardware
        self._kv_storage = kv_storage

    @classmethod
    def of(cls, config: WorkerConfig) -> Transformer:
        """Load the configured model. Raises StartupError."""
        try:
            model = load_model(config.model_path, device=config.device, dtype=config.dtype, threads=config.threads)
        except EngineError as error:
            raise StartupError(str(error)) from error
        return cls(model, config.kv_storage, hardware_name(model.device, config.threads))

    def new_memory(self, messenger: Messenger, *, num_slots: int, block_tokens: int) -> KvMemory:
        return KvMemory(self.model, messenger, num_slots=num_slots, block_tokens=block_tokens)

    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        if self._kv_storage != "int8":
            return memory, Provenance.EXACT
        assert isinstance(memory, KvMemory)
        return QuantisedMemory(memory, messenger, num_slots=memory.num_slots), Provenance.QUANTISED

    def steps(self, memory: EngineMemory) -> ModelSteps:
        assert isinstance(memory, KvMemory)
        return ModelSteps(self.model, memory.cache)

    def warm_up(self) -> None:
        self.model.warm_up()

    def check(self, request: Request) -> None:
        return  # what the door has let through can be computed
