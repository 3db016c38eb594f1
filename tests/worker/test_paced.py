"""The paced engine: tokens and KV follow from the ids alone, steps take the profile's time, wrong KV is found."""

from __future__ import annotations

import queue
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import read_config
from messenger import Messenger, MessengerConfig
from moonpool_proto.v1.worker_pb2 import FINISH_LENGTH, FINISH_STOP, Submit
from settings.keys import assemble
from worker.engine_loop import EngineLoop, StepResult
from worker.errors import ProfileError, RequestFailed, RequestRefused
from worker.paced.engine import PacedSteps, paced_engine
from worker.paced.memory import PacedMemory
from worker.paced.pace import Pace
from worker.paced.profiles import profile_of
from worker.paced.tokens import Draw, PacedTokens, states_after
from worker.policy import BatchLimits, PrefillChunk, SlotPool
from worker.request import EngineSequence, Request

FOLDER = Path(__file__).parents[2] / "moonpool" / "data" / "model"
MODEL = read_config(FOLDER)
ENGINE = paced_engine(FOLDER, MODEL, profile_of("instant"), dtype="float16", kv_bytes=256, answer_tokens=8)
TOKENS = PacedTokens.of(FOLDER, MODEL, 8)
BLOCK = 4


class Worker:
    """An engine loop over one memory."""

    def __init__(self) -> None:
        self.messenger = Messenger(assemble(MessengerConfig, transport="tcp"), node_id="w", incarnation=1)
        self.messenger.start()
        self.memory = ENGINE.new_memory(self.messenger, num_slots=256, block_tokens=BLOCK)
        self.slots = SlotPool(256)
        self.results: queue.Queue[StepResult] = queue.Queue()
        self.layers: list[tuple[int, int, int]] = []
        limits = BatchLimits(max_batch=8, chunk_tokens=8, block_tokens=BLOCK)
        self.loop = EngineLoop(ENGINE.steps(self.memory), limits, self.results.put)
        self.loop.on_layer(self._on_layer)
        self.loop.start()

    def _on_layer(self, layer: int, chunks: list[tuple[EngineSequence, int, int]]) -> None:
        for sequence, _, end in chunks:
            states = sequence.engine_state.states(sequence, end)  # type: ignore[attr-defined]
            whole = self.memory.wrong_blocks(sequence, states, end) == []
            self.layers.append((layer, end, whole))

    def sequence(self, ids: list[int], max_tokens: int, *, computed: int = 0, **options: Any) -> EngineSequence:
        sequence = sequence_of(ids, max_tokens, self.slots, computed=computed, **options)
        if computed:  # as another node's push would have left it
            self.memory.write(sequence, states_after(sequence.tokens), 0, computed, None)
        return sequence

    def run(self, *sequences: EngineSequence) -> list[StepResult]:
        for sequence in sequences:
            self.loop.submit(sequence)
        seen: list[StepResult] = []
        while sum(len(step.left) for step in seen) < len(sequences):
            seen.append(self.results.get(timeout=60))
        return seen

    def close(self) -> None:
        self.loop.close()
        self.memory.close()
        self.messenger.close()


