"""Decode steps that are queued before the last tokens have been read give the same tokens, and waste little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import FlatBatch, Model, PagedCache, SamplingRow, load_model
from engine.sampling import QueuedChoice
from moonpool_proto.v1.worker_pb2 import FINISH_LENGTH, FINISH_STOP, Submit
from worker import decode_ahead
from worker.policy import PrefillChunk
from worker.request import EngineSequence, Request
from worker.transformer import ModelSteps

BLOCK = 8


class Run:
    """Steps over a cache of their own, and what the model has been asked to run."""

    def __init__(self, model: Model, *, ahead: bool) -> None:
        self.model: Any = copy(model)
        self.steps = ModelSteps(self.model, PagedCache(model.kv_groups, (96,), BLOCK), ahead=ahead)
        self.free = list(range(96))
        self.batches: list[FlatBatch] = []
        self._real = model.run
        self.model.run = self._run

    def _run(self, batch: FlatBatch, *arguments: Any) -> torch.Tensor:
        self.batches.append(batch)
        if batch.device_ids is not None:  # the ids on the host are stale
            batch = replace(batch, token_ids=np.full_like(batch.token_ids, -1))
        return self._real(batch, *arguments)

    def sequence(self, length: int, max_tokens: int = 60, **sampling: Any) -> EngineSequence:
        prompt = np.random.default_rng(length).integers(0, 256, length)
        submit = Submit(request_id=str(length), prompt_ids=prompt.astype("<i4").tobytes())
        submit.chain, submit.chain_seed = bytes(16 * (length // BLOCK)), bytes(16)
        submit.sampling.max_tokens, submit.sampling.top_p = max_tokens, 1.0
        for name, value in sampling.items():
            if isinstance(value, dict):
                getattr(submit.sampling, name).update(value)
            else:
                setattr(submit.sampling, name, value)
        request = Request.from_proto(submit, vocab_size=256, max_model_len=512, block_tokens=BLOCK)
        slots = [self.free.pop() for _ in range(-(-(length + max_tokens) // BLOCK))]
        return EngineSequence.of(request, slots, num_computed=0, prefill_only=False)

    def step(self, decoding: list[EngineSequence], prompts: tuple[EngineSequence, ...] = ()) -> None:
        """Run one step as the engine's thread does."""
        chunks = [(s, PrefillChunk(i, 0, s.prompt_len, last=True)) for i, s in enumerate(prompts)]
        chosen = self.steps.run(decoding, chunks, None)
        for sequence in decoding:
            sequence.num_computed += 1
        for sequence in prompts:
            sequence.num_computed = sequence.prompt_len
        for sequence, token in zip([*decoding, *prompts], chosen, strict=True):
            if token is not None:
                sequence.append(token.token)

    @property
    def queued(self) -> int:
        """Number of steps that were queued ahead."""
        return sum(batch.device_ids is not None for batch in self.batches)


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.7, "top_p": 0.8, "seed": 6},
    {"temperature": 1.2, "top_k": 12, "seed": 7},
)


@pytest.fixture(params=["compiled", "torch"])
def runs(model_path: Path, request: pytest.FixtureRequest) -> Callable[[bool], Run]:
    model = load_model(model_path, backend=request.param, threads=1)
    return lambda ahead: Run(model, ahead=ahead)


def talk(run: Run) -> list[EngineSequence]:
    """Let sequences with every kind of sampling come and go."""
    first = [run.sequence(9 + n, **SAMPLINGS[n]) for n in range(4)]
    run.step([], tuple(first))
    for _ in range(12):
        run.step(first)
    late = run.sequence(33, temperature=0.9, seed=8)
    run.step(first, (late,))  # a prompt joins
    for _ in range(7):
        run.step([*first, late])
    for _ in range(6):
        run.step([*first[1:], late])  # one has left
    for _ in range(3):
        run.step([late, *first[1:]])  # in another order
    for _ in range(3):
        run.step(first[2:])
        run.step([*first[:2], late])  # in turns
    return [*first, late]


def test_the_tokens_are_those_of_steps_in_turn(runs: Callable[[bool], Run]) -> None:
    ahead, in_turn = runs(True), runs(False)
    ours = [s.tokens[: s.num_tokens].tolist() for s in talk(ahead)]
    assert ours == [s.tokens[: s.num_tokens].tolist() for s in talk(in_turn)]
    assert in_turn.queued == 0
    assert ahead.queued >= 20


