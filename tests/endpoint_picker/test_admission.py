"""Requests that the conductor would reject are refused at the gateway; the conductor is a real one."""

import asyncio
import json

import pytest

from settings.keys import replaced
from tests.endpoint_picker.gateway import WAIT_S, chat

HARD = {"x-slo-ttft-ms": "0.001"}  # an objective that nothing meets


@pytest.fixture
async def picker(start_endpoint, start_picker, admission):
    return await start_picker(await start_endpoint(("m",)), admission=admission, picker_judgement_s=20.0)


async def previews(conductor):
    return json.loads(await conductor.counters())["counters"].get("previewed", 0)


async def test_a_request_that_would_miss_its_objective_is_a_429_with_retry_after(picker, conductor):
    outcome = await picker.answer(chat("Hello", max_tokens=8), headers=HARD)
    assert (outcome.status, outcome.error["code"], outcome.error["type"]) == (429, "ttft", "rate_limit_error")
    assert "the objective is 1e-06 s" in outcome.error["message"]
    assert int(outcome.headers["retry-after"]) >= 1
    assert outcome.kinds == ["immediate_response"]  # no endpoint has seen the body
    assert picker.metric('moonpool:endpoint_picks_total{outcome="ttft"}') == 1


async def test_an_admitted_request_is_sent_and_nothing_is_reserved_for_it(picker, conductor):
    outcome = await picker.answer(chat("Hello", max_tokens=8))
    assert (outcome.status, bool(outcome.destination)) == (200, True)
    assert await previews(conductor) == 1
    assert json.loads(await conductor.validation())["ok"]
    assert picker.metric("moonpool:endpoint_picks_unjudged_total") == 0


async def test_the_conductor_judges_the_prompt_as_an_api_server_tokenises_it(picker, conductor):
    outcome = await picker.answer(chat("word " * 2000, max_tokens=8))
    assert (outcome.status, outcome.error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 1024 tokens" in outcome.error["message"]


async def test_errors_of_the_api_come_from_the_picker(picker, conductor):
    outcome = await picker.answer(chat("Hello", temperature=9))
    assert (outcome.status, outcome.error["param"]) == (400, "temperature")
    outcome = await picker.answer(chat("Hello", model="other"))
    assert (outcome.status, outcome.error["code"]) == (404, "model_not_found")


async def test_other_routes_are_not_judged(picker, conductor):
    outcome = await picker.answer(b'{"model": "m", "prompt": "x"}', path="/tokenize", headers=HARD)
    assert outcome.status == 200
    assert await previews(conductor) == 0


async def test_a_request_without_a_valid_key_is_a_401(start_endpoint, start_picker, admission):
    picker = await start_picker(
        await start_endpoint(), admission=replaced(admission, api_key=("sk-one",)), picker_judgement_s=20.0
    )
    outcome = await picker.answer(chat("Hello"))
    assert (outcome.status, outcome.error["code"]) == (401, "invalid_api_key")
    assert outcome.headers["www-authenticate"] == "Bearer"
    outcome = await picker.answer(chat("Hello", max_tokens=8), headers={"authorization": "Bearer sk-one"})
    assert outcome.status == 200


async def test_while_the_conductor_restarts_requests_are_sent_unjudged(
    start_endpoint, start_picker, admission, conductor
):
    picker = await start_picker(await start_endpoint(), admission=admission, picker_judgement_s=2.0)
    assert (await picker.answer(chat("Hello", max_tokens=8), headers=HARD)).status == 429
    await conductor.stop()
    outcome = await picker.answer(chat("Hello", max_tokens=8), headers=HARD)
    assert (outcome.status, bool(outcome.destination)) == (200, True)
    assert picker.metric("moonpool:endpoint_picks_unjudged_total") == 1
    await conductor.start()
    async with asyncio.timeout(WAIT_S):
        while (await picker.answer(chat("Hello", max_tokens=8), headers=HARD)).status == 200:
            await asyncio.sleep(0.01)