def sequence_of(
    ids: list[int],
    max_tokens: int,
    slots: SlotPool,
    *,
    computed: int = 0,
    generated: int = 0,
    prefill_only: bool = False,
    **sampling: Any,
) -> EngineSequence:
    submit = Submit(request_id="r", prompt_ids=np.array(ids, "<i4").tobytes(), generated=generated)
    submit.chain, submit.chain_seed = bytes(16 * (len(ids) // BLOCK)), bytes(16)
    submit.sampling.MergeFrom(type(submit.sampling)(**({"top_p": 1.0, "max_tokens": max_tokens} | sampling)))
    request = Request.from_proto(submit, vocab_size=MODEL.vocab_size, max_model_len=512, block_tokens=BLOCK)
    taken = slots.allocate(-(-request.peak_tokens // BLOCK))
    return EngineSequence.of(request, taken, num_computed=computed, prefill_only=prefill_only)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def answer_of(sequence: EngineSequence) -> list[int]:
    return [int(token) for token in sequence.tokens[sequence.prompt_len : sequence.num_tokens]]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, MODEL.vocab_size, length).tolist()  # type: ignore[no-any-return]


def test_tokens_are_those_that_the_ids_the_seed_and_the_index_give_however_steps_are_merged(worker: Worker) -> None:
    cases = [(prompt(n, n), {"seed": n, "temperature": 0.7 * (n % 2)}) for n in (3, 9, 30, 17)]
    sequences = [worker.sequence(ids, 12, **sampling) for ids, sampling in cases]
    worker.run(*sequences)
    for sequence, (ids, sampling) in zip(sequences, cases, strict=True):
        expected = TOKENS.answer(np.array(ids, np.int32), Draw(sampling["seed"], sampling["temperature"], 0), 12)
        assert answer_of(sequence) == expected
        assert sequence.finish == FINISH_LENGTH


def test_a_request_that_moves_goes_on_as_it_would_have(worker: Worker) -> None:
    ids = prompt(18)
    whole = worker.sequence(ids, 12, seed=4, temperature=1.0)
    worker.run(whole)
    so_far = answer_of(whole)[:5]
    moved = worker.sequence([*ids, *so_far], 12, generated=5, computed=16, seed=4, temperature=1.0)
    worker.run(moved)
    assert answer_of(moved) == answer_of(whole)[5:]


def test_greedy_answers_do_not_depend_on_the_seed_and_drawn_ones_do(worker: Worker) -> None:
    ids = prompt(9)
    answers = [
        worker.sequence(ids, 8, seed=seed, temperature=t) for t in (0.0, 1.0) for seed in (1, 2)
    ]  # fmt: skip
    worker.run(*answers)
    first, second, third, fourth = (answer_of(s) for s in answers)
    assert first == second
    assert len({tuple(first), tuple(third), tuple(fourth)}) == 3


def test_answers_that_may_stop_end_by_themselves_at_the_same_place_on_any_attempt(worker: Worker) -> None:
    end = MODEL.eos_token_ids[0]
    sequences = [worker.sequence(prompt(6, n), 40, stop_token_ids=[end]) for n in range(6)]
    worker.run(*sequences)
    answers = [answer_of(s) for s in sequences]
    assert {s.finish for s in sequences} <= {FINISH_STOP, FINISH_LENGTH}
    stopped = [i for i, s in enumerate(sequences) if s.finish == FINISH_STOP]
    assert len(stopped) >= 4
    assert len({len(answer) for answer in answers}) > 2
    one = stopped[0]
    again = worker.sequence([*prompt(6, one), *answers[one][:1]], 40, generated=1, stop_token_ids=[end])
    worker.run(again)
    assert answer_of(again) == answers[one][1:]
    assert not any(token == end for answer in answers for token in answer[:-1])


def test_min_tokens_puts_the_end_off(worker: Worker) -> None:
    end = MODEL.eos_token_ids[0]
    sequence = worker.sequence(prompt(6), 60, stop_token_ids=[end], min_tokens=50)
    worker.run(sequence)
    assert len(answer_of(sequence)) > 50


def test_no_token_that_stops_comes_before_min_tokens_though_it_stands_for_text(worker: Worker) -> None:
    stops = prompt(1000, seed=5)
    sequence = worker.sequence(prompt(6), 60, stop_token_ids=stops, min_tokens=50)
    worker.run(sequence)
    answer = answer_of(sequence)
    assert len(answer) > 50
    assert not set(answer[:-1]) & set(stops)
    assert sequence.finish == FINISH_STOP


def test_kv_of_a_chunk_is_all_there_when_its_last_layer_is_reported(worker: Worker) -> None:
    sequence = worker.sequence(prompt(20), 4, prefill_only=True)
    worker.run(sequence)
    last = max(worker.memory.place_of_layer)
    assert [layer for layer, _, _ in worker.layers] == [*range(last + 1)] * 3
    assert [end for layer, end, whole in worker.layers if whole] == [8, 16, 20]
    assert all(layer == last for layer, _, whole in worker.layers if whole)


@pytest.mark.parametrize("at", ["begin", "end"])
def test_kv_that_is_not_that_of_the_ids_fails_its_sequence_alone(worker: Worker, at: str) -> None:
    damaged, beside = worker.sequence(prompt(21), 12, computed=20), worker.sequence(prompt(9), 12)
    offset = int(worker.memory.offsets(0, damaged.slots[2:3])[0])
    if at == "begin":
        worker.memory.region.array[offset] ^= 1
    else:
        real = worker.loop._drop_cancelled

        def later() -> None:
            if damaged.num_computed > 22:
                worker.memory.region.array[offset] = 0xFF
            real()

        worker.loop._drop_cancelled = later  # type: ignore[method-assign]
    worker.run(damaged, beside)
    assert isinstance(damaged.error, RequestFailed)
    assert "blocks [2]" in str(damaged.error)
    assert beside.error is None
    assert ENGINE.counters()["paced_wrong_blocks"] == 1


@given(
    data=st.data(),
    length=st.integers(2, 40),
)
@settings(max_examples=40, deadline=None)
def test_kv_differs_wherever_an_earlier_id_differs(data: st.DataObject, length: int) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 2047), min_size=length, max_size=length)), np.int32)
    place = data.draw(st.integers(0, length - 1))
    other = ids.copy()
    other[place] = (other[place] + data.draw(st.integers(1, 2047))) % 2048
    one, two = states_after(ids), states_after(other)
    assert (one[:place] == two[:place]).all()
    assert (one[place:] != two[place:]).all()
    assert (states_after(ids[place:], int(one[place - 1]) if place else 0) == one[place:]).all()


