"""Where the time to a first token went: the parts sum to the whole, whatever happened on the way."""

import asyncio
import json
from time import monotonic
from typing import Any

import pytest

from moonpool_proto.v1 import worker_pb2

LENGTH = worker_pb2.FINISH_LENGTH
COMPLETIONS = "/v1/completions"
BODY = {"prompt": list(range(10, 20)), "max_tokens": 2, "seed": 5}
ASKED = {"x-moonpool-timing": "1"}
PARTS = ["tokenize_s", "sibling_s", "schedule_s", "lost_s", "queue_s", "load_s", "prefill_s", "delivery_s"]
WAIT_S = 0.05


def sums(parts: dict[str, float]) -> bool:
    return sum(value for name, value in parts.items() if name != "whole_s") == pytest.approx(parts["whole_s"], abs=1e-7)


def send(prefill: Any, decode: Any, submit: worker_pb2.Submit) -> None:
    """Both tokens, with what the workers measured."""
    first, second = worker_pb2.WorkerMessage(), worker_pb2.WorkerMessage()
    token = first.tokens.add(request_id=submit.request_id, attempt=submit.attempt, index=0, token_id=20)
    token.timing.CopyFrom(worker_pb2.Timing(queue_s=0.25, load_s=0.125, prefill_s=0.5))
    prefill._outbox.put_nowait(first)
    token = second.tokens.add(request_id=submit.request_id, attempt=submit.attempt, index=1, token_id=21, finish=LENGTH)
    token.timing.handoff.CopyFrom(worker_pb2.HandoffTiming(tail_s=0.25, join_s=0.5, step_s=0.125))
    decode._outbox.put_nowait(second)


async def metrics(front: Any) -> dict[str, float]:
    lines = (await front.get("/metrics"))[1].splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


async def test_parts_are_told_to_who_asks_and_sum_to_ttft(cluster: Any, front: Any) -> None:
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]

    async def answer() -> None:
        send(prefill, decode, await prefill.submitted())

    answering = asyncio.create_task(answer())
    async with front.http.post(front.url + COMPLETIONS, json=BODY, headers=ASKED) as response:
        told = (await response.json())["moonpool"]
        header = dict(each.split(";dur=") for each in response.headers["server-timing"].split(", "))
    await answering
    ttft, handoff = told["timing"]["ttft"], told["timing"]["handoff"]
    assert list(ttft) == [*PARTS, "whole_s"]
    assert ttft["whole_s"] == pytest.approx(told["ttft_s"], abs=1e-6)
    assert (ttft["queue_s"], ttft["load_s"], ttft["prefill_s"], ttft["lost_s"]) == (0.25, 0.125, 0.5, 0.0)
    assert ttft["tokenize_s"] == pytest.approx(told["tokenize_s"], abs=1e-6)
    assert ttft["schedule_s"] > 0
    assert (handoff["tail_s"], handoff["join_s"], handoff["step_s"]) == (0.25, 0.5, 0.125)
    assert sums(ttft)
    assert sums(handoff)
    assert {name: float(ms) for name, ms in header.items()} == {
        **{name.removesuffix("_s"): pytest.approx(1000 * ttft[name], abs=0.001) for name in PARTS},
        "ttft": pytest.approx(1000 * ttft["whole_s"], abs=0.001),
        **{
            f"handoff-{name}": pytest.approx(1000 * handoff[f"{name}_s"], abs=0.001)
            for name in ("tail", "join", "step")
        },
        "handoff-delivery": pytest.approx(1000 * handoff["delivery_s"], abs=0.001),
        "handoff": pytest.approx(1000 * handoff["whole_s"], abs=0.001),
    }


async def test_a_stream_tells_ttft_in_its_header_and_all_at_its_end(cluster: Any, front: Any) -> None:
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]

    async def answer() -> None:
        send(prefill, decode, await prefill.submitted())

    answering = asyncio.create_task(answer())
    body = BODY | {"stream": True}
    async with front.http.post(front.url + COMPLETIONS, json=body, headers=ASKED) as response:
        assert "prefill;dur=500.000" in response.headers["server-timing"]
        *_, last, done, _ = (await response.read()).decode().split("\n\n")
    await answering
    assert done == "data: [DONE]"
    timing = json.loads(last.removeprefix("data: "))["moonpool"]["timing"]
    assert sums(timing["ttft"])
    assert timing["handoff"]["join_s"] == 0.5


