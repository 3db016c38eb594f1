"""From a step's logits to its tokens. A row that fails, fails alone."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np
import torch
from numpy.typing import NDArray

from engine import LogitSteering, SamplingError, SamplingRow, sample, steer
from worker.chosen import Chosen, named
from worker.policy import PrefillChunk
from worker.request import Sequence
from worker.scores import score_tokens


def score_prompts(logits: torch.Tensor, num_decoding: int, chunks: Rows[tuple[Sequence, PrefillChunk]]) -> torch.Tensor:
    """Let prompts that are to be scored take their rows of a step's logits, which begin with those of the decoding
    sequences. The rows that tokens are chosen from are left."""
    if all(sequence.prompt_scores is None for sequence, _ in chunks):
        return logits
    chosen_from = list(range(num_decoding))
    begin = num_decoding
    for sequence, chunk in chunks:
        end = begin + (chunk.last if sequence.prompt_scores is None else chunk.end - chunk.start)
        if sequence.prompt_scores is not None:
            try:
                sequence.prompt_scores.take(logits[begin:end], chunk.start)
            except Exception as error:
                sequence.error = named(error)
        if chunk.last:
            chosen_from.append(end - 1)
        begin = end
    return logits[chosen_from]


def choose(logits: torch.Tensor, sequences: Rows[Sequence]) -> list[Chosen | None]:
    """One token per row of logits [B, V]; None for a sequence that cannot go on, whose `error` says why."""
    if not sequences:
        return []
    tokens = _sampled(steer(logits, [_steering(s) for s in sequences]), sequences)
    scores = score_tokens(logits, tokens, [s.request.sampling.logprobs if s.error is None else None for s in sequences])
    return [
        Chosen(token, score) if sequence.error is None else None
        for sequence, token, score in zip(sequences, tokens.tolist(), scores, strict=True)
    ]


def _sampled(logits: torch.Tensor, sequences: Rows[Sequence]) -> NDArray[np.int64]:
    """One id per row; any id for a sequence whose logits are damaged. Raises SamplingError if those of all are."""
    rows = [_row(sequence) for sequence in sequences]
    try:
        return sample(logits, rows)
    except SamplingError as error:
        sound = logits.amax(dim=1).isfinite().nonzero()[:, 0].tolist()
        if not 0 < len(sound) < len(rows):
            raise
        for i in set(range(len(rows))).difference(sound):
            sequences[i].error = sequences[i].error or named(error)
    tokens = np.zeros(len(rows), np.int64)
    tokens[sound] = sample(logits[sound], [rows[i] for i in sound])
    return tokens


def _steering(sequence: Sequence) -> LogitSteering | None:
    if sequence.steering is None:
        return None
    try:
        return sequence.steering.row(sequence.next_index)
    except Exception as error:
        sequence.error = named(error)
        return None


def _row(sequence: Sequence) -> SamplingRow:
    s = sequence.request.sampling
    return SamplingRow(s.temperature, s.top_p, s.top_k, s.seed, s.choice, sequence.next_index, s.min_p)
