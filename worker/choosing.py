"""From a step's logits to its tokens. A row that fails, fails alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine import LogitSteering, SamplingError, sample, steer
from moonpool_proto.v1.worker_pb2 import LogProbs
from worker.errors import GrammarError, RequestFailed, RequestRefused, WorkerError
from worker.policy import PrefillChunk
from worker.request import Sequence
from worker.scores import score_tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A row's next token, with its log-probabilities if they were asked for."""

    token: int
    logprobs: LogProbs | None


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
                sequence.error = _named(error)
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


def append(sequence: Sequence, token: int) -> bool:
    """Let the sequence go on with its token. False if it cannot; its `error` says why."""
    try:
        sequence.append(token)
    except Exception as error:
        sequence.error = _named(error)
    return sequence.error is None


def _sampled(logits: torch.Tensor, sequences: Rows[Sequence]) -> NDArray[np.int64]:
    """One id per row; any id for a sequence whose logits are damaged. Raises SamplingError if those of all are."""
    rows = [sequence.sampling_row() for sequence in sequences]
    try:
        return sample(logits, rows)
    except SamplingError as error:
        sound = logits.amax(dim=1).isfinite().nonzero()[:, 0].tolist()
        if not 0 < len(sound) < len(rows):
            raise
        for i in set(range(len(rows))).difference(sound):
            sequences[i].error = sequences[i].error or _named(error)
    tokens = np.zeros(len(rows), np.int64)
    tokens[sound] = sample(logits[sound], [rows[i] for i in sound])
    return tokens


def _steering(sequence: Sequence) -> LogitSteering | None:
    if sequence.steering is None:
        return None
    try:
        return sequence.steering.row(sequence.next_index)
    except Exception as error:
        sequence.error = _named(error)
        return None


def _named(error: Exception) -> WorkerError:
    if isinstance(error, GrammarError):  # it would end so on any node
        return RequestRefused("grammar", f"the answer cannot be held to its grammar any further: {error}")
    log.error("a sequence failed alone", exc_info=error)
    return RequestFailed("engine", f"its logits could not be used: {type(error).__name__}: {error}")
