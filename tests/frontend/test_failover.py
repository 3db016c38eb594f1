"""A request outlives its workers: placed again with what it has, each token told once, or a named error."""

import asyncio
from collections.abc import Callable
from itertools import pairwise
from time import monotonic
from typing import Any

import pytest

from moonpool_proto.v1 import conductor_pb2, worker_pb2

LENGTH, STOP = worker_pb2.FINISH_LENGTH, worker_pb2.FINISH_STOP
COMPLETIONS = "/v1/completions"
PROMPT = list(range(10, 20))
BODY = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True, "seed": 5}
IDS = [20, 21, 22, 23]


def post(front: Any, body: dict[str, Any] = BODY) -> asyncio.Task[Any]:
    return asyncio.create_task(front.post(COMPLETIONS, body))


def ids_in(answer: tuple[int, Any]) -> list[int]:
    status, body = answer
    assert status == 200, body
    return list(body["choices"][0]["token_ids"])


async def test_lost_decode_worker_is_replaced_and_the_rest_generated_elsewhere(
    cluster: Any, front: Any, second_pair: Any, prompt_of: Callable[[Any], list[int]]
) -> None:
    task = post(front)
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    first = await prefill.submitted()
    prefill.send(first, 0, IDS[:1], cached=8)
    decode.send(first, 1, IDS[1:2])
    await front.has_generated(2)
    decode.end_stream()
    # p0 is not suspect: it gets the next attempt, whose decode node is another.
    second = await prefill.submitted()
    assert (second.request_id, second.attempt, second.generated) == (first.request_id, 1, 2)
    assert prompt_of(second) == PROMPT + IDS[:2]
    assert len(second.chain) == 3 * 16
    assert second.chain[: len(first.chain)] == first.chain
    assert second.sampling == first.sampling
    assert second.timeout_s < first.timeout_s
    schedule = cluster.conductor.scheduled[1]
    assert (schedule.attempt, schedule.generated, schedule.max_new_tokens) == (1, 2, 2)
    assert list(schedule.exclude_nodes) == ["d0"]
    retry = await cluster.conductor.completion()
    assert (retry.outcome, retry.attempt, retry.generated) == ("retry", 0, 2)
    prefill.send(second, 2, IDS[2:3], cached=12, approximate=12)
    second_pair[1].send(second, 3, IDS[3:], finish=LENGTH)
    answer = await task
    assert ids_in(answer) == IDS
    stats = answer[1]["moonpool"]
    assert (stats["attempts"], stats["decode_node"]) == (2, "d1")
    assert stats["approximate_tokens"] == 12  # the rest of the answer was made from them
    assert answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert answer[1]["usage"]["completion_tokens"] == 4
    finished = await cluster.conductor.completion()
    assert (finished.outcome, finished.attempt, finished.generated) == ("finished", 1, 4)
    await front.quiet()


async def test_lost_prefill_worker_is_replaced_before_any_token(
    cluster: Any, front: Any, second_pair: Any, prompt_of: Callable[[Any], list[int]]
) -> None:
    task = post(front)
    await cluster.workers["p0"].submitted()
    await cluster.workers["p0"].stop()
    second = await second_pair[0].submitted()
    assert (second.attempt, second.generated, prompt_of(second)) == (1, 0, PROMPT)
    # The decode worker, which is alive, is told to let the lost attempt go.
    assert await cluster.workers["d0"].cancelled() == second.request_id
    second_pair[0].send(second, 0, IDS[:1])
    cluster.workers["d0"].send(second, 1, IDS[1:], finish=LENGTH)
    assert ids_in(await task) == IDS


async def test_prefill_worker_lost_during_the_hand_off_costs_an_attempt(
    cluster: Any, front: Any, second_pair: Any
) -> None:
    task = post(front)
    first = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(first, 0, IDS[:1])
    await front.has_generated(1)
    cluster.workers["p0"].end_stream()
    second = await second_pair[0].submitted()
    assert second.generated == 1
    second_pair[0].send(second, 1, IDS[1:2])
    cluster.workers["d0"].send(second, 2, IDS[2:], finish=LENGTH)
    assert ids_in(await task) == IDS


