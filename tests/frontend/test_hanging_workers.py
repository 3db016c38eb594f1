"""Workers that hang: their streams stay open and silent, and the conductor has stopped hearing of them."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from moonpool_proto.v1 import conductor_pb2, worker_pb2

LENGTH = worker_pb2.FINISH_LENGTH
COMPLETIONS = "/v1/completions"
PROMPT = list(range(10, 20))
BODY = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
IDS = [20, 21, 22, 23]


def suspect(cluster: Any, node_id: str, *, incarnation: int = 1) -> None:
    status = next(s for s in cluster.conductor.cluster.nodes if s.node.node_id == node_id)
    status.suspect, status.node.incarnation = True, incarnation


@pytest.fixture
def exported(front: Any, until: Any) -> Callable[[str], Any]:
    """Waits until the frontend exports this line: then it has looked, or has that many tokens."""
    return lambda line: until(lambda: front.get("/metrics/cluster"), lambda answer: line in answer[1].splitlines())


def tokens(count: int) -> str:
    return f'vllm:generation_tokens_total{{model_name="tiny"}} {count}.0'


def up(node_id: str, role: str, value: int) -> str:
    return f'moonpool:node_up{{model_name="tiny",node="{node_id}",role="{role}"}} {value}.0'


def post(front: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(front.post(COMPLETIONS, BODY))


def ids_in(answer: tuple[int, Any]) -> list[int]:
    status, body = answer
    assert status == 200, body
    return list(body["choices"][0]["token_ids"])


async def test_an_answer_moves_away_from_a_hanging_decode_worker_at_once(
    cluster: Any, front: Any, second_pair: Any, exported: Any, prompt_of: Callable[[Any], list[int]]
) -> None:
    task = post(front)
    prefill, decode = cluster.workers["p0"], cluster.workers["d0"]
    first = await prefill.submitted()
    prefill.send(first, 0, IDS[:1])
    decode.send(first, 1, IDS[1:2])
    await exported(tokens(2))
    suspect(cluster, "d0")
    second = await prefill.submitted()
    assert (second.attempt, prompt_of(second)) == (1, PROMPT + IDS[:2])
    assert list(cluster.conductor.scheduled[1].exclude_nodes) == ["d0"]
    # Should it wake up, it learns that nobody waits for it.
    assert await decode.cancelled(attempt=0) == first.request_id
    prefill.send(second, 2, IDS[2:3])
    second_pair[1].send(second, 3, IDS[3:], finish=LENGTH)
    assert ids_in(await task) == IDS
    await front.quiet()


async def test_a_prompt_moves_away_from_a_hanging_prefill_worker_at_once(
    cluster: Any, front: Any, second_pair: Any
) -> None:
    task = post(front)
    await cluster.workers["p0"].submitted()
    suspect(cluster, "p0")
    second = await second_pair[0].submitted()
    second_pair[0].send(second, 0, IDS[:1])
    cluster.workers["d0"].send(second, 1, IDS[1:], finish=LENGTH)
    assert ids_in(await task) == IDS


async def test_a_prefill_worker_that_hangs_after_the_hand_off_does_not_matter(
    cluster: Any, front: Any, exported: Any
) -> None:
    task = post(front)
    submit = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(submit, 0, IDS[:1])
    cluster.workers["d0"].send(submit, 1, IDS[1:2])
    await exported(tokens(2))
    suspect(cluster, "p0")
    await exported(up("p0", "prefill", 0))
    cluster.workers["d0"].send(submit, 2, IDS[2:], finish=LENGTH)
    answer = await task
    assert (ids_in(answer), answer[1]["moonpool"]["attempts"]) == (IDS, 1)


async def test_a_suspect_that_is_another_incarnation_is_not_the_one_that_serves(
    cluster: Any, front: Any, exported: Any
) -> None:
    task = post(front)
    submit = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(submit, 0, IDS[:1])
    suspect(cluster, "d0", incarnation=2)
    await exported(up("d0", "decode", 0))
    cluster.workers["d0"].send(submit, 1, IDS[1:], finish=LENGTH)
    answer = await task
    assert (ids_in(answer), answer[1]["moonpool"]["attempts"]) == (IDS, 1)


async def test_a_conductor_that_knows_no_nodes_yet_is_no_sign_that_they_hang(cluster: Any, front: Any) -> None:
    task = post(front)
    submit = await cluster.workers["p0"].submitted()
    cluster.workers["p0"].send(submit, 0, IDS[:1])
    cluster.conductor.cluster = conductor_pb2.ClusterReply()
    await front.readiness(503)
    cluster.workers["d0"].send(submit, 1, IDS[1:], finish=LENGTH)
    answer = await task
    assert (ids_in(answer), answer[1]["moonpool"]["attempts"]) == (IDS, 1)


async def test_opening_a_stream_to_a_hanging_worker_is_given_up_at_once(
    cluster: Any, start_front: Any, second_pair: Any
) -> None:
    target = cluster.workers["p0"].ref.target
    await cluster.workers["p0"].stop()
    with socket.socket(socket.AF_UNIX) as hanging:  # connections are made and nobody speaks
        hanging.bind(target.removeprefix("unix:"))
        hanging.listen()
        suspect(cluster, "p0")
        async with start_front(attach_timeout_s=15.0) as front:
            task = post(front)
            second = await second_pair[0].submitted()
            second_pair[0].send(second, 0, IDS[:1])
            cluster.workers["d0"].send(second, 1, IDS[1:], finish=LENGTH)
            assert ids_in(await task) == IDS


async def test_a_new_request_waits_for_the_silent_workers_that_alone_could_serve_it(cluster: Any, front: Any) -> None:
    hanging = conductor_pb2.Rejection(reason="no_nodes", message="d0 silent", may_return=True)
    placed, asked = cluster.placement("p0", "d0"), 0

    def place(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        nonlocal asked
        asked += 1
        return placed if asked > 3 else conductor_pb2.ScheduleReply(rejection=hanging)

    cluster.conductor.place = place
    cluster.answer_with(lambda submit: (IDS, LENGTH))
    answer = await post(front)
    assert (ids_in(answer), answer[1]["moonpool"]["attempts"], asked) == (IDS, 1, 4)


@pytest.mark.parametrize(
    ("limits", "status", "code"),
    [({"replace_grace_s": 0.3}, 503, "no_nodes"), ({"request_timeout_s": 0.3}, 504, "deadline_exceeded")],
)
async def test_that_wait_ends_with_the_grace_or_the_deadline(
    cluster: Any, start_front: Any, limits: dict[str, float], status: int, code: str
) -> None:
    hanging = conductor_pb2.Rejection(reason="no_nodes", message="d0 silent", may_return=True)
    cluster.conductor.place = lambda request: conductor_pb2.ScheduleReply(rejection=hanging)
    async with start_front(**limits) as front:
        answer = await post(front)
        assert (answer[0], answer[1]["error"]["code"]) == (status, code)
        assert len(cluster.conductor.scheduled) > 1


async def test_a_worker_that_wakes_up_is_used_again_over_its_old_stream(
    cluster: Any, front: Any, exported: Any
) -> None:
    cluster.answer_with(lambda submit: (IDS, LENGTH))
    assert ids_in(await post(front)) == IDS
    suspect(cluster, "d0")
    await exported(up("d0", "decode", 0))
    cluster.conductor.cluster.nodes[1].suspect = False
    await exported(up("d0", "decode", 1))
    answer = await post(front)
    assert (ids_in(answer), answer[1]["moonpool"]["attempts"]) == (IDS, 1)
    assert len(cluster.workers["d0"].hellos) == 1
