"""Changes to a sequence's logits that depend on earlier tokens: penalties, minimum length, bias and grammar.

Counts and matcher are derived from the prompt's ids alone, of which the last `generated` are the answer so far. A
request that moves to another node therefore continues with the same tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine import Bias, LogitSteering, Penalties
from moonpool_proto.v1.worker_pb2 import FINISH_NONE, Finish
from worker.grammar_matching import GrammarMatcher
from worker.sampling import ValidatedSamplingParams


class SeenTokens:
    """Number of times that each seen id was generated; ids that occur only in the prompt count 0."""

    def __init__(
        self, prompt: NDArray[np.int32], generated: NDArray[np.int32], *, capacity: int, vocab_size: int
    ) -> None:
        """`capacity` is the largest number of distinct ids."""
        self._place = np.full(vocab_size, -1, np.int32)
        self._ids = np.empty(min(capacity, vocab_size), np.int64)
        self._counts = np.zeros(len(self._ids), np.float32)
        distinct = np.unique(np.concatenate([prompt, generated]))
        self._num = len(distinct)
        self._ids[: self._num] = distinct
        self._place[distinct] = np.arange(self._num)
        ids, counts = np.unique(generated, return_counts=True)
        self._counts[self._place[ids]] = counts

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._num]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._num]

    def take(self, token: int) -> None:
        """Count one generated token."""
        if self._place[token] < 0:
            self._place[token] = self._num
            self._ids[self._num] = token
            self._num += 1
        self._counts[self._place[token]] += 1


class Steering:
    """Logit changes of one sequence. Used on the engine thread while the sequence is in the loop."""

    def __init__(
        self,
        sampling: ValidatedSamplingParams,
        prompt: NDArray[np.int32],
        generated: int,
        *,
        capacity: int,
        vocab_size: int,
        matcher: GrammarMatcher | None,
    ) -> None:
        """The last `generated` of the ids in `prompt` were generated before; the matcher has been advanced by them."""
        self._sampling = sampling
        self._matcher = matcher
        self._bias = Bias(sampling.bias_ids, sampling.bias_values) if len(sampling.bias_ids) else None
        ends = sampling.stop_ids | (matcher.end_ids if matcher is not None else frozenset())
        self._barred = np.array(sorted(i for i in ends if i < vocab_size), np.int64)  # excluded before `min_tokens`
        self._seen: SeenTokens | None = None
        if sampling.has_penalties:
            split = len(prompt) - generated
            # Only the repetition penalty applies to the client's own prompt.
            own = prompt[:split] if sampling.repetition_penalty != 1 else prompt[:0]
            self._seen = SeenTokens(own, prompt[split:], capacity=capacity, vocab_size=vocab_size)

    @staticmethod
    def is_wanted(sampling: ValidatedSamplingParams) -> bool:
        """Return True if any of the parameters changes the logits."""
        return bool(
            sampling.has_penalties or len(sampling.bias_ids) or sampling.min_tokens or sampling.grammar is not None
        )

    @property
    def asked_at(self) -> float:
        """When the grammar's mask for the next token was requested (time.monotonic())."""
        return self._matcher.asked_at if self._matcher is not None else 0.0

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Return True if `row` does not have to wait for the grammar, after waiting at most `wait_s` seconds."""
        return self._matcher is None or self._matcher.is_ready(wait_s)

    def row(self, index: int) -> LogitSteering | None:
        """Return the changes for the token at this index; None if there are none. Raises GrammarError."""
        allowed = self._matcher.allowed() if self._matcher is not None else None
        barred = self._barred if index < self._sampling.min_tokens and len(self._barred) else None
        if allowed is not None and barred is not None and np.count_nonzero(allowed) == allowed[barred].sum():
            barred = None  # the grammar allows end tokens only
        penalties = None
        if self._seen is not None:
            sampling = self._sampling
            penalties = Penalties(
                self._seen.ids,
                self._seen.counts,
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        if allowed is None and barred is None and self._bias is None and penalties is None:
            return None
        return LogitSteering(allowed, barred, self._bias, penalties)

    def take(self, token: int) -> None:
        """Record the next token. Raises GrammarError."""
        if self._seen is not None:
            self._seen.take(token)
        if self._matcher is not None:
            self._matcher.take(token)

    @property
    def finish(self) -> Finish.ValueType:
        """Finish reason set by the grammar's end; FINISH_NONE before."""
        return self._matcher.finish if self._matcher is not None else FINISH_NONE