async def test_prefill_worker_lost_after_the_hand_off_does_not_matter(cluster: Any, front: Any) -> None:
    opening = front.open_stream(COMPLETIONS, BODY)
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    submit = await prefill.submitted()
    prefill.send(submit, 0, IDS[:1])
    stream = await opening
    seen = await front.events_of(stream, 1)
    decode.send(submit, 1, IDS[1:2])
    seen += await front.events_of(stream, 1)
    await prefill.stop()
    decode.send(submit, 2, IDS[2:], finish=LENGTH)
    seen += await stream.read()
    stream.close()
    assert b'"attempts":1' in seen
    assert seen.endswith(b"[DONE]\n\n")
    assert len(cluster.conductor.scheduled) == 1


async def test_retryable_failure_excludes_the_node_it_names(cluster: Any, front: Any, second_pair: Any) -> None:
    task = post(front)
    first = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].fail(first, "reserve", retryable=True, suspect="d0")
    second = await cluster.workers["p0"].submitted()
    assert list(cluster.conductor.scheduled[1].exclude_nodes) == ["d0"]
    cluster.workers["p0"].send(second, 0, IDS[:1])
    second_pair[1].send(second, 1, IDS[1:], finish=LENGTH)
    assert ids_in(await task) == IDS


@pytest.mark.parametrize("pair_alone", [False, True])
async def test_a_path_on_which_kv_does_not_arrive_intact_is_avoided_by_avoiding_both_of_its_ends_if_possible(
    cluster: Any, front: Any, second_pair: Any, pair_alone: bool
) -> None:
    missing = conductor_pb2.ScheduleReply(rejection=conductor_pb2.Rejection(reason="no_nodes", message="none"))
    place = cluster.conductor.place
    if pair_alone:  # there is no second prefill worker
        cluster.conductor.place = lambda request: missing if "p0" in request.exclude_nodes else place(request)
    task = post(front)
    cluster.workers["p0"].fail(await cluster.workers["p0"].submitted(), "unverified", retryable=True, suspect="d0")
    sender = cluster.workers["p0"] if pair_alone else second_pair[0]
    second = await sender.submitted()
    asked = [list(schedule.exclude_nodes) for schedule in cluster.conductor.scheduled]
    assert asked == ([[], ["d0", "p0"], ["d0"]] if pair_alone else [[], ["d0", "p0"]])
    sender.send(second, 0, IDS[:1])
    second_pair[1].send(second, 1, IDS[1:], finish=LENGTH)
    assert ids_in(await task) == IDS


async def test_tokens_of_an_attempt_that_was_given_up_are_not_taken(cluster: Any, front: Any, second_pair: Any) -> None:
    task = post(front)
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    first = await prefill.submitted()
    prefill.fail(first, "internal", retryable=True, suspect="d0")
    second = await prefill.submitted()
    decode.send(first, 0, [99])
    prefill.send(first, 0, [98], finish=LENGTH)
    prefill.send(second, 0, IDS[:1])
    second_pair[1].send(second, 1, IDS[1:], finish=LENGTH)
    assert ids_in(await task) == IDS


async def test_duplicate_tokens_are_ignored_and_counted(cluster: Any, front: Any) -> None:
    task = post(front)
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    submit = await prefill.submitted()
    prefill.send(submit, 0, IDS[:1])
    decode.send(submit, 1, IDS[1:3])
    await front.has_generated(3)
    prefill.send(submit, 0, [77])
    decode.send(submit, 0, [78, 79])
    await front.has_counted("moonpool:duplicate_tokens_total", 3)
    decode.send(submit, 3, IDS[3:], finish=LENGTH)
    assert ids_in(await task) == IDS
    assert 'moonpool:duplicate_tokens_total{model_name="tiny"} 3.0' in (await front.get("/metrics"))[1]


