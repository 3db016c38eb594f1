"""Controlled requests over both nodes: answers of one engine, handed over and placed anew at any token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import Model, load_model
from engine.random_model import RandomModelSpec, write_random_model
from moonpool_proto.v1.common_pb2 import Grammar
from moonpool_proto.v1.worker_pb2 import FINISH_STOP, Submit
from tools.attacks.bombs import late_bomb, schema_bomb
from worker.fair_queue import MAX_RUNNING
from worker.request import EngineSequence, Request

BUNDLED = Path(__file__).parents[2] / "moonpool" / "data" / "model"
VOCAB, BLOCK, END = 2048, 8, 1
PROMPT = np.random.default_rng(5).integers(5, VOCAB, 45).tolist()
SCHEMA = {"type": "array", "items": {"enum": ["a", "bb", 12]}, "minItems": 2, "maxItems": 4}
GRAMMAR = Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=json.dumps(SCHEMA))
CONTROLS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.8, "seed": 3, "choice": 2, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.5, "frequency_penalty": 1.0, "min_p": 0.01},
    "bias": {"logit_bias": {END: 50.0, 17: 30.0, 18: 30.0}, "presence_penalty": 2.0, "min_tokens": 5},
    "grammar": {"temperature": 2.0, "seed": 3, "grammar": GRAMMAR, "frequency_penalty": 2.0},
}

Start = Callable[..., Awaitable[Any]]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer, for grammars."""
    path = tmp_path_factory.mktemp("model")
    return write_random_model(
        path, RandomModelSpec(vocab=VOCAB, max_len=512, scale=3.0, seed=3, eos=END), tokenizer=BUNDLED
    )


@pytest.fixture(scope="module")
def model(model_path: Path) -> Model:
    return load_model(model_path, threads=1)


def controlled(pair: Any, name: str, ids: list[int], generated: int = 0, **sampling: Any) -> Submit:
    submit: Submit = pair.submit(ids, name, max_tokens=16, generated=generated)
    submit.sampling.MergeFrom(type(submit.sampling)(stop_token_ids=[END], **sampling))
    return submit


