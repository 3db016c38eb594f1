"""Log-probabilities for clients: of generated tokens, and of a prompt chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import engine
from moonpool_proto.v1.worker_pb2 import LogProbs, PromptLogProbs

if TYPE_CHECKING:
    import torch

    from engine import TokenLogprobs

# `engine` imports log_probs on first use, so that an engine without logits never loads torch.


def score_tokens(
    logits: torch.Tensor, tokens: NDArray[np.int64], num_top: Sequence[int | None]
) -> list[LogProbs | None]:
    """Return log-probabilities of the chosen token of each row of logits [B, V]; None for rows without a request."""
    wanted = [i for i, number in enumerate(num_top) if number is not None]
    result: list[LogProbs | None] = [None] * len(num_top)
    if not wanted:
        return result
    found = engine.log_probs(logits[wanted], tokens[wanted], max(number or 0 for number in num_top))
    for place, i in enumerate(wanted):
        number = num_top[i]
        result[i] = LogProbs(
            logprob=float(found.logprobs[place]),
            rank=int(found.ranks[place]),
            top_ids=found.top_ids[place, :number].tolist(),
            top_logprobs=found.top_logprobs[place, :number].tolist(),
        )
    return result


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, filled in as its chunks are computed."""

    def __init__(self, prompt: NDArray[np.int32], num_top: int) -> None:
        count = len(prompt) - 1
        self._prompt = prompt
        self.num_top = num_top
        self._logprobs = np.zeros(count, np.float32)
        self._ranks = np.zeros(count, np.uint32)
        self._top_ids = np.zeros((count, num_top), np.int32)
        self._top_logprobs = np.zeros((count, num_top), np.float32)

    def take(self, logits: torch.Tensor, start: int) -> None:
        """Record logits [n, V] after the prompt tokens from `start` on.

        The row after the last prompt token belongs to the answer and is ignored.
        """
        followers = self._prompt[start + 1 : start + 1 + len(logits)]
        self.record(engine.log_probs(logits[: len(followers)], followers, self.num_top), start)

    def record(self, found: TokenLogprobs, start: int) -> None:
        """Record the log-probabilities of the tokens that follow the prompt tokens from `start` on."""
        at = slice(start, start + len(found.logprobs))
        self._logprobs[at] = found.logprobs
        self._ranks[at] = found.ranks
        self._top_ids[at] = found.top_ids
        self._top_logprobs[at] = found.top_logprobs

    def to_proto(self) -> PromptLogProbs:
        """Return the collected values as a message."""
        return PromptLogProbs(
            num_top=self.num_top,
            logprobs=self._logprobs.astype("<f4").tobytes(),
            ranks=self._ranks.astype("<u4").tobytes(),
            top_ids=self._top_ids.astype("<i4").tobytes(),
            top_logprobs=self._top_logprobs.astype("<f4").tobytes(),
        )