class Clock:
    """Time that passes when it is slept, and when the test says so."""

    def __init__(self) -> None:
        self.at = 100.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.at

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.at += seconds


def test_steps_take_as_long_as_the_profile_says_and_layers_their_share() -> None:
    clock, profile = Clock(), profile_of("mooncake-70b-8xa800")
    messenger = Messenger(assemble(MessengerConfig, transport="tcp"), node_id="w", incarnation=1)
    messenger.start()
    memory = ENGINE.new_memory(messenger, num_slots=256, block_tokens=BLOCK)
    steps = PacedSteps(memory, profile, TOKENS, Pace(clock.now, clock.sleep))
    sequence = sequence_of(prompt(40), 4, SlotPool(256), prefill_only=True)
    at: list[float] = []
    try:
        for start, end in ((0, 16), (16, 40)):
            steps.run([], [(sequence, PrefillChunk(0, start, end, end == 40))], lambda layer: at.append(clock.at))
            sequence.num_computed = end
    finally:
        memory.close()
        messenger.close()
    whole, first = profile.prefill_s(40), profile.prefill_s(16)
    assert clock.at - 100 == pytest.approx(whole)
    layers = len(memory.place_of_layer)
    assert [t - 100 for t in at[:layers]] == pytest.approx([first * (i + 1) / layers for i in range(layers)])
    assert steps.counters()["paced_late_seconds"] == pytest.approx(0, abs=1e-9)


def test_a_late_step_is_made_up_for_by_the_next_and_what_cannot_be_is_counted() -> None:
    clock = Clock()
    pace = Pace(clock.now, clock.sleep)

    def step(seconds: float, busy: float) -> float:
        began = clock.at
        pace.begin()
        clock.at += busy
        pace.end(seconds)
        return clock.at - began

    assert step(0.01, 0.014) == pytest.approx(0.014)
    assert step(0.01, 0.001) == pytest.approx(0.006)
    assert pace.late_s == pytest.approx(0)
    for _ in range(10):
        step(0.01, 0.02)
    assert pace.late_s == pytest.approx(0.09)
    clock.at += 1  # idle: there is nothing to make up for any more
    assert step(0.01, 0.001) == pytest.approx(0.01)
    assert pace.late_s == pytest.approx(0.1)


def test_probabilities_are_refused_by_name() -> None:
    slots = SlotPool(256)
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestRefused, match="not supported by the paced engine"):
            ENGINE.check(sequence_of(prompt(5), 4, slots, **{name: 1}).request)
    ENGINE.check(sequence_of(prompt(5), 4, slots).request)


def test_engines_that_write_other_kv_or_end_answers_elsewhere_have_other_fingerprints() -> None:
    def made(**other: Any) -> str:
        options = {"dtype": "float16", "kv_bytes": 256, "answer_tokens": 8} | other
        return paced_engine(FOLDER, MODEL, profile_of("instant"), **options).fingerprint  # type: ignore[arg-type]

    assert made() == ENGINE.fingerprint
    slow = paced_engine(
        FOLDER, MODEL, profile_of("mooncake-70b-8xa800"), dtype="float16", kv_bytes=256, answer_tokens=8
    )
    assert slow.fingerprint == ENGINE.fingerprint  # nodes of different speed serve the same
    others = [made(kv_bytes=512), made(answer_tokens=9), made(kv_bytes=0)]
    smaller = replace(MODEL, vocab_size=1024)
    others.append(
        paced_engine(FOLDER, smaller, profile_of("instant"), dtype="float16", kv_bytes=256, answer_tokens=8).fingerprint
    )
    assert len({ENGINE.fingerprint, *others}) == 5


@pytest.mark.parametrize(
    ("name", "told"), [("fast", "instant, mooncake-70b-8xa800"), ("/none/x.json", "cannot be read")]
)
def test_a_profile_that_is_not_there_is_named(name: str, told: str) -> None:
    with pytest.raises(ProfileError, match=told):
        profile_of(name)


def test_a_paced_worker_never_loads_torch() -> None:
    program = (
        "import sys, prefill_node.server, decode_node.server, worker.aggregated, worker.paced.engine\n"
        "assert isinstance(worker.paced.engine.PacedEngine, type)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_parity_finds_blocks_that_differ_in_tokens_that_count() -> None:
    messenger = Messenger(assemble(MessengerConfig, transport="tcp"), node_id="w", incarnation=1)
    messenger.start()
    memory: PacedMemory = ENGINE.new_memory(messenger, num_slots=4, block_tokens=BLOCK)
    try:
        given_, computed = memory.slot_bytes(0, [0, 1, 2]), memory.slot_bytes(0, [0, 1, 2])
        row = memory.spec.token_row_nbytes(0)
        computed[1, row * 3] ^= 1  # its last token
        computed[2, 0] ^= 1
        assert memory.differ(0, given_, computed, np.array([4, 3, 1], np.int32)).tolist() == [False, False, True]
    finally:
        memory.close()
        messenger.close()
