"""Decode steps that are queued on the device before the tokens of the step before have been read.

While the same sequences go on, the tokens of the next step are the ids that the device has just chosen. It is queued
with them at once, so that the device never waits for the host: which sequences have ended is known one step later, and
their rows of the step that has been queued are dropped. Its tokens are those that a later step would have chosen, since
a row depends on its own sequence alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from engine import FlatBatch, InvalidBatch, Model, ModelConfig, PagedCache, SamplingRow
from engine.sampling import QueuedChoice, damaged_logits, queue_choice
from worker.engine_interface import SampledToken
from worker.errors import sequence_error
from worker.request import EngineSequence

log = logging.getLogger(__name__)


def sampling_row(sequence: EngineSequence, ahead: int = 0) -> SamplingRow:
    """Return the sampling parameters of the sequence's next token, or of one that is so many tokens later."""
    s = sequence.request.sampling
    return SamplingRow(s.temperature, s.top_p, s.top_k, s.seed, s.choice, sequence.next_index + ahead, s.min_p)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step of decoding sequences, the slot tables of its batch, and where each sequence's token is."""

    sequences: tuple[EngineSequence, ...]
    tables: tuple[NDArray[np.int32], ...]
    batch: FlatBatch

    def goes_on(self, decoding: Sequence[EngineSequence]) -> bool:
        """Return True if the next step has the same sequences, in the same slots and this order."""
        return len(decoding) == len(self.sequences) and all(
            sequence is last and sequence.table is table
            for sequence, last, table in zip(decoding, self.sequences, self.tables, strict=True)
        )

    def next_step(self, decoding: Sequence[EngineSequence], config: ModelConfig) -> FlatBatch | None:
        """Return the batch of the next step if the same sequences go on in the same slots; otherwise None."""
        if not self.goes_on(decoding):
            return None
        computed = np.array([s.num_computed for s in decoding])
        if not np.array_equal(computed, self.batch.starts + 1):
            return None
        tokens = np.array([s.tokens[s.num_computed] for s in decoding], np.int32)
        return self.batch.advanced(tokens, config)


@dataclass(frozen=True, slots=True)
class QueuedStep:
    """A decode step whose tokens have been chosen on the device, but not been read."""

    step: DecodeStep
    choice: QueuedChoice
    void: frozenset[int] = frozenset()  # rows that were computed from a wrong token

    def rows_of(self, decoding: Sequence[EngineSequence]) -> dict[int, int]:
        """Return index in `decoding` -> row of this step, for the sequences whose next token it chooses."""
        rows = {id(sequence): row for row, sequence in enumerate(self.step.sequences) if row not in self.void}
        return {
            i: row
            for i, sequence in enumerate(decoding)
            if (row := rows.get(id(sequence))) is not None and sequence.num_computed == self.step.batch.starts[row]
        }

    def read(self) -> list[SampledToken | None]:
        """Return the token of each row; None for a sequence that cannot continue, whose `error` is set."""
        ids, scores = self.choice.read()
        tokens: list[SampledToken | None] = []
        for sequence, token, sound in zip(self.step.sequences, ids.tolist(), scores.isfinite().tolist(), strict=True):
            if not sound:
                sequence.error = sequence.error or sequence_error(damaged_logits())
            tokens.append(SampledToken(token) if sound else None)
        return tokens

    def after(self, before: QueuedStep, tokens: Sequence[SampledToken | None]) -> QueuedStep:
        """Return this step as it is once the tokens of the one before are known.

        An id that the device was not certain of may be another one after all; what was computed from it is void.
        """
        if before.choice.host is None:
            return self
        fed = before.choice.host[0].tolist()
        wrong = [row for row, token in enumerate(tokens) if token is None or token.token != fed[row]]
        return replace(self, void=frozenset(wrong)) if wrong else self


class DecodeAhead:
    """Queues the step after a decode step. Engine thread only."""

    def __init__(self, model: Model, cache: PagedCache) -> None:
        self._model = model
        self._cache = cache

    def choose(self, step: DecodeStep, logits: torch.Tensor, ahead: int = 0) -> QueuedStep:
        """Choose the tokens of a step that has been queued, from its logits; `ahead` tokens have not been read."""
        return QueuedStep(step, queue_choice(logits, [sampling_row(s, ahead) for s in step.sequences]))

    def queue_after(self, queued: QueuedStep) -> QueuedStep | None:
        """Queue the step after one whose tokens have not been read; None if it cannot be queued before they are."""
        last = queued.step
        if not can_go_ahead(last.sequences):
            return None
        try:
            batch = last.batch.advanced(queued.choice.ids, self._model.config)
        except InvalidBatch:  # a sequence grows only after its token has been read
            return None
        step = replace(last, batch=batch)
        try:
            return self.choose(step, self._model.run(batch, self._cache), ahead=1)
        except Exception:  # the step before is sound; whatever is wrong fails the next one
            log.exception("a decode step was not queued ahead")
            return None


def can_go_ahead(decoding: Sequence[EngineSequence]) -> bool:
    """Return True if the tokens after the next ones depend on the host in nothing, and will probably be needed."""
    return all(
        sequence.remaining > 1
        and not sequence.cancelled
        and sequence.rolling is None
        and sequence.steering is None
        and sequence.prompt_scores is None
        and sequence.request.sampling.logprobs is None
        for sequence in decoding
    )