async def test_decode_tokens_that_overtake_the_first_one_wait_for_it(cluster: Any, front: Any) -> None:
    task = post(front)
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    submit = await prefill.submitted()
    decode.send(submit, 2, IDS[2:], finish=LENGTH)
    decode.send(submit, 1, IDS[1:2])
    await front.get("/health")  # a round trip: what was sent before it has been read
    prefill.send(submit, 0, IDS[:1])
    assert ids_in(await task) == IDS


async def test_unreachable_worker_is_excluded(cluster: Any, front: Any, second_pair: Any) -> None:
    await cluster.workers["d0"].stop()
    task = post(front)
    submit = await cluster.workers["p0"].submitted()
    assert submit.attempt == 1
    assert list(cluster.conductor.scheduled[1].exclude_nodes) == ["d0"]
    cluster.workers["p0"].send(submit, 0, IDS[:1])
    second_pair[1].send(submit, 1, IDS[1:], finish=LENGTH)
    assert ids_in(await task) == IDS


async def test_restarted_worker_is_attached_to_anew(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: (IDS, LENGTH))
    assert ids_in(await post(front)) == IDS
    await cluster.workers["d0"].stop()
    await cluster.add("d0", incarnation=2)
    cluster.answer_with(lambda submit: (IDS, LENGTH))
    assert ids_in(await post(front)) == IDS
    assert len(cluster.workers["p0"].hellos) == 1


async def test_attempts_are_limited_and_the_error_tells_the_last_cause(cluster: Any, start_front: Any) -> None:
    prefill = cluster.workers["p0"]

    async def on_submit(submit: worker_pb2.Submit) -> None:
        prefill.fail(submit, "internal", retryable=True)

    prefill.on_submit = on_submit
    async with start_front(max_attempts=3) as front:
        status, body = await post(front)
        assert (status, body["error"]["code"]) == (500, "generation_failed")
        assert "3 attempts" in body["error"]["message"]
        assert "p0: scripted internal" in body["error"]["message"]
        outcomes = [(await cluster.conductor.completion()).outcome for _ in range(3)]
        assert outcomes == ["retry", "retry", "failed"]
        await front.quiet()


