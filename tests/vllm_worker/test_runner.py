"""The order of events around one sequence in vLLM, with a stand-in for AsyncLLM that says when what happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moonpool_proto.v1.common_pb2 import Grammar, Sampling
from moonpool_proto.v1.worker_pb2 import Submit
from vllm_worker.kv_jobs import KvJob
from vllm_worker.requests import kv_job, prompt_of
from vllm_worker.runner import VllmRunner
from vllm_worker.step_work import STEPS
from worker.engine_loop import StepResult
from worker.errors import RequestFailed, RequestRefused
from worker.request import EngineSequence, Request


class StandIn:
    """Stand-in for the part of AsyncLLM that VllmRunner uses: a request's queue has the outputs, or raises.

    `ended` is called as a rank's report would be, once the request has ended or was aborted.
    """

    request_id = "internal"

    def __init__(self, outputs: list[Any]) -> None:
        self.outputs = outputs
        self.errored = False
        self.dead_error = RuntimeError("dead")
        self.began = asyncio.Event()
        self.asked: Any = None
        self.was_aborted = False
        self.error_of_copies = ""
        self.reports_end = True
        self.ended: Callable[[int, str], None]

    async def add_request(self, name: str, prompt: Any, params: Any) -> StandIn:
        self.asked = params
        await asyncio.sleep(0)
        if self.outputs and isinstance(self.outputs[0], ValueError):
            raise self.outputs[0]
        self.began.set()
        return self

    def get_nowait(self) -> Any:
        return None

    async def get(self) -> Any:
        if not self.outputs:
            await asyncio.Event().wait()
        output = self.outputs.pop(0)
        if isinstance(output, Exception):
            raise output
        return output

    async def abort(self, request_id: str, internal: bool) -> None:
        assert (request_id, internal) == (self.request_id, True)
        self.was_aborted = True
        if self.reports_end:
            self.ended(0, self.error_of_copies)


def output(*ids: int, finished: bool = False, is_corrupted: bool = False) -> Any:
    times = SimpleNamespace(is_corrupted=is_corrupted, first_token_ts=2.0, scheduled_ts=1.0)
    answer = SimpleNamespace(token_ids=list(ids), logprobs=None, finish_reason="length" if finished else None)
    return SimpleNamespace(
        outputs=[answer], finished=finished, metrics=times, num_cached_tokens=0, prompt_logprobs=None
    )


def sequence(*, prefill_only: bool = False) -> EngineSequence:
    sampling = Sampling(temperature=0.0, top_p=1.0, max_tokens=3)
    submit = Submit(
        request_id="r", prompt_ids=np.array([1, 2], "<i4").tobytes(), chain_seed=bytes(16), sampling=sampling
    )
    request = Request.from_proto(submit, vocab_size=100, max_model_len=64, block_tokens=32)
    return EngineSequence.of(request, [3], num_computed=0, prefill_only=prefill_only)


def runner_of(stand_in: StandIn) -> tuple[VllmRunner, list[StepResult], asyncio.Event]:
    """A runner, what it reports, and an event that is set when a sequence has left."""
    steps: list[StepResult] = []
    left = asyncio.Event()

    def on_step(step: StepResult) -> None:
        steps.append(step)
        if step.left:
            left.set()

    runner = VllmRunner(on_step, lambda *_: None)
    runner._llm = stand_in
    stand_in.ended = runner.copies_ended
    return runner, steps, left


async def test_tokens_arrive_with_their_indexes_and_the_sequence_leaves_with_its_last() -> None:
    runner, steps, left = runner_of(StandIn([output(5), output(6, 7, finished=True)]))
    own = sequence()
    runner.submit(own)
    await left.wait()
    assert [(token.index, token.token) for step in steps for token in step.tokens] == [(0, 5), (1, 6), (2, 7)]
    assert (steps[-1].left, steps[-1].error, own.error, runner.num_sequences) == ([own], None, None, 0)
    assert (own.first_step_at, own.first_token_at) == (1.0, 2.0)


async def test_a_prompt_takes_its_share_of_the_steps_that_computed_it_and_only_pure_decode_steps_are_reported() -> None:
    decoded: list[tuple[int, int, float]] = []
    runner = VllmRunner(lambda _: None, lambda *step: decoded.append(step))
    runner._llm = StandIn([])
    own, other = sequence(), sequence()
    runner.submit(own)
    runner.submit(other)
    steps = [[2.0, [[0, 30], [1, 10]], 0, 0], [1.0, [[0, 10], [9, 10]], 4, 900], [0.5, [], 6, 1200]]
    statistics = SimpleNamespace(kv_cache_usage=0.25, kv_connector_stats={STEPS: steps})
    runner._record(statistics, None)
    runner._record(SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=None), SimpleNamespace(num_preempted_reqs=2))
    assert (own.compute_s, own.computed_tokens, own.is_beside_decodes) == (2.0, 40, True)
    assert (other.compute_s, other.computed_tokens, other.is_beside_decodes) == (0.5, 10, False)
    assert decoded == [(6, 1200, 0.5)]
    assert (runner.usage, runner.preemptions) == (0.5, 2)


async def test_an_engine_that_reports_no_step_while_it_has_a_sequence_stands_still() -> None:
    stand_in = StandIn([])
    runner, _, left = runner_of(stand_in)
    assert runner.step_in_progress == 0
    own = sequence()
    runner.submit(own)
    await stand_in.began.wait()
    seen = runner.step_in_progress
    assert seen == runner.step_in_progress != 0
    runner._record(None, None)
    assert runner.step_in_progress not in (0, seen)
    runner.cancel(own)
    await left.wait()
    assert runner.step_in_progress == 0


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
    # A request that vLLM may have is ended there, even if its sequence was cancelled while it was being passed on.
    assert stand_in.was_aborted is not at_once or stand_in.asked is None


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


async def test_a_sequence_leaves_only_when_its_slots_are_no_longer_used() -> None:
    stand_in = StandIn([output(5), output(6, 7, finished=True)])
    stand_in.reports_end = False
    runner, steps, left = runner_of(stand_in)
    runner.submit(sequence())
    while len(steps) < 2:
        await asyncio.sleep(0)
    runner.copies_ended(7, "")  # another sequence's
    for _ in range(100):
        await asyncio.sleep(0)
    assert not left.is_set()
    runner.copies_ended(0, "")
    async with asyncio.timeout(10):
        await left.wait()


@pytest.mark.parametrize("prefill_only", [True, False])
async def test_kv_that_could_not_be_copied_is_neither_handed_over_nor_saved(prefill_only: bool) -> None:
    stand_in = StandIn([output(5, finished=prefill_only), output(6, 7, finished=True)])
    stand_in.error_of_copies = "out of luck"
    runner, _, left = runner_of(stand_in)
    own = sequence(prefill_only=prefill_only)
    runner.submit(own)
    await left.wait()
    if prefill_only:
        assert isinstance(own.error, RequestFailed)
        assert "out of luck" in str(own.error)
    else:
        assert (own.error, own.kept_tokens, own.num_computed) == (None, 0, 4)


async def test_layers_are_passed_on_with_their_sequences() -> None:
    stand_in = StandIn([])
    runner, _, left = runner_of(stand_in)
    layers: list[Any] = []
    runner.on_layer(lambda layer, chunks: layers.append((layer, chunks)))
    own = sequence(prefill_only=True)
    runner.submit(own)
    await stand_in.began.wait()
    runner.layer_saved(1, [(0, 0, 2), (9, 0, 5)])  # 9 has left
    runner.layer_saved(2, [(9, 0, 5)])
    assert layers == [(1, [(own, 0, 2)])]
    job = KvJob.of(stand_in.asked.extra_args["kv_transfer_params"])
    assert job == KvJob(number=0, slots=(3,), load_tokens=0, save_from=0, saves_layers=True)
    runner.cancel(own)
    await left.wait()


@pytest.mark.parametrize("has_grammar", [False, True])
def test_a_token_is_left_to_compute_when_an_answer_goes_on_after_its_kv_was_loaded(has_grammar: bool) -> None:
    grammar = Grammar(kind=Grammar.KIND_REGEX, source="a*") if has_grammar else None
    sampling = Sampling(temperature=0.0, top_p=1.0, max_tokens=9, grammar=grammar)
    ids = np.arange(1, 41, dtype="<i4")  # 38 of the prompt, two of the answer
    submit = Submit(request_id="r", prompt_ids=ids.tobytes(), chain=bytes(16), chain_seed=bytes(16), generated=2)
    submit.sampling.CopyFrom(sampling)
    request = Request.from_proto(submit, vocab_size=100, max_model_len=64, block_tokens=32)
    for num_computed in (0, 37, 38, 39):
        own = EngineSequence.of(request, [3, 4], num_computed=num_computed, prefill_only=False)
        own.steering = None
        job = kv_job(own, 0)
        assert job.load_tokens == min(num_computed, len(prompt_of(own)) - 1)
        assert job.save_from == num_computed
