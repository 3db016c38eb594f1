"""Frontends that come, go, half-go and do not read: their requests end with them, others' do not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

import worker.engine_node
import worker.streams
from engine import Model
from moonpool_proto.v1.common_pb2 import Software
from moonpool_proto.v1.conductor_pb2 import NodeReport
from moonpool_proto.v1.worker_pb2 import Failure, FrontendMessage, Hello, Token, WorkerMessage
from moonpool_proto.v1.worker_pb2_grpc import WorkerStub
from rpc.control import open_channel
from rpc.versions import named, own_software
from worker.streams import FrontendStream

Start = Callable[..., Awaitable[Any]]
Prompt = Callable[..., list[int]]
Greedy = Callable[[Model, list[int], int], list[int]]


async def test_a_frontend_that_stops_sending_is_gone(start_pair: Start, prompt: Prompt) -> None:
    pair = await start_pair()
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=400))
    await request.reaches(2)
    for call in pair.frontend.calls.values():
        await call.done_writing()
    await pair.at_rest()
    assert pair.decode.node.counters.snapshot()["generation_tokens"] < 399  # it was not decoded to its end
    assert not pair.decode.node.streams.is_attached("front")


async def test_a_new_stream_takes_over_and_ends_what_the_old_one_left(
    start_pair: Start, model: Model, prompt: Prompt, greedy: Greedy
) -> None:
    pair = await start_pair()
    old = await pair.frontend.submit(pair.submit(prompt(40), "old", max_tokens=400))
    await old.reaches(2)
    for name, face in (("prefill", pair.prefill), ("decode", pair.decode)):
        await pair.frontend.attach(name, face.node.config.listen.listen)
    await pair.at_rest()
    new = await pair.frontend.submit(pair.submit(prompt(40), "new"))
    await new.ended.wait()
    assert new.token_ids == greedy(model, prompt(40), 12)
    assert len(old.tokens) < 400
    await pair.at_rest()


async def test_a_frontend_that_leaves_while_it_is_being_attached_is_not_attached(
    start_pair: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await start_pair()
    jobs = pair.decode.node.jobs
    real, waiting = jobs.cancel_frontend, asyncio.Event()

    async def slow(frontend_id: str) -> None:
        if not waiting.is_set():
            waiting.set()
            await asyncio.Event().wait()
        await real(frontend_id)

    monkeypatch.setattr(jobs, "cancel_frontend", slow)
    async with open_channel(pair.decode_target) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(FrontendMessage(hello=Hello(frontend_id="other", incarnation=1)))
        await waiting.wait()
        call.cancel()
    async with asyncio.timeout(10):
        while pair.decode.node.streams.is_attached("other"):
            await asyncio.sleep(0.005)
    assert pair.decode.node.streams.is_attached("front")


async def test_a_frontend_that_does_not_read_is_cut_off_with_its_requests(
    start_pair: Start, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.streams, "MAX_BUFFERED_MESSAGES", 128)
    pair = await start_pair()
    request = await pair.frontend.submit(pair.submit(prompt(40), "r", max_tokens=100))
    # Another frontend, which reads no more than the greeting; large messages fill the connection.
    async with open_channel(pair.decode_target) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(FrontendMessage(hello=Hello(frontend_id="idle", incarnation=1)))
        await call.read()
        message = "x" * (1 << 18)
        async with asyncio.timeout(20):
            while pair.decode.node.streams.is_attached("idle"):
                pair.decode.node.streams.send_failure("idle", Failure(request_id="none", message=message))
                await asyncio.sleep(0.001)
        call.cancel()
    assert pair.decode.node.streams.is_attached("front")
    await request.ended.wait()
    assert len(request.tokens) == 100
    await pair.at_rest()


async def test_a_frontend_of_a_version_that_cannot_be_spoken_with_is_refused_by_both_names(start_pair: Start) -> None:
    pair = await start_pair()
    software = Software(version="9.0.0", wire=9, oldest_wire=8)
    async with open_channel(pair.decode_target) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(FrontendMessage(hello=Hello(frontend_id="newer", incarnation=1, software=software)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    for word in ("'newer'", "9.0.0", "wire 8 or newer", named(own_software())):
        assert word in (refused.value.details() or "")


async def test_a_frontend_from_before_hand_offs_had_times_is_not_told_them(start_pair: Start, prompt: Prompt) -> None:
    """It would take them for a second first token's: a prefill of no length."""
    pair = await start_pair()
    told = []
    for software in (None, Software()):
        for face in (pair.prefill, pair.decode):
            config = face.node.config
            await pair.frontend.attach(config.node_id, config.listen.listen, software)
        request = await pair.frontend.submit(pair.submit(prompt(40), f"r{len(told)}", max_tokens=4))
        await request.ended.wait()
        told.append([index for index, token in request.messages.items() if token.HasField("timing")])
        assert not request.messages[0].timing.HasField("handoff")
    assert [sorted(indices) for indices in told] == [[0, 1], [0]]
    await pair.at_rest()


async def test_a_stream_without_a_greeting_is_refused(start_pair: Start) -> None:
    pair = await start_pair()
    async with open_channel(pair.decode_target) as channel:
        call = WorkerStub(channel).Attach()
        await call.write(FrontendMessage())
        with pytest.raises(grpc.aio.AioRpcError, match="hello"):
            await call.read()


async def test_messages_that_queue_up_are_sent_as_one_in_order() -> None:
    stream = FrontendStream("front", 1)
    reading = aiter(stream.messages())
    for index in range(3):
        stream.send(WorkerMessage(tokens=[Token(request_id="r", index=index)]))
    stream.send(WorkerMessage(failures=[Failure(request_id="other")]))
    message = await anext(reading)
    assert [token.index for token in message.tokens] == [0, 1, 2]
    assert [failure.request_id for failure in message.failures] == ["other"]
    later = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    stream.send(WorkerMessage(tokens=[Token(request_id="r", index=3)]))
    assert [token.index for token in (await later).tokens] == [3]
    ended = asyncio.ensure_future(anext(reading, None))
    await asyncio.sleep(0)
    stream.close()
    assert await ended is None


async def test_reports_carry_counters_of_a_moment_ago_and_metrics_current_ones(
    start_pair: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.engine_node, "COUNT_EVERY_S", 3600.0)
    node = (await start_pair()).prefill.node
    node._counted_s = -3600.0
    seen = []
    for _ in range(2):
        report = NodeReport()
        node._fill_report(report)
        seen.append((report.counters["generation_tokens"], node.sample().counters.get("generation_tokens", 0)))
        node.counters.add("generation_tokens", 5)
    assert seen == [(0, 0), (0, 5)]
    node._counted_s -= 3600.0
    report = NodeReport()
    node._fill_report(report)
    assert report.counters["generation_tokens"] == 10