async def test_workers_that_cannot_be_reached_cost_no_attempts_until_the_conductor_must_know(
    cluster: Any, start_front: Any
) -> None:
    """As when a rack is gone: for seconds the conductor names one lost node after the other."""

    def gone(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        reply = conductor_pb2.ScheduleReply()
        reply.CopyFrom(cluster.placement("p0", "d0"))
        number = len(request.exclude_nodes)
        reply.placement.prefill.node_id = f"gone-{number}"
        reply.placement.prefill.target = f"unix:/nowhere/gone-{number}.sock"
        return reply

    cluster.answer_with(lambda submit: (IDS, LENGTH))
    cluster.conductor.place = lambda request: (
        gone(request) if len(request.exclude_nodes) < 7 else cluster.placement("p0", "d0")
    )
    async with start_front(max_attempts=2) as front:
        assert ids_in(await post(front)) == IDS
    cluster.conductor.place = gone
    async with start_front(max_attempts=2, replace_grace_s=0.0) as front:
        status, body = await post(front)
        assert (status, body["error"]["code"]) == (500, "generation_failed")
        assert "2 attempts; the last one ended with: gone-1" in body["error"]["message"]


@pytest.fixture
def only_pair(cluster: Any) -> None:
    """There are p0 and d0: where one is excluded, there is no place."""
    missing = conductor_pb2.ScheduleReply(rejection=conductor_pb2.Rejection(reason="no_nodes", message="none"))
    cluster.conductor.place = lambda request: missing if request.exclude_nodes else cluster.placement("p0", "d0")


@pytest.mark.usefixtures("only_pair")
async def test_request_that_lost_its_only_worker_goes_on_as_soon_as_another_incarnation_is_there(
    cluster: Any, start_front: Any
) -> None:
    async with start_front(hold_off_s=15.0) as front:
        task = post(front)
        prefill = cluster.workers["p0"]
        first = await prefill.submitted()
        prefill.send(first, 0, IDS[:1])
        await cluster.workers["d0"].stop()
        assert (await cluster.conductor.completion()).outcome == "retry"
        await cluster.add("d0", incarnation=2)
        cluster.conductor.cluster.nodes[1].node.incarnation = 2
        second = await prefill.submitted()
        assert second.attempt == 1
        asked = [list(schedule.exclude_nodes) for schedule in cluster.conductor.scheduled]
        assert (asked[0], asked[-1]) == ([], [])
        assert all(excluded == ["d0"] for excluded in asked[1:-1])
        told = second.generated  # the end of one stream may overtake a token on the other
        prefill.send(second, told, IDS[told : told + 1])
        cluster.workers["d0"].send(second, told + 1, IDS[told + 1 :], finish=LENGTH)
        assert ids_in(await task) == IDS


@pytest.mark.usefixtures("only_pair")
async def test_the_only_worker_is_asked_again_after_pauses_that_double(cluster: Any, start_front: Any) -> None:
    prefill, at_s = cluster.workers["p0"], []

    async def on_submit(submit: worker_pb2.Submit) -> None:
        at_s.append(monotonic())
        prefill.fail(submit, "internal", retryable=True)

    prefill.on_submit = on_submit
    async with start_front(max_attempts=4, hold_off_s=0.2) as front:
        status, body = await post(front)
    assert (status, body["error"]["code"]) == (500, "generation_failed")
    pauses = [later - sooner for sooner, later in pairwise(at_s)]
    assert len(pauses) == 3
    assert all(pause > limit for pause, limit in zip(pauses, (0.2, 0.4, 0.8), strict=True))


@pytest.mark.usefixtures("only_pair")
async def test_waiting_for_the_only_worker_ends_at_the_requests_deadline(cluster: Any, start_front: Any) -> None:
    async with start_front(hold_off_s=15.0, request_timeout_s=1.0) as front:
        task = post(front)
        cluster.workers["p0"].fail(await cluster.workers["p0"].submitted(), "internal", retryable=True)
        status, body = await task
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert cluster.workers["p0"].submits.empty()


async def test_no_place_left_is_a_named_error_after_the_grace(cluster: Any, start_front: Any) -> None:
    placed = cluster.placement("p0", "d0")
    missing = conductor_pb2.ScheduleReply(rejection=conductor_pb2.Rejection(reason="no_nodes", message="all are gone"))
    cluster.conductor.place = lambda request: placed if request.attempt == 0 else missing
    async with start_front(replace_grace_s=0.3) as front:
        task = post(front)
        await cluster.workers["p0"].submitted()
        cluster.workers["p0"].end_stream()
        status, body = await task
        assert (status, body["error"]["code"], body["error"]["message"]) == (503, "no_nodes", "all are gone")


async def test_conductor_away_for_a_moment_is_waited_for(cluster: Any, front: Any) -> None:
    cluster.answer_with(lambda submit: (IDS, LENGTH))
    await cluster.stop_conductor()
    task = post(front)
    assert "conductor does not answer" in (await front.readiness(503))[1]

    assert not task.done()
    await cluster.start_conductor()
    assert ids_in(await task) == IDS
    await front.readiness(200)


async def test_running_request_does_not_need_the_conductor(cluster: Any, front: Any) -> None:
    task = post(front)
    submit = await cluster.workers["p0"].submitted()
    await cluster.stop_conductor()
    cluster.workers["p0"].send(submit, 0, IDS[:1])
    cluster.workers["d0"].send(submit, 1, IDS[1:], finish=LENGTH)
    assert ids_in(await task) == IDS
    await cluster.start_conductor()
    # The last word is kept until the conductor is back.
    assert (await cluster.conductor.completion()).outcome == "finished"


async def test_conductor_away_for_good_ends_at_the_deadline(cluster: Any, start_front: Any) -> None:
    await cluster.stop_conductor()
    async with start_front(request_timeout_s=0.5) as front:
        status, body = await post(front)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


async def test_silent_worker_ends_at_the_deadline_with_what_there_is(cluster: Any, start_front: Any) -> None:
    async with start_front(request_timeout_s=2.0) as front:
        task = asyncio.create_task(front.events(COMPLETIONS, BODY))
        submit = await cluster.workers["p0"].submitted()
        cluster.workers["p0"].send(submit, 0, IDS[:1])
        *_, last = await task
        assert last["error"]["code"] == "deadline_exceeded"
        assert "1 tokens generated, on p0 and d0" in last["error"]["message"]
        assert await cluster.workers["d0"].cancelled() == submit.request_id
        assert (await cluster.conductor.completion()).outcome == "failed"
        status, body = await post(front)
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


async def test_worker_silent_between_tokens_is_suspected(cluster: Any, start_front: Any, second_pair: Any) -> None:
    async with start_front(idle_timeout_s=0.3) as front:
        task = post(front)
        first = await cluster.workers["p0"].submitted()
        cluster.workers["p0"].send(first, 0, IDS[:1])
        second = await cluster.workers["p0"].submitted()
        assert (second.generated, list(cluster.conductor.scheduled[1].exclude_nodes)) == (1, ["d0"])
        cluster.workers["p0"].send(second, 1, IDS[1:2])
        second_pair[1].send(second, 2, IDS[2:], finish=LENGTH)
        assert ids_in(await task) == IDS


async def test_first_token_that_ends_the_request_needs_no_decode_worker(cluster: Any, front: Any) -> None:
    task = post(front)
    submit = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(submit, 0, [3], finish=STOP)
    answer = await task
    assert ids_in(answer) == [3]
    assert answer[1]["choices"][0]["finish_reason"] == "stop"


async def test_text_goes_on_seamlessly_over_attempts(cluster: Any, front: Any, ids_of: Any, second_pair: Any) -> None:
    ids = ids_of("a🎉b")
    assert len(ids) > 3
    task = post(front, {"prompt": "x", "max_tokens": len(ids)})
    first = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(first, 0, ids[:1])
    cluster.workers["d0"].send(first, 1, ids[1:2])  # ends inside the emoji
    await front.has_generated(2)
    cluster.workers["d0"].end_stream()
    second = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(second, 2, ids[2:3])
    second_pair[1].send(second, 3, ids[3:], finish=LENGTH)
    assert (await task)[1]["choices"][0]["text"] == "a🎉b"


async def test_what_is_logged_of_a_stream_names_its_request(
    cluster: Any, front: Any, second_pair: Any, log_lines: Callable[[], list[dict[str, Any]]]
) -> None:
    streaming = asyncio.create_task(front.events(COMPLETIONS, BODY))
    first = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(first, 0, IDS[:1])
    cluster.workers["d0"].end_stream()
    second = await cluster.workers["p0"].submitted()
    told = second.generated  # the end of one stream may overtake a token on the other
    cluster.workers["p0"].send(second, told, IDS[told : told + 1])
    second_pair[1].send(second, told + 1, IDS[told + 1 :], finish=LENGTH)
    await streaming
    lines = {line["message"]: line for line in log_lines() if "request_id" in line}
    ended = next(line for message, line in lines.items() if message.startswith("attempt ended"))
    assert (ended["request_id"], ended["attempt"], ended["suspect"]) == (first.request_id, 0, "d0")
    last = lines["request finished"]
    assert (last["request_id"], last["attempts"], last["generated"]) == (first.request_id, 2, 4)
