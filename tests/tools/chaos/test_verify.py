"""The judge of a chaos test: it counts a wrong token, a wrong structure, wrong usage, a lost request and a leak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from engine.config import read_config
from engine.random_model import RandomModelSpec, write_random_model
from moonpool.cluster_view.collector import ValidationResult
from tools.chaos import load as load_module
from tools.chaos.cluster import BUNDLED
from tools.chaos.leaks import ProcessUsage, growth, held_at_rest
from tools.chaos.load import Load
from tools.chaos.requests import Choice, ClientAttempt, ClientRequest, Form, Received, Script, is_complete, take
from tools.chaos.verify import ExactReference, RealReference, Texts, Verdict, Verifier
from worker.paced.tokens import Draw, PacedTokens

PROMPT = list(range(100, 140))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(
        tmp_path_factory.mktemp("model"),
        RandomModelSpec(layers=2, hidden=64, heads=4, kv_heads=2, vocab=2048, max_len=512, scale=3.0, seed=7),
        tokenizer=BUNDLED,
    )


@pytest.fixture(scope="module")
def verifier(random_model: Path) -> Verifier:
    references = {"real": RealReference(random_model), "paced": ExactReference(BUNDLED, 0)}
    texts = Texts(BUNDLED, read_config(BUNDLED))
    return Verifier(references, {"real": texts, "paced": texts})


def paced_answer(count: int, *, seed: int = 5) -> list[int]:
    tokens = PacedTokens.of(BUNDLED, read_config(BUNDLED), 0)
    return tokens.answer(np.array(PROMPT, np.int32), Draw(seed, 1.0, 0), count)


def answered(token_ids: list[int], *, model: str = "paced", **changes: Any) -> ClientRequest:
    body = {"model": model, "prompt": PROMPT, "seed": 5, "temperature": 1.0, "max_tokens": len(token_ids)}
    body |= {"ignore_eos": True, **changes.pop("body", {})}
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(token_ids), **changes.pop("usage", {})}
    received = Received(list(PROMPT), {0: Choice(token_ids, "", [], "length")}, usage, {})
    attempt = ClientAttempt(0, 0.0, 1.0, "completed", "", received)
    return ClientRequest(1, changes.pop("form", Form.COMPLETION), model, body, [attempt], "completed", **changes)


def test_a_right_answer_has_nothing_wrong(verifier: Verifier) -> None:
    verdict = verifier.judge([answered(paced_answer(30))])
    assert (verdict.completed, verdict.verified_tokens, verdict.problems) == (1, 30, [])


def test_a_wrong_token_of_the_paced_engine_is_counted(verifier: Verifier) -> None:
    tokens = paced_answer(30)
    tokens[-1] += 1
    assert verifier.judge([answered(tokens)]).wrong_tokens == 1


def test_a_wrong_token_of_the_real_engine_is_counted(verifier: Verifier, random_model: Path) -> None:
    reference = RealReference(random_model)
    tokens: list[int] = []
    for _ in range(6):  # greedy, by trying what the reference accepts
        ids = np.array([*PROMPT, *tokens], np.int32)
        tokens.append(int(reference._model.score(ids)[-1].argmax()))
    greedy = {"temperature": 0.0}
    assert verifier.judge([answered(tokens, model="real", body=greedy)]).problems == []
    tokens[-1] = (tokens[-1] + 1) % 2048
    assert verifier.judge([answered(tokens, model="real", body=greedy)]).wrong_tokens == 1


def test_a_wrong_token_of_a_broken_attempt_is_counted(verifier: Verifier) -> None:
    request = answered(paced_answer(20))
    wrong = paced_answer(9)
    wrong[4] += 1
    broken = ClientAttempt(1, 0.0, 0.5, "broken", "", Received(list(PROMPT), {0: Choice(wrong)}))
    request.attempts.insert(0, broken)
    verdict = verifier.judge([request])
    assert verdict.wrong_tokens >= 1
    assert verdict.retried == 1


def test_an_answer_outside_its_grammar_is_counted(verifier: Verifier) -> None:
    body = Script("1", "paced")
    request = next(each for each in iter(lambda: body.ask(""), None) if each.form == Form.STRUCTURED)
    request.body["max_tokens"] = 1
    received = Received(list(PROMPT), {0: Choice([600], "x", [], "stop")}, {}, {})
    request.attempts, request.outcome = [ClientAttempt(0, 0.0, 1.0, "completed", "", received)], "completed"
    verdict = verifier.judge([request])
    assert verdict.wrong_tokens == 1
    assert verdict.wrong_answers == 3  # usage, the schema, and a prompt without the message


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"usage": {"completion_tokens": 29}}, "usage"),
        ({"body": {"max_tokens": 31}}, "reason length after 30"),
    ],
)
def test_wrong_usage_and_an_early_end_are_counted(verifier: Verifier, changes: dict[str, Any], problem: str) -> None:
    verdict = verifier.judge([answered(paced_answer(30), **changes)])
    assert verdict.wrong_answers == 1
    assert problem in verdict.problems[0]


def test_a_request_without_an_outcome_is_lost(verifier: Verifier) -> None:
    request = answered(paced_answer(3))
    request.outcome = ""
    assert verifier.judge([request]).lost == 1


Handler = Callable[[web.Request], Any]


async def asked_of(handler: Handler, monkeypatch: pytest.MonkeyPatch, *, idle_s: float = 0.5) -> ClientRequest:
    """Return a request that was sent to a server of this handler, with short deadlines."""
    monkeypatch.setattr(load_module, "IDLE_S", idle_s)
    monkeypatch.setattr(load_module, "DEADLINE_S", 1.0)
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    request = ClientRequest(1, Form.COMPLETION, "paced", {"prompt": PROMPT, "stream": True, "seed": 1})
    try:
        async with aiohttp.ClientSession() as session:
            await Load([f"http://127.0.0.1:{port}"], 1, {}).send(session, request, first_frontend=0)
    finally:
        await runner.cleanup()
    return request


async def test_a_request_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    request = await asked_of(hang, monkeypatch)
    assert request.outcome == "lost"
    assert "nothing came" in request.why


async def test_streams_that_end_without_a_finish_reason_are_retried_and_then_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def cut_short(_: web.Request) -> web.Response:
        return web.Response(text='data: {"choices": [{"index": 0, "text": "a", "token_ids": [7]}]}\n\ndata: [DONE]\n\n')

    request = await asked_of(cut_short, monkeypatch)
    assert request.outcome == "lost"
    assert {attempt.outcome for attempt in request.attempts} == {"broken"}
    assert len(request.attempts) > 1


async def test_a_refused_request_is_lost_at_once_and_a_named_error_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = iter([503, 400])

    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "no_nodes", "message": "none"}}, status=next(statuses))

    request = await asked_of(refuse, monkeypatch)
    assert [attempt.outcome for attempt in request.attempts] == ["no_nodes", "status 400"]
    assert request.outcome == "lost"


async def test_what_a_role_still_holds_is_a_leak() -> None:
    class Holding:
        async def validate(self) -> list[ValidationResult]:
            return [ValidationResult("decode-0", "decode", "x", False, ("3 slots are held",))]

    held, _ = await held_at_rest(Holding(), rest_s=0.0)  # type: ignore[arg-type]
    assert held == ["decode-0 at x: 3 slots are held"]


def test_more_descriptors_or_threads_than_connections_explain_are_a_leak() -> None:
    before = {"pool-0": ProcessUsage(40, 20, 0)}
    assert growth(before, {"pool-0": ProcessUsage(60, 25, 0)}) == []
    assert growth(before, {"pool-0": ProcessUsage(140, 20, 0)}) == ["pool-0: 140 descriptors, 40 at the beginning"]
    assert growth(before, {"pool-0": ProcessUsage(40, 90, 0)}) == ["pool-0: 90 threads, 20 at the beginning"]


def test_an_answer_is_complete_when_each_choice_has_its_finish_reason() -> None:
    request = ClientRequest(1, Form.SEVERAL, "paced", {"n": 2})
    received = Received()
    take(received, {"choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": "length"}]})
    assert not is_complete(request, received)
    take(received, {"choices": [{"index": 1, "text": "b", "token_ids": [2], "finish_reason": "length"}]})
    assert is_complete(request, received)


def test_a_verdict_keeps_the_first_problems_only() -> None:
    verdict = Verdict()
    for number in range(100):
        verdict.note(str(number))
    assert verdict.problems[0] == "0"
    assert len(verdict.problems) < 100
