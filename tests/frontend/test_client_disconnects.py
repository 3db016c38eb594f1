"""Clients that leave, clients that do not read, and a frontend that is asked to stop: nothing is left behind."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from frontend.errors import ServiceUnavailable
from frontend.generation import Generation
from moonpool_proto.v1 import worker_pb2

LENGTH = worker_pb2.FINISH_LENGTH
COMPLETIONS = "/v1/completions"
BODY = {"prompt": list(range(10, 20)), "max_tokens": 400}


async def check_cancelled(cluster: Any, front: Any, request_id: str) -> None:
    for name in ("p0", "d0"):
        assert await cluster.workers[name].cancelled() == request_id
    completion = await cluster.conductor.completion()
    assert (completion.request_id, completion.outcome) == (request_id, "cancelled")
    await front.quiet()
    assert 'finished_reason="abort",model_name="tiny"} 1.0' in (await front.get("/metrics"))[1]


async def test_client_that_leaves_a_stream_cancels_its_request(cluster: Any, front: Any) -> None:
    opening = front.open_stream(COMPLETIONS, BODY)
    submit = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(submit, 0, [20])
    (await opening).close()
    await check_cancelled(cluster, front, submit.request_id)


async def test_client_that_leaves_before_its_answer_cancels_its_request(cluster: Any, front: Any) -> None:
    waiting = asyncio.create_task(front.post(COMPLETIONS, BODY))
    submit = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(submit, 0, [20])
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await check_cancelled(cluster, front, submit.request_id)


async def test_client_that_leaves_a_further_attempt_cancels_that_one(cluster: Any, front: Any) -> None:
    opening = front.open_stream(COMPLETIONS, BODY)
    prefill = cluster.workers["p0"]
    prefill.fail(await prefill.submitted(), "internal", retryable=True)
    second = await prefill.submitted()
    assert await prefill.cancelled(attempt=0) == second.request_id
    prefill.send(second, 0, [20])
    (await opening).close()
    assert await prefill.cancelled(attempt=1) == second.request_id
    await front.quiet()


async def test_client_that_leaves_a_batch_cancels_all_of_it(cluster: Any, front: Any) -> None:
    opening = front.open_stream(COMPLETIONS, {"prompt": ["a", "b"], "max_tokens": 50})
    submits = [await cluster.workers["p0"].submitted() for _ in range(2)]
    cluster.workers["p0"].send(submits[0], 0, [20])
    (await opening).close()
    cancelled = {await cluster.workers["d0"].cancelled() for _ in submits}
    assert cancelled == {submit.request_id for submit in submits}
    await front.quiet()


async def test_client_that_leaves_during_placement_frees_its_place(cluster: Any, front: Any) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()
    schedule = cluster.conductor.schedule

    async def slow(request: Any) -> Any:
        asked.set()
        await go_on.wait()
        return await schedule(request)

    await cluster.stop_conductor()
    cluster.conductor.schedule = slow
    await cluster.start_conductor()
    waiting = asyncio.create_task(front.post(COMPLETIONS, BODY))
    await asked.wait()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await cluster.conductor.completion()).outcome == "cancelled"
    go_on.set()
    await front.quiet()


async def test_other_requests_go_on_while_one_client_does_not_read(cluster: Any, start_front: Any) -> None:
    """Its tokens are buffered up to the limit; then it is cancelled, and its connection ends."""
    async with start_front(client_buffer_tokens=8) as front:
        host, port = front.url.removeprefix("http://").split(":")
        # A small window, so that little is buffered by the kernels.
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        body = json.dumps({"prompt": [20], "max_tokens": 511, "stream": True, "return_token_ids": True}).encode()
        lines = (f"POST {COMPLETIONS} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(body)}", "", "")
        writer.write("\r\n".join(lines).encode() + body)
        prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
        slow = await prefill.submitted()
        prefill.send(slow, 0, [20])
        # One message overfills the buffer at once, however much the kernels would take.
        decode.send(slow, 1, [20] * 400)
        assert await decode.cancelled() == slow.request_id
        task = asyncio.create_task(front.post(COMPLETIONS, {"prompt": [20], "max_tokens": 2}))
        quick = await prefill.submitted()
        prefill.send(quick, 0, [21])
        decode.send(quick, 1, [21], finish=LENGTH)
        assert (await task)[0] == 200
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        await asyncio.wait_for(reader.read(), 10)
        writer.close()
        await writer.wait_closed()
        await front.quiet()
        assert 'moonpool:slow_clients_total{model_name="tiny"} 1.0' in (await front.get("/metrics"))[1]


async def test_stop_refuses_new_requests_and_finishes_running_ones(cluster: Any, front: Any) -> None:
    async with front.http.get(front.url + "/live") as response:
        assert "connection" not in response.headers
    running = asyncio.ensure_future(front.http.post(front.url + COMPLETIONS, json=BODY | {"max_tokens": 2}))
    submit = await cluster.workers["p0"].submitted()
    front.stop.set()
    assert json.loads((await front.readiness(503))[1])["reason"] == "draining"
    assert (await front.get("/live"))[0] == 200
    async with front.http.post(front.url + COMPLETIONS, json=BODY) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "draining")
        assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
    cluster.workers["p0"].send(submit, 0, [20])
    cluster.workers["d0"].send(submit, 1, [21], finish=LENGTH)
    async with await running as response:
        assert (response.status, response.headers["connection"]) == (200, "close")
    assert (await cluster.conductor.completion()).outcome == "finished"
    await asyncio.wait_for(front.task, 10)
    with pytest.raises(aiohttp.ClientConnectorError):
        await front.get("/live")


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_ends_what_outlasts_the_grace_with_an_error(cluster: Any, start_front: Any, stream: bool) -> None:
    async with start_front(drain_grace_s=0.1) as front:
        if stream:
            running = asyncio.create_task(front.events(COMPLETIONS, BODY))
        else:
            running = asyncio.create_task(front.post(COMPLETIONS, BODY))
        submit = await cluster.workers["p0"].submitted()
        cluster.workers["p0"].send(submit, 0, [20])
        front.stop.set()
        answer = await running
        error = answer[-1]["error"]
        assert (error["code"], error["message"]) == ("draining", "the frontend is shutting down")
        assert await cluster.workers["d0"].cancelled() == submit.request_id
        assert (await cluster.conductor.completion()).outcome == "failed"


async def test_an_end_that_comes_just_as_an_attempt_has_begun_is_not_lost(
    cluster: Any, start_front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Generation._begin

    async def begun_and_ended(self: Generation) -> Any:
        attempt = await begin(self)
        self.end(ServiceUnavailable("too late", code="draining", retry_after_s=1.0))
        return attempt

    monkeypatch.setattr(Generation, "_begin", begun_and_ended)
    async with start_front() as front:
        status, answer = await asyncio.wait_for(front.post(COMPLETIONS, BODY), 20)
    assert (status, answer["error"]["message"]) == (503, "too late")
