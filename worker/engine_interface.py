"""What computes for a worker: the seam behind which a transformer or its paced stand-in runs. No torch.

Everything else of a worker (slots, batch policy, hand-over, pool, streams) is the same code over either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.config import ModelConfig
from kvpool import Provenance
from messenger import Messenger
from moonpool_proto.v1.worker_pb2 import LogProbs
from worker.policy import PrefillChunk
from worker.request import EngineSequence, Request
from worker.slot_memory import EngineMemory, SlotMemory

OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Next token of one row, with its log-probabilities if the request asked for them."""

    token: int
    logprobs: LogProbs | None = None


class StepRunner(Protocol):
    """Computes planned steps in the slots of one memory. Called on the engine's thread alone."""

    def run(
        self,
        decoding: Sequence[EngineSequence],
        chunks: Sequence[tuple[EngineSequence, PrefillChunk]],
        on_layer: OnLayer | None,
    ) -> list[SampledToken | None]:
        """One step: the next token of each decoding sequence, and these prompt chunks.

        Writes the KV of what is computed and calls `on_layer(layer)` once a layer's is written. Returns a token per
        decoding sequence, then one per chunk that ends its prompt; None for a sequence that cannot go on, whose `error`
        says why. Raises when the step failed as a whole.
        """


class Engine(ABC):
    """What one worker computes with. `fingerprint`: hex, equal for those that compute the same KV and tokens."""

    config: ModelConfig
    fingerprint: str
    hardware = ""  # what it computes on, as cost profiles name it; empty where nothing computes
    label = ""  # what stands in for the model, and how; empty for the model itself

    @abstractmethod
    def new_memory(self, messenger: Messenger, *, num_slots: int, block_tokens: int) -> EngineMemory:
        """The slots it computes in. Raises OSError when there is not enough memory."""

    @abstractmethod
    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        """The slots as the pool has them, which may be the memory itself, and what KV from the pool then is."""

    @abstractmethod
    def steps(self, memory: EngineMemory) -> StepRunner:
        """What computes in `memory`."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile, or load from the cache, all that steps need. Blocks."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raises RequestRefused for what cannot be computed."""

    def counters(self) -> Mapping[str, float]:
        """What it counts of its own, for reports."""
        return {}