async def in_one_engine(pair: Any, submit: Submit) -> list[int]:
    """The prefill node's engine takes it from prompt to end."""
    node = pair.prefill.node
    submit.frontend_id = "nobody"
    request = Request.from_proto(submit, vocab_size=VOCAB, max_model_len=512, block_tokens=BLOCK)
    slots, *_ = await node.slots.take(request.key, (), -(-request.peak_tokens // BLOCK))
    matcher = await node.matcher(request)
    sequence = EngineSequence.of(request, slots, num_computed=0, prefill_only=False, matcher=matcher)
    await node.run_in_engine(sequence)
    node.slots.give(slots)
    answer: list[int] = sequence.tokens[sequence.prompt_len : sequence.num_tokens].tolist()
    return answer


@pytest.mark.parametrize("name", CONTROLS)
async def test_a_request_goes_on_as_it_would_have_from_any_token(start_pair: Start, name: str) -> None:
    """By a hand-off after the first token of an attempt, and by a new placement after each."""
    pair, controls = await start_pair(), CONTROLS[name]
    expected = await in_one_engine(pair, controlled(pair, "one", PROMPT, **controls))
    assert len(expected) > 5
    requests = []
    for split in range(len(expected)):
        submit = controlled(pair, f"r{split}", PROMPT + expected[:split], split, **controls)
        requests.append(await pair.frontend.submit(submit))
    for split, request in enumerate(requests):
        await request.ended.wait()
        assert request.failures == []
        assert [request.tokens[i] for i in range(split, len(expected))] == expected[split:]
    if name == "grammar":
        assert request.messages[len(expected) - 1].finish == FINISH_STOP
    await pair.at_rest()


async def test_choices_of_one_seed_differ(start_pair: Start) -> None:
    pair = await start_pair()
    answers = []
    for choice in range(3):
        request = await pair.frontend.submit(
            controlled(pair, f"c{choice}", PROMPT, temperature=1.0, seed=9, choice=choice)
        )
        await request.ended.wait()
        answers.append(tuple(request.token_ids))
    assert len(set(answers)) == 3
    await pair.at_rest()


async def test_log_probabilities_come_from_both_nodes(start_pair: Start, model: Model) -> None:
    pair = await start_pair()
    controls = CONTROLS["penalties"] | {"logprobs": 3}
    request = await pair.frontend.submit(controlled(pair, "r", PROMPT, **controls))
    await request.ended.wait()
    ids = np.array(PROMPT + request.token_ids, np.int32)
    expected = torch.log_softmax(torch.from_numpy(model.score(ids)), dim=1).numpy()[len(PROMPT) - 1 :]
    for index, token in request.messages.items():
        assert token.logprobs.logprob == pytest.approx(expected[index][token.token_id], abs=1e-3)
        assert token.logprobs.top_ids == np.argsort(-expected[index], kind="stable")[:3].tolist()
        assert not token.HasField("prompt_logprobs")
    await pair.at_rest()


async def test_a_scored_prompt_reuses_nothing_and_can_be_reused(start_pair: Start, model: Model) -> None:
    pair = await start_pair(pool=True)

    def moved() -> list[float]:
        found = [face.node.counters.snapshot() for face in (pair.prefill, pair.decode)]
        return [counters.get(name, 0) for counters in found for name in ("kv_load_bytes", "kv_pull_bytes")]

    async def run(submit: Submit) -> Any:
        request = await pair.frontend.submit(submit)
        await request.ended.wait()
        assert request.failures == []
        await pair.at_rest()
        return request

    plain = await run(controlled(pair, "plain", PROMPT))
    before = moved()
    scored = await run(controlled(pair, "scored", PROMPT, prompt_logprobs=2))
    assert (scored.cached_tokens, moved()) == (0, before)
    assert scored.token_ids == plain.token_ids
    proto = scored.messages[0].prompt_logprobs
    n = len(PROMPT) - 1
    expected = torch.log_softmax(torch.from_numpy(model.score(np.array(PROMPT, np.int32))), dim=1).numpy()[:n]
    np.testing.assert_allclose(np.frombuffer(proto.logprobs, "<f4"), expected[np.arange(n), PROMPT[1:]], atol=1e-3)
    top_ids = np.argsort(-expected, axis=1, kind="stable")[:, :2]
    assert np.array_equal(np.frombuffer(proto.top_ids, "<i4").reshape(n, 2), top_ids)
    assert not any(token.HasField("prompt_logprobs") for index, token in scored.messages.items() if index)
    # An attempt that goes on from there has told them already.
    ids = PROMPT + scored.token_ids[:3]
    later = await run(controlled(pair, "later", ids, 3, prompt_logprobs=2))
    assert (later.cached_tokens, later.messages[3].HasField("prompt_logprobs")) == (40, False)


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        (Grammar(kind=Grammar.KIND_JSON_SCHEMA, source='{"type":"obj"}'), "Invalid type"),
        (Grammar(kind=Grammar.KIND_LARK, source='start: <|nobody|> "a"'), "special token"),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_refused_for_good(
    start_pair: Start, grammar: Grammar, told: str
) -> None:
    pair = await start_pair()
    request = await pair.frontend.submit(controlled(pair, "r", PROMPT, grammar=grammar))
    await request.ended.wait()
    failure = request.failures[0]
    assert (failure.code, failure.retryable) == ("bad_grammar", False)
    assert told in failure.message
    assert len(request.failures) == 1
    await pair.at_rest()


async def test_a_row_out_of_range_is_refused_before_it_meets_others(start_pair: Start) -> None:
    pair = await start_pair()
    fine = await pair.frontend.submit(controlled(pair, "fine", PROMPT, **CONTROLS["penalties"]))
    bad = await pair.frontend.submit(controlled(pair, "bad", PROMPT, logit_bias={VOCAB + 1: 1.0}))
    await bad.ended.wait()
    assert (bad.failures[0].code, bad.failures[0].retryable) == ("bad_sampling", False)
    await fine.ended.wait()
    assert fine.failures == []
    await pair.at_rest()


async def test_a_grammar_that_explodes_at_a_token_ends_only_its_own_request(start_pair: Start) -> None:
    pair = await start_pair()
    bomb = Grammar(kind=Grammar.KIND_LARK, source=late_bomb(60, 0))
    beside = [
        await pair.frontend.submit(controlled(pair, f"b{name}", PROMPT, **CONTROLS[name]))
        for name in ("grammar", "bias")
    ]
    request = await pair.frontend.submit(controlled(pair, "bomb", PROMPT, grammar=bomb))
    await request.ended.wait()
    failure = request.failures[-1]
    assert (failure.code, failure.retryable) == ("bad_grammar", False), failure
    assert "CPU time" in failure.message
    for each in beside:
        await each.ended.wait()
        assert each.failures == []
    again = await pair.frontend.submit(controlled(pair, "again", PROMPT, grammar=bomb))
    await again.ended.wait()
    assert (again.failures[-1].code, "without another attempt" in again.failures[-1].message) == ("bad_grammar", True)
    counted: dict[str, float] = {}
    for face in (pair.prefill, pair.decode):
        for name, value in face.node.counters.snapshot().items():
            counted[name] = counted.get(name, 0) + value
    assert counted["grammars_refused"] >= 2
    assert counted["grammar_processes_killed"] == 1
    await pair.at_rest()


async def test_a_grammar_that_explodes_when_compiled_holds_up_no_others(start_pair: Start) -> None:
    pair = await start_pair()
    bomb = Grammar(kind=Grammar.KIND_JSON_SCHEMA, source=schema_bomb(26, 0))
    request = await pair.frontend.submit(controlled(pair, "bomb", PROMPT, grammar=bomb))
    for name, controls in CONTROLS.items():
        each = await pair.frontend.submit(controlled(pair, name, PROMPT, **controls))
        await each.ended.wait()
        assert each.failures == []
    assert not request.ended.is_set()
    await request.ended.wait()
    async with asyncio.timeout(120):
        while request.failures[-1].code == "grammar_busy":  # the machine was too busy to judge it: worth a retry
            assert request.failures[-1].retryable
            request = await pair.frontend.submit(controlled(pair, "bomb", PROMPT, grammar=bomb))
            await request.ended.wait()
    assert (request.failures[-1].code, request.failures[-1].retryable) == ("bad_grammar", False)
    await pair.at_rest()


async def test_requests_whose_grammars_take_long_to_compile_hold_up_no_others(start_pair: Start) -> None:
    pair = await start_pair()
    may_go_on = threading.Event()
    holding = [
        pair.prefill.node.grammars._processes.submit(f"tenant{i}", lambda _: may_go_on.wait(60))
        for i in range(MAX_RUNNING)
    ]
    try:
        slow = [
            await pair.frontend.submit(controlled(pair, f"g{i}", PROMPT, **CONTROLS["grammar"]))
            for i in range(pair.prefill.node.config.engine.prefill_lookahead)
        ]
        plain = await pair.frontend.submit(controlled(pair, "plain", PROMPT))
        await asyncio.wait_for(plain.ended.wait(), 20)
        assert [request.ended.is_set() for request in slow] == [False] * len(slow)
    finally:
        may_go_on.set()
    for task in holding:
        assert await task.result()
    for request in slow:
        await request.ended.wait()
        assert request.failures == []
    await pair.at_rest()
