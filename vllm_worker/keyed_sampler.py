"""Moonpool's sampling inside vLLM: a logits processor that chooses each row's token.

vLLM's own seeded sampling does not survive a resume on another worker. Here a token depends only on the logits, the
preceding ids and (seed, choice, index), as with the native engine (`engine.sampling`): the processor applies minimum
length, bias and penalties (`worker.steering`), draws the token, and leaves only that one possible. vLLM then takes it
as the greedy choice; its own sampling parameters stay neutral, and a grammar's mask has been applied before.

Runs in vLLM's processes, in one per tensor-parallel rank; all ranks choose alike.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from engine import SamplingRow, steer
from engine.sampling import choose
from engine.steered_row import LogitSteering
from moonpool_proto.v1.common_pb2 import Sampling
from rpc.parent_death import die_with
from vllm_worker.engine_args import WORKER_PID
from vllm_worker.requests import EXTRA
from worker.sampling import ValidatedSamplingParams
from worker.steering import Steering


class KeyedSampler(LogitsProcessor):  # type: ignore[misc]  # vllm is not installed where types are checked
    """Chooser of the tokens of all rows whose requests have an entry; other rows are left to vLLM."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._vocab_size = vllm_config.model_config.get_vocab_size()
        self._rows: dict[int, _Row] = {}
        if worker := os.environ.get(WORKER_PID):  # vLLM's processes would outlive a worker that is killed
            die_with(int(worker))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            given = (params.extra_args or {}).get(EXTRA)
            if given is None:
                self._rows.pop(index, None)
            else:
                self._rows[index] = _Row(given, prompt or [], output, self._vocab_size)
        for one, other, direction in batch_update.moved:
            moved, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if direction == MoveDirectionality.SWAP and replaced is not None:
                self._rows[one] = replaced

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        if not self._rows:
            return logits
        places = list(self._rows)
        rows = [self._rows[place] for place in places]
        where = torch.tensor(places, device=logits.device)
        tokens = self._chosen(logits[where], rows)
        for i, row in enumerate(rows):
            if (replayed := row.replayed()) is not None:
                tokens[i] = replayed
        logits.index_fill_(0, where, -torch.inf)
        logits[where, tokens] = 0.0
        return logits

    def _chosen(self, logits: torch.Tensor, rows: list[_Row]) -> torch.Tensor:
        changes = [row.changes() for row in rows]
        steered = steer(logits, changes)
        for i, change in enumerate(changes):
            if change is None or change.barred is None or not rows[i].has_grammar:
                continue
            if not bool(steered[i].isfinite().any()):  # the grammar allows nothing but end tokens
                free = LogitSteering(None, None, change.bias, change.penalties)
                steered[i] = steer(logits[i : i + 1], [free])[0]
        return choose(steered, [row.draw() for row in rows])[0]


class _Row:
    """One request in the batch; `output` is vLLM's own growing list of the ids that this attempt generated."""

    def __init__(self, given: dict[str, Any], prompt: list[int], output: list[int], vocab_size: int) -> None:
        asked = Sampling.FromString(given["sampling"])
        self._sampling = ValidatedSamplingParams.from_proto(asked, vocab_size=vocab_size)
        self._generated: int = given["generated"]
        self._replayed: list[int] = given["replayed"]
        self._output = output
        self._taken = 0
        self.has_grammar = self._sampling.grammar is not None
        self._steering: Steering | None = None
        if Steering.is_wanted(self._sampling):
            self._steering = Steering(
                self._sampling,
                np.asarray(prompt, np.int32),
                self._generated,
                capacity=len(prompt) + asked.max_tokens + 1,
                vocab_size=vocab_size,
                matcher=None,
            )

    @property
    def _index(self) -> int:
        return self._generated + len(self._output)

    def replayed(self) -> int | None:
        """Return the id that must come next; None if it is to be drawn."""
        return self._replayed[len(self._output)] if len(self._output) < len(self._replayed) else None

    def changes(self) -> LogitSteering | None:
        """Return the changes of the next token's logits."""
        if self._steering is None:
            return None
        for token in self._output[self._taken :]:
            self._steering.take(token)
        self._taken = len(self._output)
        return self._steering.row(self._index)

    def draw(self) -> SamplingRow:
        """Return the parameters of the next token's draw."""
        s = self._sampling
        return SamplingRow(s.temperature, s.top_p, s.top_k, s.seed, s.choice, self._index, s.min_p)
