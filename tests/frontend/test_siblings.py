"""A sibling's KV is named in the answer, and asked for only from workers that know it."""

from typing import Any

import pytest

from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2

BODY = {"prompt": [5, 6, 7, 8] * 8, "max_tokens": 3}


@pytest.mark.parametrize("old", ["", "p0", "d0"])
async def test_only_workers_that_know_siblings_are_asked_for_it(front: Any, cluster: Any, old: str) -> None:
    submits: list[worker_pb2.Submit] = []

    def place(request: conductor_pb2.ScheduleRequest) -> conductor_pb2.ScheduleReply:
        reply = cluster.placement("p0", "d0")
        reply.placement.sibling.num_blocks = 2
        return reply

    def answer(submit: worker_pb2.Submit) -> tuple[list[int], int]:
        submits.append(submit)
        return [20, 21, 22], worker_pb2.FINISH_LENGTH

    cluster.conductor.place = place
    cluster.answer_with(answer)
    if old:
        cluster.workers[old].software = common_pb2.Software(version="0.0.9", wire=3)
    status, body = await front.post("/v1/completions", BODY)
    assert status == 200, body
    assert submits[0].placement.HasField("sibling") == (not old)
    assert body["moonpool"]["sibling_tokens"] == 0  # as the worker said
