"""Verification by teacher forcing, with a real model; its negative controls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import Model, SamplingRow
from engine.config import read_config
from loadtest.errors import VerificationError
from loadtest.record import RequestRecord, SendOutcome
from loadtest.server import ServerInfo
from loadtest.verify import PacedReference, Verification, choose_sample, judge, load_reference, verify_records
from worker.paced.tokens import Draw, PacedTokens

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
PROMPT = np.arange(40, dtype=np.int32) * 7 % 2048


@pytest.fixture(scope="module", params=[0.0, 0.8], ids=["greedy", "sampled"])
def record(request: pytest.FixtureRequest, generate) -> RequestRecord:
    """A request answered by the model itself."""
    temperature: float = request.param
    body: dict[str, Any] = {"prompt": PROMPT.tolist(), "max_tokens": 12, "temperature": temperature, "seed": 99}
    return RequestRecord(
        index=0,
        due_s=0.0,
        prompt_tokens=len(PROMPT),
        max_tokens=12,
        temperature=temperature,
        seed=99,
        token_ids=generate(body),
        outcome=SendOutcome.COMPLETED,
    )


def verify(model: Model, *records: RequestRecord, tolerance: float = 1e-3) -> Verification:
    return verify_records(model, records, {r.index: PROMPT for r in records}, Verification(tolerance=tolerance))


def test_the_models_own_answer_has_no_wrong_token(model: Model, record: RequestRecord) -> None:
    found = verify(model, record)
    assert (found.verified_requests, found.verified_tokens, found.wrong_tokens, found.near_ties) == (1, 12, 0, 0)
    assert found.sampled_requests == (record.temperature > 0)


@pytest.mark.parametrize("position", [0, 5, 11])
def test_an_altered_token_is_wrong_where_it_stands(model: Model, record: RequestRecord, position: int) -> None:
    ids = list(record.token_ids)
    ids[position] = (ids[position] + 1) % 2048
    found = verify(model, replace(record, token_ids=ids))
    assert found.wrong_tokens >= 1
    assert (found.wrong[0].request, found.wrong[0].position, found.wrong[0].token) == (0, position, ids[position])
    assert found.wrong[0].expected == record.token_ids[position]
    assert found.largest_margin == max(w.margin for w in found.wrong) > 1e-3


def test_an_answer_to_another_prompt_is_wrong(model: Model, record: RequestRecord) -> None:
    other = PROMPT.copy()
    other[:8] += 1
    found = verify_records(model, [record], {0: other}, Verification())
    assert found.wrong_tokens > 0


def test_an_answer_under_another_seed_is_wrong(model: Model, record: RequestRecord) -> None:
    wrong = verify(model, replace(record, seed=100)).wrong_tokens
    assert (wrong > 0) == (record.temperature > 0)


def test_a_token_out_of_the_vocabulary_is_wrong(model: Model, record: RequestRecord) -> None:
    found = verify(model, replace(record, token_ids=[*record.token_ids[:-1], 99_999]))
    assert found.wrong_tokens == 1
    assert found.largest_margin == float("inf")


def test_within_the_tolerance_it_is_a_near_tie(model: Model, record: RequestRecord) -> None:
    logits = model.score(np.concatenate([PROMPT, np.array(record.token_ids[:-1], np.int32)]))[-1]
    row = SamplingRow(record.temperature, 1.0, 0, record.seed, 0, 11)
    second = replace(record, token_ids=[*record.token_ids[:-1], _runner_up(logits, row)])
    margin = verify(model, second).largest_margin
    strict = verify(model, second, tolerance=0.99 * margin)
    loose = verify(model, second, tolerance=1.01 * margin)
    assert (strict.wrong_tokens, strict.near_ties) == (1, 0)
    assert (loose.wrong_tokens, loose.near_ties) == (0, 1)


def _runner_up(logits: Any, row: SamplingRow) -> int:
    best, _ = judge(logits, 0, row)
    return min((i for i in range(len(logits)) if i != best), key=lambda i: judge(logits, i, row)[1])


def test_scores_that_are_no_numbers_are_no_agreement(record: RequestRecord) -> None:
    class Broken:
        fingerprint = ""

        def score(self, token_ids: Any) -> Any:
            return np.full((len(token_ids), 2048), np.nan, np.float32)

    found = verify_records(Broken(), [record], {0: PROMPT}, Verification())
    assert found.wrong_tokens == found.verified_tokens == 12


def test_answers_without_token_ids_cannot_be_verified(model: Model, record: RequestRecord) -> None:
    with pytest.raises(VerificationError, match="return_token_ids"):
        verify(model, replace(record, token_ids=[]))


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(VerificationError, match="cannot be loaded"):
        load_reference(ServerInfo("http://h", "m"), tmp_path / "nowhere", device="cpu", threads=None)


def paced_answer(temperature: float, seed: int) -> list[int]:
    tokens = PacedTokens.of(BUNDLED, read_config(BUNDLED), 5)
    return tokens.answer(PROMPT, Draw(seed, temperature, 0), 12)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("place", [None, 0, 7])
def test_answers_of_a_paced_engine_are_compared_token_by_token(
    record: RequestRecord, temperature: float, place: int | None
) -> None:
    server = ServerInfo("http://h", "m", stand_ins=("paced:instant",))
    reference = load_reference(server, BUNDLED, device="cpu", threads=None)
    assert isinstance(reference, PacedReference)
    answer = paced_answer(temperature, 9)
    if place is not None:
        answer[place] = answer[place] + 1 if answer[place] < 2000 else 3
    answered = replace(record, token_ids=answer, temperature=temperature, seed=9)
    found = verify_records(reference, [answered], {record.index: PROMPT}, Verification())
    assert (found.verified_tokens, found.wrong_tokens) == (12, 0 if place is None else 1)


def test_a_paced_answer_to_another_prompt_or_of_another_seed_is_wrong(record: RequestRecord) -> None:
    reference = PacedReference(BUNDLED)
    answer = paced_answer(0.8, 9)
    for prompt, seed in ((PROMPT[::-1].copy(), 9), (PROMPT, 10)):
        answered = replace(record, token_ids=answer, temperature=0.8, seed=seed)
        found = verify_records(reference, [answered], {record.index: prompt}, Verification())
        assert found.wrong_tokens >= 11


def test_where_a_paced_answer_ends_by_itself_is_the_servers_own_choice(record: RequestRecord) -> None:
    answer = [*paced_answer(0.0, 0)[:6], read_config(BUNDLED).eos_token_ids[0]]
    answered = replace(record, token_ids=answer, temperature=0.0)
    assert verify_records(PacedReference(BUNDLED), [answered], {record.index: PROMPT}, Verification()).wrong_tokens == 0


def test_the_sample_covers_every_kind_and_only_completed_requests() -> None:
    records = [
        RequestRecord(
            index=i,
            due_s=0.0,
            prompt_tokens=40,
            max_tokens=1,
            temperature=0.8 * (i % 50 == 0),
            seed=i,
            cached_tokens=(0, 8, 32)[(i % 40 == 0) + (i % 80 == 0)],
            outcome=SendOutcome.FAILED if i % 7 == 3 else SendOutcome.COMPLETED,
        )
        for i in range(400)
    ]
    sample = choose_sample(records, 30, seed=0)
    assert len(sample) == 30
    assert all(r.outcome is SendOutcome.COMPLETED for r in sample)
    kinds = {(r.cached_tokens, r.temperature) for r in records if r.outcome is SendOutcome.COMPLETED}
    assert {(r.cached_tokens, r.temperature) for r in sample} == kinds
    assert len(kinds) == 6
    assert sample == choose_sample(list(reversed(records)), 30, seed=0)
    assert sample != choose_sample(records, 30, seed=1)
    assert len(choose_sample(records, 10_000, seed=0)) == sum(r.outcome is SendOutcome.COMPLETED for r in records)
