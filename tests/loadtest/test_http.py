"""HTTP pieces of the load test: retries and server-sent events."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import CompletionClient
from loadtest.errors import MalformedStream
from loadtest.http import RetryPolicy, SseParser
from loadtest.record import RequestRecord, SendOutcome
from loadtest.sender import new_record
from loadtest.server import ServerInfo


@given(st.integers(1, 20), st.none() | st.floats(0, 1e6), st.integers(0, 2**31))
def test_a_wait_is_what_was_asked_for_within_the_bound_and_a_quarter_more(
    attempts: int, asked: float | None, seed: int
) -> None:
    wait = RetryPolicy(8, 30.0).wait_s(attempts=attempts, retry_after_s=asked, seed=seed)
    if attempts >= 8:
        assert wait is None
        return
    base = min(0.5 * 2 ** (attempts - 1) if asked is None else asked, 30.0)
    assert wait is not None
    assert base <= wait <= 1.25 * base


def test_the_same_seed_waits_the_same_and_others_do_not() -> None:
    policy = RetryPolicy()
    waits = [policy.wait_s(attempts=1, retry_after_s=1.0, seed=seed) for seed in (1, 1, 2)]
    assert waits[0] == waits[1] != waits[2]


@pytest.fixture
def send_one(session):
    async def start(server: Any, request: Any, **options: Any) -> RequestRecord:
        begin = time.monotonic()
        client = CompletionClient(
            session,
            ServerInfo(server.url, "tiny"),
            clock=lambda: time.monotonic() - begin,
            **{"timeout_s": 60.0, "retry": RetryPolicy(4, 0.05), **options},
        )
        record = new_record(request, 0.0)
        await client.send(request, record, cache_salt="")
        return record

    return start


def refusing(times: int, retry_after: str = "0.02"):
    seen: Counter[int] = Counter()

    async def behave(server: Any, request: web.Request, body: Any) -> web.Response | None:
        seen[body["seed"]] += 1
        if seen[body["seed"]] <= times:
            error = {"error": {"message": "busy"}}
            return web.json_response(error, status=429, headers={"Retry-After": retry_after})
        return None

    return behave


async def test_a_retried_request_counts_from_its_first_sending(serve, send_one, make_request) -> None:
    record = await send_one(serve(behave=refusing(2)), make_request(0))
    assert (record.outcome, record.attempts, record.reason) == (SendOutcome.COMPLETED, 3, "")
    assert record.ttft_s >= 0.04
    assert len(record.token_times) == 3


async def test_a_retry_that_never_helps_ends_rejected_after_its_attempts(serve, send_one, make_request) -> None:
    server = serve(behave=refusing(99))
    record = await send_one(server, make_request(0))
    assert (record.outcome, record.attempts, record.reason) == (SendOutcome.REJECTED, 4, "HTTP 429: busy")
    assert len(server.bodies) == 4


async def test_a_wait_beyond_the_time_out_is_not_begun(serve, send_one, make_request) -> None:
    record = await send_one(
        serve(behave=refusing(9, "100")), make_request(0), timeout_s=5.0, retry=RetryPolicy(9, 300.0)
    )
    assert (record.outcome, record.attempts) == (SendOutcome.REJECTED, 1)
    assert record.retry_after_s == 100


async def test_without_a_policy_a_rejection_is_the_outcome(serve, send_one, make_request) -> None:
    record = await send_one(serve(behave=refusing(1)), make_request(0), retry=None)
    assert (record.outcome, record.attempts) == (SendOutcome.REJECTED, 1)


async def test_a_cancelled_wait_leaves_the_request_unfinished(serve, session, make_request) -> None:
    server = serve(behave=refusing(9, "30"))
    client = CompletionClient(
        session, ServerInfo(server.url, "tiny"), timeout_s=60.0, clock=time.monotonic, retry=RetryPolicy()
    )
    record = new_record(make_request(0), 0.0)
    sending = asyncio.create_task(client.send(make_request(0), record, cache_salt=""))
    while record.retry_after_s is None:
        await asyncio.sleep(0.01)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    assert record.outcome is SendOutcome.UNFINISHED


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1), max_size=5),
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_come_out_whole_however_the_bytes_are_cut(texts: list[str], cuts: list[int], end: str) -> None:
    data = "".join(f"event: x{end}data: {text}{end}{end}: a comment{end}{end}" for text in texts).encode()
    stream, found, at = SseParser(), [], 0
    while at < len(data):
        step = cuts[at % len(cuts)]
        found += stream.feed(data[at : at + step])
        at += step
    assert found == texts


def test_several_data_lines_are_one_event() -> None:
    assert SseParser().feed(b"data: a\ndata:b\n\n") == ["a\nb"]


def test_an_endless_event_is_refused() -> None:
    stream = SseParser()
    for _ in range(8):
        assert stream.feed(b"x" * (1 << 20)) == []
    with pytest.raises(MalformedStream, match="more than"):
        stream.feed(b"x")
