"""The open loop against a real server: times are kept whatever the server does."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from loadtest.bench.dialects import BenchDialect
from loadtest.client import CompletionClient, take_event
from loadtest.dialogue_turns import ChatDialect
from loadtest.errors import StreamFailed
from loadtest.record import RequestRecord, SendOutcome
from loadtest.sender import SendTally, new_record, send_open_loop
from loadtest.server import ServerInfo


@pytest.fixture
def send(session):
    """Sends requests from now on; returns (records, tally)."""

    async def start(
        server: Any, requests: list[Any], *, speed: float = 1.0, timeout_s: float = 20.0, stop=None, dialect=None
    ):
        begin = time.monotonic()

        def clock() -> float:
            return time.monotonic() - begin

        client = CompletionClient(
            session, ServerInfo(server.url, "tiny"), timeout_s=timeout_s, clock=clock, dialect=dialect
        )
        tally = SendTally(len(requests))
        records = await send_open_loop(
            client,
            requests,
            speed=speed,
            clock=clock,
            cache_salt="s",
            stop=stop or asyncio.Event(),
            tally=tally,
        )
        return records, tally

    return start


def only(records: list[RequestRecord]) -> RequestRecord:
    (record,) = records
    return record


async def test_requests_leave_on_time_while_the_server_holds_all_answers(serve, send, make_request) -> None:
    everyone_came = asyncio.Event()

    async def behave(server: Any, request: Any, body: Any) -> None:
        # No answer before the last request is there: a closed loop would never get that far.
        if len(server.bodies) == 30:
            everyone_came.set()
        await asyncio.wait_for(everyone_came.wait(), 20)

    server = serve(behave=behave)
    records, tally = await send(server, [make_request(i, arrival_s=0.4 * i) for i in range(30)], speed=40.0)
    assert [r.due_s for r in records] == pytest.approx([0.01 * i for i in range(30)])
    assert all(r.outcome is SendOutcome.COMPLETED for r in records)
    assert all(r.lateness_s >= 0 for r in records)
    assert sorted(r.lateness_s for r in records)[15] < 0.1
    assert (tally.sent, tally.in_flight, tally.ended[SendOutcome.COMPLETED]) == (30, 0, 30)
    assert tally.prompt_tokens == 30 * 20


async def test_a_request_carries_what_the_replay_needs(serve, send, make_request) -> None:
    server = serve()
    await send(server, [make_request(4, temperature=0.5, max_tokens=2)])
    (body,) = server.bodies
    assert body == {
        "model": "tiny",
        "prompt": list(range(4, 24)),
        "max_tokens": 2,
        "temperature": 0.5,
        "seed": 4,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": "s",
    }


async def test_tokens_are_timed_as_they_arrive(serve, send, make_request) -> None:
    server = serve(token_delay_s=0.02)
    record = only((await send(server, [make_request(0, max_tokens=5)]))[0])
    assert record.token_ids == [7] * 5
    assert len(record.intervals_s) == 4
    assert all(interval > 0.01 for interval in record.intervals_s)
    assert 0 < record.ttft_s < record.end_s - record.sent_s
    assert record.tbt_worst10_s == max(record.intervals_s)
    assert record.extension["queue_s"] == 0.001


async def test_reuse_is_taken_from_the_servers_usage(serve, send, make_request) -> None:
    server = serve()
    prompt = make_request(0).prompt
    records, _ = await send(server, [make_request(i, prompt=prompt, arrival_s=0.3 * i) for i in range(2)])
    assert [r.cached_tokens for r in records] == [0, 16]


async def test_a_rejection_keeps_its_retry_after(serve, send, make_request) -> None:
    async def behave(server: Any, request: Any, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "1.5"})

    record = only((await send(serve(behave=behave), [make_request(0)]))[0])
    assert (record.outcome, record.reason, record.retry_after_s) == (SendOutcome.REJECTED, "HTTP 429: busy", 1.5)


async def _broken(request: web.Request, *chunks: bytes, drop: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
    if drop:
        assert request.transport is not None
        request.transport.abort()
    return response


TOKEN = b'data: {"choices": [{"index": 0, "text": "x", "token_ids": [7]}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ((TOKEN, TOKEN), "the stream ended without [DONE]"),
        ((TOKEN * 3, DONE), "the answer has no usage"),
        ((TOKEN * 2, USAGE, DONE), "received 2 token ids; 3 were requested"),
        ((b"data: {broken\n\n",), "malformed event: '{broken' is not JSON"),
        ((b"data: [1]\n\n",), "malformed event: found '[1]'"),
        ((b"data: " + b"[" * 100_000 + b"\n\n",), "malformed event: '[[["),
        ((b"HTTP/1.1 200 OK\n",), "expected a server-sent event"),
        ((b"data: \xff\n\n",), "not UTF-8"),
        ((TOKEN, b'data: {"error": {"message": "decode node lost"}}\n\n'), "error in the stream: decode node lost"),
        ((b'data: {"choices": [{"token_ids": ["a"]}]}\n\n',), "expected a list of integers"),
        ((b'data: {"choices": [7]}\n\n',), "found a choice '7'"),
        ((b'data: {"choices": [{"prompt_token_ids": [1, 2]}]}\n\n',), "are not the prompt that was sent"),
        ((TOKEN * 3, USAGE.replace(b"20", b"21"), DONE), "usage reports 21 prompt tokens; 20 were sent"),
        ((TOKEN * 3, USAGE.replace(b"3", b"4"), DONE), "usage reports 4 completion tokens; 3 were requested"),
        (
            (TOKEN * 3, USAGE.replace(b"20,", b'20, "prompt_tokens_details": {"cached_tokens": 20},'), DONE),
            "usage reports 20 cached tokens for a prompt of 20",
        ),
    ],
)
async def test_an_answer_that_is_not_right_is_a_failure_with_its_reason(
    serve, send, make_request, chunks: tuple[bytes, ...], reason: str
) -> None:
    async def behave(server: Any, request: web.Request, body: Any) -> web.StreamResponse:
        return await _broken(request, *chunks)

    record = only((await send(serve(behave=behave), [make_request(0)]))[0])
    assert record.outcome is SendOutcome.FAILED
    assert reason in record.reason


async def test_events_split_anywhere_are_put_together(serve, send, make_request) -> None:
    async def behave(server: Any, request: web.Request, body: Any) -> web.StreamResponse:
        data = TOKEN * 3 + USAGE + DONE
        return await _broken(request, *(data[i : i + 7] for i in range(0, len(data), 7)))

    record = only((await send(serve(behave=behave), [make_request(0)]))[0])
    assert (record.outcome, record.token_ids) == (SendOutcome.COMPLETED, [7, 7, 7])


async def test_a_server_without_token_ids_still_gives_times(serve, send, make_request) -> None:
    async def behave(server: Any, request: web.Request, body: Any) -> web.StreamResponse:
        return await _broken(request, TOKEN.replace(b', "token_ids": [7]', b"") * 3, USAGE, DONE)

    record = only((await send(serve(behave=behave), [make_request(0)]))[0])
    assert (record.outcome, record.token_ids, len(record.token_times)) == (SendOutcome.COMPLETED, [], 3)


async def test_a_lost_connection_is_a_failure_and_the_others_go_on(serve, send, make_request) -> None:
    async def behave(server: Any, request: web.Request, body: Any) -> web.StreamResponse | None:
        return await _broken(request, TOKEN, drop=True) if body["seed"] == 1 else None

    records, _ = await send(serve(behave=behave), [make_request(i) for i in range(3)])
    assert [r.outcome for r in records] == [SendOutcome.COMPLETED, SendOutcome.FAILED, SendOutcome.COMPLETED]
    assert "connection lost" in records[1].reason
    assert records[1].token_ids == [7]


async def test_a_server_that_is_gone_is_a_failure(send, make_request, unused_tcp_port) -> None:
    gone = SimpleNamespace(url=f"http://127.0.0.1:{unused_tcp_port}")
    record = only((await send(gone, [make_request(0)]))[0])
    assert record.outcome is SendOutcome.FAILED
    assert record.reason.startswith("no connection (")


async def test_a_server_that_goes_silent_is_a_failure_after_the_timeout(serve, send, make_request) -> None:
    released = asyncio.Event()

    async def behave(server: Any, request: web.Request, body: Any) -> None:
        await asyncio.wait_for(released.wait(), 3)

    record = only((await send(serve(behave=behave), [make_request(0)], timeout_s=0.2))[0])
    assert (record.outcome, record.reason) == (SendOutcome.FAILED, "timed out after 0.2 s")
    assert record.end_s - record.sent_s == pytest.approx(0.2, abs=0.15)


async def test_stopping_gives_up_what_is_in_flight(serve, send, make_request) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    async def behave(server: Any, request: web.Request, body: Any) -> None:
        if len(server.bodies) == 2:
            loop.call_soon_threadsafe(stop.set)
            await asyncio.sleep(30)

    requests = [make_request(0), make_request(1, arrival_s=0.2), make_request(2, arrival_s=1000.0)]
    records, tally = await send(serve(behave=behave), requests, stop=stop)
    assert [r.outcome for r in records] == [SendOutcome.COMPLETED, SendOutcome.UNFINISHED]
    assert tally.sent == 2


@pytest.mark.parametrize("dialect", [ChatDialect((), "disabled"), BenchDialect("/v1/chat/completions", True, False)])
def test_a_chats_event_may_have_no_delta_but_none_of_another_kind(make_request, dialect: Any) -> None:
    request = make_request(0)
    record = new_record(request, 0.0)
    for event in ('{"choices": [{"delta": null}]}', '{"choices": [{"delta": {"content": "a"}}]}'):
        take_event(event, 0.0, record, request, dialect)
    assert record.text == "a"
    for event in ('{"choices": [{"delta": "a"}]}', '{"choices": [{"delta": {"content": 7}}]}'):
        with pytest.raises(StreamFailed, match="found the delta"):
            take_event(event, 0.0, record, request, dialect)


async def test_a_character_cut_in_half_between_two_events_is_put_together(serve, send, make_request) -> None:
    async def behave(server: Any, request: web.Request, body: Any) -> web.StreamResponse:
        pieces = (b"\\ud83d", b"\\ude00 ", b"\\ud83d")
        return await _broken(request, *(TOKEN.replace(b'"x"', b'"%b"' % piece) for piece in pieces), USAGE, DONE)

    record = only(
        (
            await send(
                serve(behave=behave),
                [make_request(0)],
                dialect=BenchDialect("/v1/completions", False, True, keep_text=True),
            )
        )[0]
    )
    assert (record.outcome, record.text) == (SendOutcome.COMPLETED, "\N{GRINNING FACE} \ufffd")


async def test_a_refusal_can_be_shown_whatever_it_says(serve, send, make_request) -> None:
    async def behave(server: Any, request: web.Request, body: Any) -> web.Response:
        return web.Response(status=400, text='{"error": {"message": "no \\ud83d"}}')

    record = only((await send(serve(behave=behave), [make_request(0)]))[0])
    assert record.reason == "HTTP 400: no \ufffd"
