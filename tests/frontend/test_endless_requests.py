"""Requests without an end at the door: what they may ask, how they are asked on, when they are given up."""

import asyncio
from typing import Any

import pytest

from moonpool_proto.v1 import worker_pb2

BODY = {"prompt": [5, 6, 7], "stream": True, "endless": True}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stream": False}, "must be streamed: set stream to true"),
        ({"max_tokens": 9}, "omit max_tokens"),
        ({"n": 2}, "got n = 2: send several requests"),
    ],
)
async def test_an_endless_answer_with_an_end_is_refused(front: Any, fields: dict[str, Any], words: str) -> None:
    status, body = await front.post("/v1/completions", BODY | fields)
    assert (status, body["error"]["param"]) == (400, "endless")
    assert words in body["error"]["message"]


async def test_it_asks_for_all_that_fits_and_outlives_the_request_timeout(start_front: Any, cluster: Any) -> None:
    seen: list[worker_pb2.Submit] = []

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        seen.append(submit)
        return [20, 21, 22], worker_pb2.FINISH_NONE

    cluster.answer_with(answer)
    async with start_front(request_timeout_s=3.0, endless_idle_s=4.0) as front:
        events = await front.events("/v1/completions", BODY)
    asked = cluster.conductor.scheduled[0]
    assert asked.endless
    assert 0 <= asked.waited_s < 3
    assert (seen[0].idle_s, seen[0].sampling.max_tokens) == (4.0, asked.max_new_tokens)
    assert asked.max_new_tokens > 100
    assert sum("choices" in event for event in events) >= 1
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "no token for 4 s: 3 tokens generated" in events[-1]["error"]["message"]
    completion = await cluster.conductor.completion()
    assert (completion.outcome, completion.generated) == ("failed", 3)


async def test_it_ends_when_its_client_leaves(front: Any, cluster: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21, 22], worker_pb2.FINISH_NONE))
    stream = await asyncio.wait_for(front.open_stream("/v1/completions", BODY), 60)
    await front.events_of(stream, 1)
    stream.close()
    assert (await cluster.conductor.completion()).outcome == "cancelled"