def test_what_follows_from_an_id_that_was_not_certain_is_computed_again(
    runs: Callable[[bool], Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = decode_ahead.queue_choice

    def unsure_of_the_first(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> QueuedChoice:
        found = real(logits, rows)
        ids, certain = found.ids.clone(), torch.ones(len(rows), dtype=torch.bool)
        ids[0], certain[0] = (ids[0] + 1) % 256, False
        return QueuedChoice.of(ids, found.scores, certain, logits, rows)

    monkeypatch.setattr(decode_ahead, "queue_choice", unsure_of_the_first)
    ahead, in_turn = runs(True), runs(False)
    ours = [s.tokens[: s.num_tokens].tolist() for s in talk(ahead)]
    assert ours == [s.tokens[: s.num_tokens].tolist() for s in talk(in_turn)]
    assert ahead.queued >= 8


def test_no_row_that_is_still_wanted_is_computed_twice(runs: Callable[[bool], Run]) -> None:
    run = runs(True)
    first, second = run.sequence(9), run.sequence(12)
    run.step([], (first, second))
    for _ in range(8):
        run.step([first, second])
    assert run.queued == 7  # in the first step, the sequences are not known to go on
    computed = len(run.batches)
    run.step([second])  # the token of the step that had been queued for both
    assert len(run.batches) == computed
    third = run.sequence(14)
    run.step([second], (third,))
    assert [len(batch.sizes) for batch in run.batches[computed:]] == [2]


def test_a_queued_row_is_used_beside_a_new_prompt(runs: Callable[[bool], Run]) -> None:
    run = runs(True)
    first, second = run.sequence(9), run.sequence(12)
    run.step([], (first,))
    for _ in range(4):
        run.step([first])
    computed = len(run.batches)
    run.step([first], (second,))
    assert [batch.sizes.tolist() for batch in run.batches[computed:]] == [[12]]


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 2}, {"repetition_penalty": 1.2}, {"logit_bias": {5: 1.0}}],
    ids=lambda one: next(iter(one)),
)
def test_what_needs_the_host_between_two_tokens_is_not_queued(
    runs: Callable[[bool], Run], sampling: dict[str, Any]
) -> None:
    run = runs(True)
    first, plain = run.sequence(9, **sampling), run.sequence(12)
    run.step([], (first, plain))
    for _ in range(4):
        run.step([first, plain])
    assert run.queued == 0
    for _ in range(4):
        run.step([plain])
    assert run.queued == 3


def test_an_answer_is_not_computed_beyond_its_length(runs: Callable[[bool], Run]) -> None:
    run = runs(True)
    first = run.sequence(9, 12)
    run.step([], (first,))
    while not first.finish:
        run.step([first])
    assert first.finish == FINISH_LENGTH
    assert sum(len(batch.sizes) for batch in run.batches) == 12


def test_damaged_logits_fail_their_own_sequence(runs: Callable[[bool], Run]) -> None:
    run = runs(True)
    first, second = run.sequence(9), run.sequence(12)
    run.step([], (first, second))
    for _ in range(3):
        run.step([first, second])
    real = run.model.run

    def damaged(batch: FlatBatch, *arguments: Any) -> torch.Tensor:
        logits = real(batch, *arguments)
        logits[0] = torch.nan
        return logits

    run.model.run = damaged
    run.step([first, second])  # its tokens had been chosen before; the step that is queued now is damaged
    assert first.error is None
    chosen = run.steps.run([first, second], [], None)
    assert chosen[0] is None
    assert chosen[1] is not None
    assert "NaN" in str(first.error)
    assert second.error is None


def test_a_step_that_cannot_be_queued_fails_only_later(runs: Callable[[bool], Run]) -> None:
    run = runs(True)
    first = run.sequence(9)
    run.step([], (first,))
    for _ in range(3):
        run.step([first])
    real, failing = run.model.run, True

    def without_memory(batch: FlatBatch, *arguments: Any) -> torch.Tensor:
        if failing and batch.device_ids is not None:
            raise MemoryError("planted")
        return real(batch, *arguments)

    run.model.run = without_memory
    for _ in range(3):
        run.step([first])
    failing = False
    for _ in range(3):
        run.step([first])
    want = runs(False)
    other = want.sequence(9)
    want.step([], (other,))
    for _ in range(9):
        want.step([other])
    assert first.tokens[: first.num_tokens].tolist() == other.tokens[: other.num_tokens].tolist()
    assert first.finish != FINISH_STOP
