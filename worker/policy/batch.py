"""Planning of engine steps: the merge step of PPL.LLM with chunked prefill.

Every decoding sequence advances by one token; the rest of the step's token budget goes to prompts in scheduling order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

ARRIVING_CHUNKS: Final = 8
"""Chunks that one step may compute while layers of the prompt's reused KV arrive, if there is nothing else to do."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one step. `chunk_tokens` bounds the prompt tokens; chunks end at multiples of `block_tokens`."""

    max_batch: int
    chunk_tokens: int
    block_tokens: int
    step_s: float = 0.0  # longest step beside decoding sequences, 0: as long as it takes
    window_slots: int = 0  # blocks with KV in groups with windows, 0: enough for full batches (`num_window_slots`)

    def while_arriving(self, reused_tokens: int) -> BatchLimits:
        """Return the bounds of a step whose prompt waits, layer by layer, for the KV of `reused_tokens`.

        Only the tokens of this step are computed while the KV arrives; those of later steps follow after it. So a
        longer step hides more of the transfer. A prompt that arrives meanwhile waits for the end of the step: it has no
        more tokens than are reused, whose transfer takes less time than their computation, or they would not be.
        """
        tokens = min(ARRIVING_CHUNKS * self.chunk_tokens, max(self.chunk_tokens, reused_tokens))
        return replace(self, chunk_tokens=tokens)


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens [start, end) of the `index`-th prefilling sequence; `last` if they end the prompt."""

    index: int
    start: int
    end: int
    last: bool


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Indices of the decoding sequences of a step, and the prompt chunks beside them.

    `valid_steps` is the number of consecutive steps for which this plan may be repeated (each decoding sequence
    advances by one) as long as no sequence arrives, leaves or ends; 1 if there is prefill work, which changes with
    every step.
    """

    decode: tuple[int, ...]
    prefill: tuple[PrefillChunk, ...]
    valid_steps: int

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.prefill


PlanStep = Callable[[Sequence[int], Sequence[tuple[int, int]], BatchLimits], BatchPlan]
"""Function with the arguments of `plan_step`."""


def plan_step(
    decode_remaining: Sequence[int], prefill_progress: Sequence[tuple[int, int]], limits: BatchLimits
) -> BatchPlan:
    """Plan one step.

    Args:
        decode_remaining: per decoding sequence, in scheduling order, the tokens it may still generate.
        prefill_progress: per prefilling sequence, in scheduling order, (tokens computed, prompt length).
        limits: the step's bounds.
    """
    decode = tuple(range(min(len(decode_remaining), limits.max_batch)))
    rows = limits.max_batch - len(decode)
    budget = limits.chunk_tokens
    chunks: list[PrefillChunk] = []
    for index, (computed, prompt) in enumerate(prefill_progress):
        if budget <= 0 or len(chunks) >= rows:
            break
        end = min(prompt, computed + budget)
        if end < prompt:
            # A block is pushed once it is complete, so every chunk but the last one ends on a block border.
            end -= end % limits.block_tokens
            if end <= computed:
                if chunks:
                    break
                end = min(prompt, computed - computed % limits.block_tokens + limits.block_tokens)
        chunks.append(PrefillChunk(index, computed, end, end == prompt))
        budget -= end - computed
    valid = 1 if chunks or not decode else min(decode_remaining[i] for i in decode)
    return BatchPlan(decode, tuple(chunks), max(1, valid))
