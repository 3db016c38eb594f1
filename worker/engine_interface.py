"""Interface between a worker and its engine: a transformer or the paced stand-in. Imports no torch.

All other parts of a worker (slots, batch policy, hand-off, pool, streams) are shared by both engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.rolling import DEFAULT_SINKS
from jit.fast_dataclass import fast_dataclass
from kvpool import Provenance
from messenger import Messenger
from moonpool_proto.v1.worker_pb2 import LogProbs
from worker.policy import BatchLimits, PrefillChunk
from worker.request import EngineSequence, Request
from worker.slot_memory import EngineMemory, SlotMemory

OnLayer = Callable[[int], None]


@fast_dataclass
@dataclass(frozen=True, slots=True)
class SampledToken:
    """Next token of one row, with its log-probabilities if the request needs them."""

    token: int
    logprobs: LogProbs | None = None


class StepRunner(Protocol):
    """Runner of planned steps in the slots of one memory. Called on the engine thread only."""

    def run(
        self,
        decoding: Sequence[EngineSequence],
        chunks: Sequence[tuple[EngineSequence, PrefillChunk]],
        on_layer: OnLayer | None,
        before_layer: OnLayer | None = None,
    ) -> list[SampledToken | None]:
        """Compute one step: the next token of each decoding sequence, and the given prompt chunks.

        Writes the KV of the computed tokens and calls `on_layer(layer)` when a layer's KV is written. Calls
        `before_layer(layer)` before it reads or writes KV of a layer; the call may block until the preceding tokens'
        KV is there. Returns a token per decoding sequence, then one per chunk that ends its prompt; None for a sequence
        that cannot continue, whose `error` is set. Raises if the step fails as a whole, or what a hook raised.
        """

    def settle(self) -> None:
        """Return when nothing of a later step is written any more that has been queued ahead."""


class ModelLimits(Protocol):
    """The properties of a model that a worker needs; `ModelConfig` has them."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def max_positions(self) -> int:
        """Largest number of tokens of a prompt and its answer."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""


class Engine(ABC):
    """Model and device of one worker. `fingerprint` (hex) is equal for engines of the same model."""

    config: ModelLimits
    fingerprint: str
    computation = ""  # what the KV depends on beside the fingerprint, if that names the weights alone
    hardware = ""  # name of the device in cost profiles; empty if nothing is computed
    label = ""  # name of the stand-in; empty for a real model
    default_sinks = DEFAULT_SINKS  # of endless requests with a window that do not say how many

    @abstractmethod
    def new_memory(
        self, messenger: Messenger, *, num_slots: int, block_tokens: int, limits: BatchLimits | None = None
    ) -> EngineMemory:
        """Allocate the slots in which the engine computes. Raises OSError if there is not enough memory.

        Groups with windows get as many slots as steps within `limits` need, or `num_slots` without limits.
        """

    @abstractmethod
    def new_stored(self, memory: EngineMemory, messenger: Messenger) -> tuple[SlotMemory, Provenance]:
        """Return the slots in the form in which the pool stores them (possibly `memory` itself), and the provenance of
        pool KV."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile, or load from the cache, everything that steps need. Blocks."""

    @abstractmethod
    def check(self, request: Request) -> None:
        """Raise RequestRefused for a request that this engine cannot compute."""

    def counters(self) -> Mapping[str, float]:
        """Return the engine's own counters, for reports."""
        return {}


class SteppedEngine(Engine):
    """Engine whose steps `worker.engine_loop` plans and runs; others plan their own."""

    allows_long_steps = True  # the memory of a step does not grow with the product of its tokens and their context

    @abstractmethod
    def steps(self, memory: EngineMemory) -> StepRunner:
        """Return the runner of steps in `memory`."""
