"""The engine's thread: continuous batching with merged steps says what the model says."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import FlatBatch, ForwardBatch, Model, PagedCache
from moonpool_proto.v1.worker_pb2 import FINISH_LENGTH, FINISH_STOP, Submit
from worker import engine_loop
from worker.engine_loop import EngineLoop, LayerHook, StepResult
from worker.errors import LoadLost, OutOfMemory
from worker.layer_gate import LayerGate
from worker.policy import BatchLimits, SlotPool, StepWatch
from worker.policy.scheduling_order import QueueEntry
from worker.request import EngineSequence, Request
from worker.transformer import ModelSteps

BLOCK = 8


class Harness:
    """An engine loop over a cache of its own, driven from the test's thread."""

    def __init__(
        self,
        model: Model,
        hook: LayerHook | None = None,
        *,
        allows_long_steps: bool = False,
        starts: bool = True,
        step_s: float = 0.0,
        ahead: bool = False,
    ) -> None:
        self.model = model
        self.steps: queue.Queue[StepResult] = queue.Queue()
        self.slots = SlotPool(64)
        cache = PagedCache(model.kv_groups, (64,) * len(model.kv_groups), block_tokens=BLOCK)
        limits = BatchLimits(max_batch=8, chunk_tokens=24, block_tokens=BLOCK, step_s=step_s)
        steps = ModelSteps(model, cache, ahead=ahead)
        self.loop = EngineLoop(steps, limits, self.steps.put, allows_long_steps=allows_long_steps)
        if hook is not None:
            self.loop.on_layer(hook)
        if starts:
            self.loop.start()

    def sequence(self, prompt: list[int], max_tokens: int, **options: object) -> EngineSequence:
        submit = Submit(request_id=str(prompt[:3]), prompt_ids=np.array(prompt, dtype="<i4").tobytes())
        submit.chain, submit.chain_seed = bytes(16 * (len(prompt) // BLOCK)), bytes(16)
        submit.sampling.max_tokens = max_tokens
        submit.sampling.top_p = 1.0
        submit.sampling.stop_token_ids.extend(options.get("stop", ()))  # type: ignore[arg-type]
        request = Request.from_proto(submit, vocab_size=256, max_model_len=512, block_tokens=BLOCK)
        slots = self.slots.allocate(-(-(len(prompt) + max_tokens) // BLOCK))
        return EngineSequence.of(request, slots, num_computed=0, prefill_only=bool(options.get("prefill_only")))

    def run(self, count: int) -> list[StepResult]:
        """Steps until `count` sequences have left."""
        seen: list[StepResult] = []
        while sum(len(step.left) for step in seen) < count:
            seen.append(self.steps.get(timeout=60))
        return seen


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def harness(model: Model, request: pytest.FixtureRequest) -> Iterator[Callable[..., Harness]]:
    """Loops whose decode steps are queued one step ahead, or not."""
    made: list[Harness] = []

    def make(hook: LayerHook | None = None, **options: Any) -> Harness:
        made.append(Harness(model, hook, ahead=request.param, **options))
        return made[-1]

    yield make
    for one in made:
        one.loop.close()


def greedy(model: Model, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model.score(np.array(ids, dtype=np.int32))[-1].argmax()))
    return ids[len(prompt) :]


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, n).tolist() for n in (5, 30, 61, 8)]


def test_merged_steps_give_the_tokens_of_the_dense_reference(model: Model, harness: Callable[..., Harness]) -> None:
    run = harness()
    sequences = [run.sequence(p, 12) for p in prompts()]
    for sequence in sequences:
        run.loop.submit(sequence)
    steps = run.run(len(sequences))
    assert any(step.decode_batch and step.prefill_tokens for step in steps)
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        assert sequence.tokens[sequence.prompt_len :].tolist() == greedy(model, prompt, 12)
        assert sequence.finish == FINISH_LENGTH


def test_steps_of_the_same_sequences_are_made_from_the_last_one(
    model: Model, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    new: list[int] = []
    real = model.flatten
    monkeypatch.setattr(model, "flatten", lambda batch, cache: (new.append(len(batch.chunks)), real(batch, cache))[1])
    run = harness()
    first, second = run.sequence(prompts()[0], 60), run.sequence(prompts()[1], 30)
    run.loop.submit(first)
    while not run.steps.get(timeout=60).decode_batch:
        pass
    run.loop.submit(second)
    run.run(2)
    assert first.tokens[first.prompt_len :].tolist() == greedy(model, prompts()[0], 60)
    assert second.tokens[second.prompt_len :].tolist() == greedy(model, prompts()[1], 30)
    # Both prompts, the first step after each, and the one after the second sequence has ended.
    assert len(new) <= 8


def test_slots_that_come_while_a_step_is_prepared_are_used(
    model: Model, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness()
    sequence = run.sequence(prompts()[0], 40)
    later = sequence.slots[1:]
    sequence.slots, sequence.table = sequence.slots[:1], sequence.table[:1]
    real = model.flatten

    def flatten(batch: ForwardBatch, cache: PagedCache) -> FlatBatch:
        plan = real(batch, cache)
        if later:
            run.loop.extend(sequence, [later.pop(0)])
        return plan

    monkeypatch.setattr(model, "flatten", flatten)
    run.loop.submit(sequence)
    steps = run.run(1)
    assert all(step.error is None for step in steps)
    assert sequence.tokens[sequence.prompt_len :].tolist() == greedy(model, prompts()[0], 40)


def test_tokens_are_reported_once_each_in_order(harness: Callable[..., Harness]) -> None:
    run = harness()
    sequence = run.sequence(prompts()[0], 7)
    run.loop.submit(sequence)
    generated = [one for step in run.run(1) for one in step.tokens]
    reported = [(one.index, one.token) for one in generated]
    assert reported == list(enumerate(sequence.tokens[sequence.prompt_len :].tolist()))
    assert [one.finish for one in generated] == [0] * 6 + [FINISH_LENGTH]


def test_where_not_all_fit_in_a_step_the_most_urgent_class_is_in_each_and_the_others_take_turns(
    harness: Callable[..., Harness],
) -> None:
    run = harness()
    levels = {f"{i}": 2 for i in range(12)} | {"urgent": 1}
    sequences = dict[str, EngineSequence]()
    for i, (name, level) in enumerate(levels.items()):
        before = run.sequence([i, *prompts()[0]], 17, prefill_only=True)
        run.loop.submit(before)
        run.run(1)
        sequences[name] = EngineSequence.of(
            before.request, before.slots, num_computed=before.prompt_len, prefill_only=False
        )
        assert sequences[name].try_append(int(before.tokens[before.prompt_len]))
        sequences[name].queue_entry = QueueEntry(level=level, ages_s=time.monotonic() + 1000)

    def begin() -> None:
        for sequence in sequences.values():
            run.loop.submit(sequence)

    run.loop.between_steps(begin).result()
    names = {id(sequence): name for name, sequence in sequences.items()}
    seen = [{names[id(token.sequence)] for token in step.tokens} for step in run.run(len(sequences))]
    assert all("urgent" in step for step in seen[:16])
    shares = [sum(name in step for step in seen[:16]) for name in levels if name != "urgent"]
    assert max(shares) - min(shares) <= 1


def test_a_stop_token_ends_the_sequence(model: Model, harness: Callable[..., Harness]) -> None:
    expected = greedy(model, prompts()[1], 6)
    run = harness()
    sequence = run.sequence(prompts()[1], 20, stop=[expected[3]])
    run.loop.submit(sequence)
    run.run(1)
    assert sequence.finish == FINISH_STOP
    first = expected.index(expected[3])
    assert sequence.num_tokens - sequence.prompt_len == first + 1


def test_a_prefill_only_sequence_leaves_with_its_first_token(harness: Callable[..., Harness]) -> None:
    run = harness()
    sequence = run.sequence(prompts()[2], 9, prefill_only=True)
    run.loop.submit(sequence)
    assert sum(len(step.tokens) for step in run.run(1)) == 1
    assert sequence.num_computed == sequence.prompt_len
    assert run.loop.num_sequences == 0


def test_a_cancelled_sequence_leaves_and_the_others_go_on(model: Model, harness: Callable[..., Harness]) -> None:
    run = harness()
    doomed, kept = run.sequence(prompts()[1], 200), run.sequence(prompts()[0], 30)
    run.loop.submit(doomed)
    run.loop.submit(kept)
    run.steps.get(timeout=60)
    run.loop.cancel(doomed)
    run.run(2)
    assert doomed.finish == 0
    assert kept.tokens[kept.prompt_len :].tolist() == greedy(model, prompts()[0], 30)


def test_a_prompt_knows_whether_others_decoded_in_its_steps(harness: Callable[..., Harness]) -> None:
    run = harness()
    first, second = run.sequence(prompts()[0], 400), run.sequence(prompts()[1], 2)
    run.loop.submit(first)
    while not run.steps.get(timeout=60).decode_batch:  # it decodes now, and for long
        pass
    run.loop.submit(second)
    run.run(2)
    assert (first.is_beside_decodes, second.is_beside_decodes) == (False, True)


def test_layers_are_announced_in_order_and_cover_the_prompt(model: Model, harness: Callable[..., Harness]) -> None:
    seen: list[tuple[int, int, int]] = []
    run = harness(lambda layer, spans: seen.extend((layer, start, end) for _, start, end in spans))
    run.loop.submit(run.sequence(prompts()[2], 2, prefill_only=True))
    run.run(1)
    chunks = [(0, 24), (24, 48), (48, 61)]
    assert seen == [(layer, *chunk) for chunk in chunks for layer in range(model.config.num_layers)]


def test_layers_of_a_prompt_that_is_decoded_here_are_nobody_elses(harness: Callable[..., Harness]) -> None:
    seen: list[str] = []
    run = harness(lambda layer, spans: seen.extend(s.request.request_id for s, _, _ in spans))
    here, elsewhere = run.sequence(prompts()[2], 2), run.sequence(prompts()[1], 2, prefill_only=True)
    for sequence in (here, elsewhere):
        run.loop.submit(sequence)
    run.run(2)
    assert set(seen) == {elsewhere.request.request_id}


def test_a_failing_step_reports_its_victims_and_the_loop_goes_on(harness: Callable[..., Harness]) -> None:
    broken = {"now": True}

    def hook(layer: int, spans: object) -> None:
        if broken["now"]:
            raise RuntimeError("planted")

    run = harness(hook)
    victim = run.sequence(prompts()[0], 3, prefill_only=True)
    run.loop.submit(victim)
    step = run.steps.get(timeout=60)
    assert step.left == [victim]
    assert "planted" in str(step.error)
    broken["now"] = False
    survivor = run.sequence(prompts()[1], 3)
    run.loop.submit(survivor)
    run.run(1)
    assert survivor.finish == FINISH_LENGTH


@pytest.mark.parametrize("leaves", ["cancelled", "ended"])
def test_a_device_that_never_ends_is_a_step_in_progress_while_a_sequence_leaves(
    leaves: str, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness(starts=False)
    settling, may_end = threading.Event(), threading.Event()

    def stands_still(_: ModelSteps) -> None:
        settling.set()
        may_end.wait()

    monkeypatch.setattr(ModelSteps, "settle", stands_still)
    run.loop.start()
    sequence = run.sequence(prompts()[0], 100 if leaves == "cancelled" else 1)
    run.loop.submit(sequence)
    if leaves == "cancelled":
        run.loop.cancel(sequence)
    try:
        assert settling.wait(60)
        watch = StepWatch()
        assert any(watch.look(run.loop.step_in_progress) for _ in range(2 * StepWatch.LOOKS))
    finally:
        may_end.set()


@pytest.mark.parametrize("most", [1, 3, 9, 20])
def test_a_step_that_needs_too_much_memory_is_computed_in_parts(
    most: int, model: Model, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may have at most so many tokens, but for single chunks of a block."""
    real = model.run
    sizes: list[int] = []

    def run_if_small(plan: FlatBatch, *arguments: object) -> torch.Tensor:
        tokens = len(plan.token_ids)
        if tokens > most and (tokens > BLOCK or len(plan.sizes) > 1):
            raise torch.OutOfMemoryError("planted") if len(sizes) % 2 else MemoryError("planted")
        sizes.append(tokens)
        return real(plan, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "run", run_if_small)
    run = harness()
    sequences = [run.sequence(p, 12) for p in prompts()]
    for sequence in sequences:
        run.loop.submit(sequence)
    steps = run.run(len(sequences))
    assert all(step.error is None for step in steps)
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        assert sequence.tokens[sequence.prompt_len :].tolist() == greedy(model, prompt, 12)
    divided = [bool(step.divisions) for step in steps]
    assert any(divided)
    assert sum(divided) <= 8, "later steps are smaller"


def test_only_the_sequence_that_needs_too_much_memory_by_itself_fails(
    model: Model, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = model.run

    def run_if_short(plan: FlatBatch, *arguments: object) -> torch.Tensor:
        if plan.max_context > 64:
            raise MemoryError("planted")
        return real(plan, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "run", run_if_short)
    run = harness()
    sequences = [run.sequence(p, 12) for p in prompts()]
    for sequence in sequences:
        run.loop.submit(sequence)
    run.run(len(sequences))
    for sequence, prompt in zip(sequences, prompts(), strict=True):
        if len(prompt) + 11 > 64:
            assert isinstance(sequence.error, OutOfMemory)
            assert "not enough memory for a step of 1 tokens: planted" in str(sequence.error)
        else:
            assert sequence.error is None
            assert sequence.tokens[sequence.prompt_len :].tolist() == greedy(model, prompt, 12)


@pytest.mark.parametrize("harness", [False], indirect=True, ids=["in turn"])
def test_prompts_beside_an_answer_are_computed_in_steps_that_keep_a_bound(
    model: Model, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by 1 ms per token; of 24 tokens that a chunk may have, the bound allows 16."""
    now_s = [0.0]
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    real = model.run

    def run(plan: FlatBatch, *arguments: object) -> torch.Tensor:
        now_s[0] += 1e-3 * len(plan.token_ids)
        return real(plan, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "run", run)
    loop = harness(step_s=0.0175)
    answer, prompt = loop.sequence(prompts()[0], 400), loop.sequence(prompts()[2], 2)
    loop.loop.submit(answer)
    while not loop.steps.get(timeout=60).decode_batch:
        pass
    loop.loop.submit(prompt)
    steps = loop.run(2)
    beside = [step.prefill_tokens for step in steps if step.prefill_tokens and step.decode_batch]
    assert beside == [16, 16, 16, 13]
    assert max(step.seconds for step in steps) <= 0.0175
    assert prompt.tokens[prompt.prompt_len :].tolist() == greedy(model, prompts()[2], 2)


def test_a_sequence_cancelled_as_soon_as_it_is_submitted_leaves_at_once(harness: Callable[..., Harness]) -> None:
    run = harness()
    running, doomed = run.sequence(prompts()[0], 100), run.sequence(prompts()[1], 100)
    real, done = run.loop._drop_cancelled, []

    def just_before() -> None:
        if not done:  # the thread has taken its commands for this step, and not these
            done.append(True)
            run.loop.submit(doomed)
            run.loop.cancel(doomed)
        real()

    run.loop._drop_cancelled = just_before  # type: ignore[method-assign]
    run.loop.submit(running)
    assert run.run(1)[-1].left == [doomed]
    assert doomed.num_tokens == doomed.prompt_len
    run.run(1)


def test_the_thread_outlives_a_sequence_that_has_no_room(harness: Callable[..., Harness]) -> None:
    run = harness()
    broken = run.sequence(prompts()[0], 3)
    broken.tokens = broken.tokens[: broken.prompt_len]
    run.loop.submit(broken)
    step = run.steps.get(timeout=60)
    assert (step.left, step.tokens) == ([broken], [])
    assert "IndexError" in str(broken.error)
    survivor = run.sequence(prompts()[1], 3)
    run.loop.submit(survivor)
    run.run(1)
    assert survivor.finish == FINISH_LENGTH


def test_a_thread_that_ended_keeps_no_sequence_waiting(harness: Callable[..., Harness]) -> None:
    run = harness()
    real, held = run.loop._drop_cancelled, run.sequence(prompts()[0], 100)

    def broken() -> None:
        real()
        if held.num_tokens > held.prompt_len:
            raise RuntimeError("outside of any step")

    run.loop._drop_cancelled = broken  # type: ignore[method-assign]
    run.loop.submit(held)
    last = run.run(1)[-1]
    assert (last.is_end, last.left, str(last.error)) == (True, [held], "outside of any step")
    late = run.sequence(prompts()[1], 3)
    run.loop.submit(late)
    assert run.run(1)[-1].left == [late]


def test_more_sequences_than_rows_take_turns(harness: Callable[..., Harness]) -> None:
    run = harness(starts=False)
    sequences = [run.sequence([i, i + 1, i + 2], 9) for i in range(12)]
    for sequence in sequences:  # handed over by a prefill node
        sequence.num_computed = sequence.prompt_len
        sequence.append(0)
        run.loop.submit(sequence)
    run.loop.start()  # from here on, all of them want a step
    steps = run.run(len(sequences))
    done = dict.fromkeys(map(id, sequences), 0)
    for step in steps:
        for one in step.tokens:
            done[id(one.sequence)] += 1
        assert max(done.values()) - min(done.values()) <= 2
    assert set(done.values()) == {8}


def test_an_urgent_prompt_overtakes_a_long_one_between_its_chunks(
    model: Model, harness: Callable[..., Harness]
) -> None:
    chunks: list[tuple[int, int]] = []
    begun, go_on = threading.Event(), threading.Event()

    def hook(layer: int, spans: list[tuple[EngineSequence, int, int]]) -> None:
        if layer == 0:
            chunks.extend((sequence.prompt_len, end - start) for sequence, start, end in spans)
            begun.set()
            assert go_on.wait(60)

    h = harness(hook)
    long, short = prompts()[2], prompts()[0]
    patient, urgent = (h.sequence(prompt, 3, prefill_only=True) for prompt in (long, short))
    patient.queue_entry, urgent.queue_entry = QueueEntry(ages_s=math.inf, level=1), QueueEntry(ages_s=math.inf, level=0)
    h.loop.submit(patient)
    assert begun.wait(60)
    h.loop.submit(urgent)
    go_on.set()
    seen = h.run(2)
    assert [length for length, _ in chunks[:3]] == [61, 5, 61]
    assert sum(size for length, size in chunks if length == 61) == 61  # nothing was computed twice
    answers = {s.prompt_len: s.tokens[s.prompt_len : s.num_tokens].tolist() for step in seen for s in step.left}
    assert answers == {61: greedy(model, long, 1), 5: greedy(model, short, 1)}


def gate_of(num_layers: int, num_blocks: int, run: Harness) -> LayerGate:
    gate = LayerGate(
        num_layers, num_blocks, held_blocks=0, stall_s=60.0, lost=LoadLost, changed=lambda: run.loop.wake()
    )
    gate.require(num_blocks)
    return gate


def arriving(run: Harness, num_layers: int) -> tuple[EngineSequence, LayerGate]:
    """A prompt whose first two blocks are on their way."""
    sequence = run.sequence(prompts()[2], 3, prefill_only=True)
    sequence.num_computed = sequence.reused_tokens = 2 * BLOCK
    sequence.loading = gate = gate_of(num_layers, 2, run)
    return sequence, gate


def begun(model: Model, harness: Callable[..., Harness]) -> tuple[Harness, EngineSequence]:
    """A prompt whose step has computed its first layer and waits for the second."""
    computed = threading.Event()
    run = harness(lambda *_: computed.set())
    sequence, gate = arriving(run, model.config.num_layers)
    gate.mark([0], np.arange(2))
    run.loop.submit(sequence)
    assert computed.wait(60)
    return run, sequence


def test_a_prompt_whose_kv_arrives_begins_with_its_first_layer(model: Model, harness: Callable[..., Harness]) -> None:
    seen: queue.Queue[int] = queue.Queue()
    run = harness(lambda layer, _: seen.put(layer))
    layers = model.config.num_layers
    sequence, gate = arriving(run, layers)
    run.loop.submit(sequence)
    for layer in range(layers):
        assert seen.empty()
        gate.mark([layer], np.arange(2))
        assert seen.get(timeout=60) == layer
    assert run.run(1)[-1].left == [sequence]
    assert sequence.error is None


@pytest.mark.parametrize(("prefill_only", "blocks", "together"), [(True, 4, 29), (True, 2, 24), (False, 4, 24)])
def test_as_many_tokens_as_are_reused_are_computed_while_they_arrive_where_nothing_decodes(
    model: Model, harness: Callable[..., Harness], prefill_only: bool, blocks: int, together: int
) -> None:
    """Tokens of later steps would be computed after the last layer has arrived, but a new prompt waits for the step."""
    layers, prompt = model.config.num_layers, prompts()[2]
    computed = threading.Event()
    run = harness(lambda *_: computed.set(), allows_long_steps=True)
    held = run.sequence(prompt, 1, prefill_only=True)
    run.loop.submit(held)
    run.run(1)
    computed.clear()
    sequence = run.sequence(prompt, 2, prefill_only=prefill_only)
    sequence.table[:blocks] = held.table[:blocks]  # their KV "arrives"
    sequence.num_computed = sequence.reused_tokens = blocks * BLOCK
    sequence.loading = gate = gate_of(layers, blocks, run)
    gate.mark([0], np.arange(blocks))
    run.loop.submit(sequence)
    assert not prefill_only or computed.wait(60)
    gate.mark(range(1, layers), np.arange(blocks))
    assert run.run(1)[0].prefill_tokens == together
    assert sequence.tokens[len(prompt) : len(prompt) + 1].tolist() == greedy(model, prompt, 1)


def test_decoding_sequences_take_every_step_while_a_prompts_kv_arrives(
    model: Model, harness: Callable[..., Harness]
) -> None:
    seen: list[int] = []
    run = harness(lambda layer, _: seen.append(layer))
    decoding = run.sequence(prompts()[0], 400)
    sequence, gate = arriving(run, model.config.num_layers)
    gate.mark([0], np.arange(2))
    run.loop.submit(decoding)
    run.loop.submit(sequence)
    while len([one for one in (run.steps.get(timeout=60)).tokens if one.index == 20]) == 0:
        pass
    assert seen == []  # it has not begun, though its first layer is there
    gate.mark(range(1, model.config.num_layers), np.arange(2))
    left = [one for step in run.run(2) for one in step.left]
    assert set(left) == {decoding, sequence}
    assert sequence.waited_s == 0
    assert decoding.tokens[decoding.prompt_len :].tolist() == greedy(model, prompts()[0], 400)


def test_a_step_that_waits_gives_up_when_a_sequence_could_decode(model: Model, harness: Callable[..., Harness]) -> None:
    run, sequence = begun(model, harness)
    joined = run.sequence(prompts()[3], 5)
    joined.append(7)
    joined.num_computed = joined.prompt_len
    run.loop.submit(joined)
    steps = run.run(2)
    assert steps[0].left == [sequence]
    assert isinstance(sequence.error, LoadLost)
    assert joined.finish == FINISH_LENGTH


def test_a_prompt_whose_kv_is_lost_leaves_without_a_step(model: Model, harness: Callable[..., Harness]) -> None:
    run = harness()
    sequence, gate = arriving(run, model.config.num_layers)
    run.loop.submit(sequence)
    gate.lose("block 1 failed verification")
    (step,) = run.run(1)
    assert (step.left, step.prefill_tokens) == ([sequence], 0)
    assert isinstance(sequence.error, LoadLost)


def test_a_cancelled_prompt_does_not_wait_for_its_kv(model: Model, harness: Callable[..., Harness]) -> None:
    run, sequence = begun(model, harness)
    run.loop.cancel(sequence)
    assert run.run(1)[-1].left == [sequence]


def test_a_step_waits_for_long_unless_another_prompt_could_be_computed(
    model: Model, harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "_LONGEST_WAIT_S", 0.05)
    run, sequence = begun(model, harness)
    with pytest.raises(queue.Empty):
        run.steps.get(timeout=0.3)
    second, second_gate = arriving(run, model.config.num_layers)  # its KV is on its way, too
    second_gate.mark([0], np.arange(2))
    run.loop.submit(second)
    with pytest.raises(queue.Empty):
        run.steps.get(timeout=0.3)
    ready = run.sequence(prompts()[3], 1, prefill_only=True)
    run.loop.submit(ready)
    assert run.steps.get(timeout=60).left == [sequence]
    assert isinstance(sequence.error, LoadLost)
    assert run.run(1)[-1].left == [ready]
    run.loop.cancel(second)
    run.run(1)