async def test_nothing_is_told_to_who_does_not_ask(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: ([20, 21], LENGTH))
    for headers in ({}, {"x-moonpool-timing": "0"}):
        async with front.http.post(front.url + COMPLETIONS, json=BODY, headers=headers) as response:
            assert "timing" not in (await response.json())["moonpool"]
            assert "server-timing" not in response.headers
    status, body = await front.post(COMPLETIONS, BODY, headers={"x-moonpool-timing": "yes"})
    assert (status, body["error"]["param"]) == (400, "x-moonpool-timing")
    assert "must be 0 or 1" in body["error"]["message"]


async def test_an_attempt_that_came_to_nothing_is_lost_time(cluster: Any, front: Any, second_pair: Any) -> None:
    task = asyncio.create_task(front.post(COMPLETIONS, BODY, headers=ASKED))
    lost = await cluster.workers["p0"].submitted()
    placed_s = monotonic()
    await asyncio.sleep(WAIT_S)  # that it takes
    cluster.workers["p0"].fail(lost, "engine", retryable=True)
    lost_s = monotonic() - placed_s
    send(second_pair[0], cluster.workers["d0"], await second_pair[0].submitted())
    status, answer = await task
    assert (status, answer["moonpool"]["attempts"]) == (200, 2)
    ttft = answer["moonpool"]["timing"]["ttft"]
    assert ttft["lost_s"] >= lost_s >= WAIT_S
    assert ttft["prefill_s"] == 0.5
    assert sums(ttft)
    seen = await metrics(front)
    assert seen['moonpool:ttft_part_seconds_sum{model_name="tiny",part="lost"}'] == pytest.approx(ttft["lost_s"])


async def test_what_is_lost_after_the_first_token_is_no_part_of_ttft(
    cluster: Any, front: Any, second_pair: Any
) -> None:
    task = asyncio.create_task(front.post(COMPLETIONS, BODY, headers=ASKED))
    prefill = cluster.workers["p0"]
    submit = await prefill.submitted()
    prefill.send(submit, 0, [20], cached=8)
    await front.has_generated(1)
    cluster.workers["d0"].end_stream()
    again = await prefill.submitted()
    prefill.send(again, 1, [21], finish=LENGTH, cached=8)
    timing = (await task)[1]["moonpool"]["timing"]
    assert timing["ttft"]["lost_s"] == 0.0
    assert sums(timing["ttft"])
    assert timing["handoff"] is None


async def test_a_prompts_further_answers_wait_for_the_first_one(cluster: Any, front: Any) -> None:
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    task = asyncio.create_task(front.post(COMPLETIONS, BODY | {"n": 2}, headers=ASKED))
    first = await prefill.submitted()
    await asyncio.sleep(WAIT_S)  # that it takes
    send(prefill, decode, first)
    send(prefill, decode, await prefill.submitted())
    one, other = [told["timing"]["ttft"] for told in (await task)[1]["moonpool"]]
    assert one["sibling_s"] == 0.0
    assert other["sibling_s"] >= WAIT_S
    assert sums(one)
    assert sums(other)


async def test_histograms_of_the_parts_sum_to_those_of_the_whole(cluster: Any, front: Any) -> None:
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    task = asyncio.create_task(front.post(COMPLETIONS, BODY))
    submit = await prefill.submitted()
    await asyncio.sleep(WAIT_S)
    message = worker_pb2.WorkerMessage()
    token = message.tokens.add(request_id=submit.request_id, token_id=20)
    token.timing.CopyFrom(worker_pb2.Timing(queue_s=0.01, load_s=0.01, prefill_s=0.02))
    prefill._outbox.put_nowait(message)
    decode.send(submit, 1, [21], finish=LENGTH)
    await task
    seen = await metrics(front)
    parts = {name: value for name, value in seen.items() if name.startswith("moonpool:ttft_part_seconds_sum")}
    assert len(parts) == len(PARTS)
    whole = seen['vllm:time_to_first_token_seconds_sum{model_name="tiny"}']
    assert sum(parts.values()) == pytest.approx(whole, rel=1e-6)
    assert seen['moonpool:handoff_seconds_count{model_name="tiny"}'] == 0  # its worker told nothing
