"""Requests without an end: their deadline is that of the next token, and they end when none comes."""

import asyncio
from typing import Any

import pytest

from moonpool_proto.v1.common_pb2 import Sampling
from moonpool_proto.v1.worker_pb2 import Failure, Submit
from worker.jobs import RequestJobs
from worker.request import Request

IDLE_S = 0.2


def request(timeout_s: float, idle_s: float) -> Request:
    submit = Submit(
        request_id="r",
        frontend_id="f",
        prompt_ids=b"\x05\0\0\0" * 3,
        chain_seed=bytes(16),
        sampling=Sampling(max_tokens=9, top_p=1.0),
        timeout_s=timeout_s,
        idle_s=idle_s,
    )
    return Request.from_proto(submit, vocab_size=64, max_model_len=64, block_tokens=8)


@pytest.mark.parametrize("idle_s", [IDLE_S, 0.0])
async def test_each_token_gives_an_endless_request_time_for_the_next_and_no_other(idle_s: float) -> None:
    failures: list[Failure] = []
    jobs = RequestJobs(lambda _, failure: failures.append(failure), lambda _: None)
    one, loop = request(30.0, idle_s), asyncio.get_running_loop()

    async def work() -> None:
        jobs.renew(one)
        await asyncio.Event().wait()

    began_s = loop.time()
    job = jobs.run(one, work())
    if idle_s:
        await job
        assert [failure.code for failure in failures] == ["deadline"]
        assert loop.time() - began_s >= idle_s
    else:
        done, _ = await asyncio.wait([job], timeout=2 * IDLE_S)
        assert not done
        await jobs.cancel_all()
    assert len(jobs) == 0
    limits: dict[Any, Any] = jobs._limits
    assert limits == {}


async def test_an_endless_request_that_goes_on_has_no_deadline() -> None:
    failures: list[Failure] = []
    jobs = RequestJobs(lambda _, failure: failures.append(failure), lambda _: None)
    one, tokens = request(0.1, 60.0), 0

    async def work() -> None:
        nonlocal tokens
        while tokens < 8:
            tokens += 1
            jobs.renew(one)
            await asyncio.sleep(0.03)

    await jobs.run(one, work())
    assert (tokens, failures) == (8, [])
