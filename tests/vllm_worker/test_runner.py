"""The order of events around one sequence in vLLM, with a stand-in for AsyncLLM that says when what happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool_proto.v1.common_pb2 import Sampling
from moonpool_proto.v1.worker_pb2 import Submit
from vllm_worker.runner import VllmRunner
from worker.engine_loop import StepResult
from worker.errors import RequestFailed, RequestRefused
from worker.request import EngineSequence, Request


class StandIn:
    """Stand-in for the part of AsyncLLM that VllmRunner uses: `generate` yields the outputs, or raises."""

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs
        self.errored = False
        self.began = asyncio.Event()
        self.was_closed = False

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        self.began.set()
        try:
            for output in self.outputs:
                if isinstance(output, Exception):
                    raise output
                yield output
            await asyncio.Event().wait()
        finally:
            self.was_closed = True


def output(*ids: int, finished: bool = False, is_corrupted: bool = False) -> Any:
    times = SimpleNamespace(is_corrupted=is_corrupted, first_token_ts=2.0, scheduled_ts=1.0)
    answer = SimpleNamespace(token_ids=list(ids), logprobs=None, finish_reason="length" if finished else None)
    return SimpleNamespace(
        outputs=[answer], finished=finished, metrics=times, num_cached_tokens=0, prompt_logprobs=None
    )


def sequence() -> EngineSequence:
    sampling = Sampling(temperature=0.0, top_p=1.0, max_tokens=3)
    submit = Submit(
        request_id="r", prompt_ids=np.array([1, 2], "<i4").tobytes(), chain_seed=bytes(16), sampling=sampling
    )
    request = Request.from_proto(submit, vocab_size=100, max_model_len=64, block_tokens=32)
    return EngineSequence.of(request, [], num_computed=0, prefill_only=False)


def runner_of(stand_in: StandIn) -> tuple[VllmRunner, list[StepResult], asyncio.Event]:
    """A runner, what it reports, and an event that is set when a sequence has left."""
    steps: list[StepResult] = []
    left = asyncio.Event()

    def on_step(step: StepResult) -> None:
        steps.append(step)
        if step.left:
            left.set()

    runner = VllmRunner(stand_in, on_step, lambda *_: None)
    return runner, steps, left


async def test_tokens_arrive_with_their_indexes_and_the_sequence_leaves_with_its_last() -> None:
    runner, steps, left = runner_of(StandIn([output(5), output(6, 7, finished=True)]))
    own = sequence()
    runner.submit(own)
    await left.wait()
    assert [(token.index, token.token) for step in steps for token in step.tokens] == [(0, 5), (1, 6), (2, 7)]
    assert (steps[-1].left, steps[-1].error, own.error, runner.num_sequences) == ([own], None, None, 0)
    assert (own.first_step_at, own.first_token_at, own.compute_s) == (1.0, 2.0, 1.0)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_cancelled_sequence_leaves_even_if_it_had_not_begun(at_once: bool) -> None:
    stand_in = StandIn([])
    runner, steps, left = runner_of(stand_in)
    own = sequence()
    runner.submit(own)
    if not at_once:
        await stand_in.began.wait()
    runner.cancel(own)
    async with asyncio.timeout(10):
        await left.wait()
    assert (steps[-1].left, steps[-1].error, runner.num_sequences) == ([own], None, 0)
    assert stand_in.was_closed is not at_once


@pytest.mark.parametrize(
    ("problem", "error"),
    [
        (ValueError("no such thing"), RequestRefused),
        (RuntimeError("out of luck"), RequestFailed),
        (output(5, is_corrupted=True), RequestFailed),
        (output(5, finished=True), RequestFailed),
    ],
    ids=["refused", "failed", "damaged logits", "ended early"],
)
async def test_a_problem_of_one_sequence_ends_only_that_one(problem: Any, error: type[Exception]) -> None:
    runner, steps, left = runner_of(StandIn([problem]))
    own = sequence()
    runner.submit(own)
    await left.wait()
    assert isinstance(own.error, error)
    assert (steps[-1].left, steps[-1].error, steps[-1].is_end) == ([own], None, False)


async def test_the_end_of_vllms_processes_is_the_engines() -> None:
    stand_in = StandIn([RuntimeError("dead")])
    stand_in.errored = True
    runner, steps, left = runner_of(stand_in)
    runner.submit(sequence())
    await left.wait()
    assert (str(steps[-1].error), steps[-1].is_end) == ("dead", True)
