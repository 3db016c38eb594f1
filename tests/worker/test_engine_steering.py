"""Controlled requests in the engine's thread: tokens of a plain reference, wherever an attempt goes on from."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine import Model, PagedCache, SamplingError, SamplingRow, load_model, noisy_scores
from engine.random_model import RandomModelSpec, write_random_model
from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.worker_pb2 import FINISH_LENGTH, FINISH_STOP, Submit
from worker.engine_loop import EngineLoop, GeneratedToken, StepResult
from worker.errors import GrammarError, RequestFailed, RequestRefused
from worker.grammar_matching import GrammarCompiler, GrammarMatcher
from worker.policy import BatchLimits, SlotPool
from worker.request import EngineSequence, Request
from worker.transformer import ModelSteps

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
VOCAB, BLOCK, END = 2048, 8, 1
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^[abc]{10}$"}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=json.dumps(SCHEMA))
PROMPT = np.random.default_rng(5).integers(5, VOCAB, 45).astype(np.int32)
SAMPLED = {"temperature": 0.8, "seed": 77}
CONTROLS: dict[str, dict[str, Any]] = {
    "min_p": {**SAMPLED, "min_p": 0.2, "choice": 3},
    "repetition": {"repetition_penalty": 3.0, "logit_bias": {17: 30.0, 18: 29.0, 1375: 28.0}},
    "more repetition": {**SAMPLED, "repetition_penalty": 0.5},
    "frequency": {"frequency_penalty": 2.0, "logit_bias": {17: 30.0, 18: 29.0, 400: -100.0}},
    "presence": {**SAMPLED, "top_k": 3, "presence_penalty": 2.0, "logit_bias": {17: 9.0, 18: 9.0}},
    "min_tokens": {**SAMPLED, "logit_bias": {END: 60.0}, "min_tokens": 7, "stop_token_ids": [END]},
    "grammar": {"temperature": 2.0, "seed": 5, "grammar": GRAMMAR, "stop_token_ids": [END], "frequency_penalty": 2.0},
    "grammar, greedy": {"grammar": GRAMMAR},  # the client ignores the end token: it ends all the same
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return write_random_model(
        path, RandomModelSpec(vocab=VOCAB, max_len=512, scale=3.0, seed=3, eos=END), tokenizer=BUNDLED
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder, threads=1)


class Worker:
    """An engine loop and what prepares sequences for it."""

    def __init__(self, folder: Path, model: Model) -> None:
        self.grammars = GrammarCompiler(folder, VOCAB, (END,))
        self.steps: queue.Queue[StepResult] = queue.Queue()
        self.slots = SlotPool(256)
        self.cache = PagedCache(model.kv_groups, (256,) * len(model.kv_groups), block_tokens=BLOCK)
        self.loop = EngineLoop(ModelSteps(model, self.cache), BatchLimits(8, 24, BLOCK), self.steps.put)
        self.loop.start()

    def sequence(self, ids: NDArray[np.int32], generated: int = 0, **sampling: Any) -> EngineSequence:
        """A request whose last `generated` ids are an earlier attempt's."""
        submit = Submit(request_id="r", prompt_ids=ids.astype("<i4").tobytes(), generated=generated)
        submit.chain, submit.chain_seed = bytes(16 * (len(ids) // BLOCK)), bytes(16)
        submit.sampling.MergeFrom(type(submit.sampling)(**({"top_p": 1.0, "max_tokens": 24} | sampling)))
        request = Request.from_proto(submit, vocab_size=VOCAB, max_model_len=512, block_tokens=BLOCK)
        matcher = asyncio.run(self.grammars.matcher(request.sampling.grammar, request.generated_ids))
        slots = self.slots.allocate(-(-request.peak_tokens // BLOCK))
        return EngineSequence.of(request, slots, num_computed=0, prefill_only=False, matcher=matcher)

    def run(self, *sequences: EngineSequence) -> list[StepResult]:
        for sequence in sequences:
            self.loop.submit(sequence)
        seen: list[StepResult] = []
        while sum(len(step.left) for step in seen) < len(sequences):
            seen.append(self.steps.get(timeout=60))
        for sequence in sequences:
            self.slots.release(sequence.slots)
        return seen


@pytest.fixture
def worker(folder: Path, model: Model) -> Iterator[Worker]:
    one = Worker(folder, model)
    yield one
    one.loop.close()
    one.grammars.close()


def answer(sequence: EngineSequence) -> list[int]:
    ids: list[int] = sequence.tokens[sequence.prompt_len : sequence.num_tokens].tolist()
    return ids


def by_reference(model: Model, allowed_after: Any, **sampling: Any) -> list[int]:
    """One process, dense logits, plain loops; `allowed_after(ids)` is the grammar's mask."""
    out: list[int] = []
    stops = set(sampling.get("stop_token_ids", ()))
    row = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 0, "choice": 0, "min_p": 0.0}
    row |= {name: value for name, value in sampling.items() if name in row}
    while len(out) < 24:
        seen = [*PROMPT.tolist(), *out]
        logits = model.score(np.array(seen, np.int32))[-1].copy()
        if "grammar" in sampling:
            logits[~allowed_after(out)] = -np.inf
        if len(out) < sampling.get("min_tokens", 0):
            logits[list(stops)] = -np.inf
        for i, bias in sampling.get("logit_bias", {}).items():
            logits[i] += np.float32(bias)
        for i in set(seen):
            penalty = np.float32(sampling.get("repetition_penalty", 1.0))
            logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
        for i in set(out):
            logits[i] -= np.float32(sampling.get("frequency_penalty", 0.0)) * np.float32(out.count(i))
            logits[i] -= np.float32(sampling.get("presence_penalty", 0.0))
        out.append(int(noisy_scores(logits, SamplingRow(**row, index=len(out))).argmax()))
        if out[-1] in stops or ("grammar" in sampling and out[-1] == END):
            break
    return out


@pytest.mark.parametrize("name", CONTROLS)
def test_tokens_are_those_of_the_reference_and_go_on_from_any_of_them(worker: Worker, model: Model, name: str) -> None:
    """The answers that go on from each token in turn run in one batch."""
    controls = CONTROLS[name]

    def allowed_after(ids: list[int]) -> Any:
        matcher = asyncio.run(worker.grammars.matcher(GRAMMAR, np.array(ids, np.int32)))
        assert matcher is not None
        return matcher.allowed()

    expected = by_reference(model, allowed_after, **controls)
    assert len(expected) > 5
    whole = worker.sequence(PROMPT, **controls)
    worker.run(whole)
    assert answer(whole) == expected
    parts = [
        worker.sequence(np.concatenate([PROMPT, np.array(expected[:split], np.int32)]), split, **controls)
        for split in range(1, len(expected))
    ]
    worker.run(*parts)
    assert [answer(part) for part in parts] == [expected[split:] for split in range(1, len(expected))]
    if "grammar" in controls:
        assert whole.finish == FINISH_STOP


@pytest.mark.parametrize("name", CONTROLS)
def test_each_control_changes_the_answer(worker: Worker, name: str) -> None:
    """Or the test above would prove nothing."""
    controls = CONTROLS[name]
    whole = worker.sequence(PROMPT, **controls)
    lacking = {
        left_out: worker.sequence(PROMPT, **{key: value for key, value in controls.items() if key != left_out})
        for left_out in controls
        if left_out != "stop_token_ids"
    }
    worker.run(whole, *lacking.values())
    assert [left_out for left_out, sequence in lacking.items() if answer(sequence) == answer(whole)] == []


def test_log_probabilities_are_of_the_model_before_controls(worker: Worker, model: Model) -> None:
    controlled = worker.sequence(PROMPT, logprobs=5, **CONTROLS["presence"])
    other = worker.sequence(PROMPT[:30], logprobs=0)
    silent = worker.sequence(PROMPT[:20])
    told: dict[int, list[GeneratedToken]] = {id(s): [] for s in (controlled, other, silent)}
    for step in worker.run(controlled, other, silent):
        for generated in step.tokens:
            told[id(generated.sequence)].append(generated)
    assert all(generated.logprobs is None for generated in told[id(silent)])
    for sequence, num_top in ((controlled, 5), (other, 0)):
        ids = sequence.tokens[: sequence.num_tokens]
        expected = torch.log_softmax(torch.from_numpy(model.score(ids)), dim=1).numpy()[sequence.prompt_len - 1 :]
        for generated, row in zip(told[id(sequence)], expected, strict=False):
            assert generated.logprobs is not None
            order = np.argsort(-row, kind="stable")
            assert generated.logprobs.logprob == pytest.approx(row[generated.token], abs=1e-3)
            assert order[generated.logprobs.rank - 1] == generated.token
            assert generated.logprobs.top_ids == order[:num_top].tolist()
            np.testing.assert_allclose(generated.logprobs.top_logprobs, row[order[:num_top]], atol=1e-3)


def test_prompts_are_scored_chunk_by_chunk(worker: Worker, model: Model) -> None:
    """Beside rows that decode, other chunks and a prompt of one token."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in (100, 61, 1)]
    decoding = worker.sequence(PROMPT[:5], max_tokens=40)
    scored = [
        worker.sequence(prompt, prompt_logprobs=num_top, max_tokens=3)
        for prompt, num_top in zip(prompts, (4, 0, 2), strict=True)
    ]
    plain = worker.sequence(prompts[1], max_tokens=3)
    steps = worker.run(decoding, scored[0], plain, scored[1], scored[2])
    assert any(step.decode_batch and step.prefill_tokens for step in steps)
    assert answer(plain) == answer(scored[1])
    for sequence, prompt, num_top in zip(scored, prompts, (4, 0, 2), strict=True):
        assert sequence.prompt_scores is not None
        proto = sequence.prompt_scores.to_proto()
        n = len(prompt) - 1
        expected = torch.log_softmax(torch.from_numpy(model.score(prompt)), dim=1).numpy()[:n]
        order = np.argsort(-expected, axis=1, kind="stable")
        assert proto.num_top == num_top
        own = np.frombuffer(proto.logprobs, "<f4")
        np.testing.assert_allclose(own, expected[np.arange(n), prompt[1:]], atol=1e-3)
        ranks = np.frombuffer(proto.ranks, "<u4")
        found = expected[np.arange(n), order[np.arange(n), ranks - 1]]  # what stands at that rank, near-ties aside
        np.testing.assert_allclose(found, expected[np.arange(n), prompt[1:]], atol=1e-3)
        assert np.array_equal(np.frombuffer(proto.top_ids, "<i4").reshape(n, num_top), order[:, :num_top])
        top = np.frombuffer(proto.top_logprobs, "<f4").reshape(n, num_top)
        np.testing.assert_allclose(top, np.take_along_axis(expected, order[:, :num_top], axis=1), atol=1e-3)


class Broken(GrammarMatcher):
    """Fails at its third token, in the one or the other call."""

    def __init__(self, inner: GrammarMatcher, call: str, error: Exception) -> None:
        super().__init__(inner._sock, inner._vocabulary, inner._lost)
        self._allowed = inner._allowed
        self._call, self._planted, self._num = call, error, 0

    def allowed(self) -> Any:
        if self._call == "allowed" and self._num == 2:
            raise self._planted
        return super().allowed()

    def take(self, token: int) -> None:
        self._num += 1
        if self._call == "take" and self._num == 3:
            raise self._planted
        super().take(token)


@pytest.mark.parametrize("call", ["allowed", "take"])
@pytest.mark.parametrize(
    ("planted", "kind", "code"),
    [(GrammarError("too complex"), RequestRefused, "grammar"), (ValueError("planted"), RequestFailed, "engine")],
)
def test_a_sequence_whose_grammar_fails_leaves_alone(
    worker: Worker, call: str, planted: Exception, kind: type[RequestFailed], code: str
) -> None:
    broken, beside = worker.sequence(PROMPT, **CONTROLS["grammar"]), worker.sequence(PROMPT[:20])
    assert broken.steering is not None
    inner = broken.steering._matcher
    assert inner is not None
    broken.steering._matcher = Broken(inner, call, planted)
    steps = worker.run(broken, beside)
    assert all(step.error is None for step in steps)
    assert isinstance(broken.error, kind)
    assert broken.error.code == code
    assert str(planted) in str(broken.error)
    assert [g.index for step in steps for g in step.tokens if g.sequence is broken] == [0, 1]
    assert (beside.finish, beside.error) == (FINISH_LENGTH, None)


def with_damaged_kv(worker: Worker, **sampling: Any) -> EngineSequence:
    """Its first two blocks are said to be computed, and hold no numbers."""
    sequence = worker.sequence(PROMPT, **sampling)
    sequence.num_computed = 2 * BLOCK
    for view in worker.cache.views:
        view[sequence.slots[:2]] = torch.nan
    return sequence


@pytest.mark.parametrize("sampling", [{}, {"logprobs": 3}, {"temperature": 1.0, "repetition_penalty": 2.0}])
def test_a_sequence_whose_logits_are_no_numbers_leaves_alone(worker: Worker, sampling: dict[str, Any]) -> None:
    alone = worker.sequence(PROMPT[:20], logprobs=2)
    worker.run(alone)
    damaged, beside = with_damaged_kv(worker, **sampling), worker.sequence(PROMPT[:20], logprobs=2)
    steps = worker.run(beside, damaged)
    assert [step.error for step in steps if step.error is not None] == []
    assert isinstance(damaged.error, RequestFailed)
    assert (damaged.error.code, "NaN" in str(damaged.error)) == ("engine", True)
    assert answer(damaged) == []
    assert (answer(beside), beside.finish) == (answer(alone), FINISH_LENGTH)


def test_a_step_none_of_whose_logits_are_numbers_has_failed(worker: Worker) -> None:
    """Its weights may be damaged: such an engine must come to be called broken."""
    (step,) = worker.run(with_damaged_kv(worker, max_tokens=2))[-1:]
    assert isinstance(step.error, SamplingError)


def test_a_grammars_end_is_no_end_before_the_least_number_of_tokens(worker: Worker) -> None:
    """Though the client ignores the end token. A grammar that admits nothing else ends all the same."""
    endless, short = (Grammar(kind=Grammar.KIND_REGEX, source=source) for source in ("[ab]*", "a"))
    asked = {"logit_bias": {END: 100.0}, "min_tokens": 7}
    held, cut = worker.sequence(PROMPT, grammar=endless, **asked), worker.sequence(PROMPT, grammar=short, **asked)
    worker.run(held, cut)
    assert (answer(held).index(END), held.finish) == (7, FINISH_STOP)
    assert (answer(cut).index(END), cut.finish) == (1, FINISH_STOP)


def test_a_mask_that_comes_while_the_engine_goes_to_sleep_does_not_leave_it_asleep(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[float, int] = {}
    is_ready = GrammarMatcher.is_ready

    def late(matcher: GrammarMatcher, wait_s: float = 0.0) -> bool:
        """Answer that the mask is missing three times, which is until the engine has found nothing to do."""
        asked[matcher.asked_at] = asked.get(matcher.asked_at, 0) + 1
        return asked[matcher.asked_at] > 3 and is_ready(matcher, 60.0)

    monkeypatch.setattr(GrammarMatcher, "is_ready", late)
    sequence = worker.sequence(PROMPT, grammar=GRAMMAR, stop_token_ids=[END])
    worker.run(sequence)
    assert sequence.finish == FINISH_STOP
    assert max(asked.values()) > 3
