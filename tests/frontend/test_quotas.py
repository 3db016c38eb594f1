"""Quotas of a keys file at a real frontend: what is refused and told, given back, settled, and changed."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from moonpool_proto.v1 import conductor_pb2, worker_pb2

KEY = "mp-acme-secret"
HEADERS = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": [20, 21, 22], "max_tokens": 5}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def put(**quota: int) -> Path:
        entry = {"name": "a", "hash": "sha256:" + hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "acme", **quota}
        (tmp_path / "new").write_text(yaml.safe_dump({"keys": [entry]}))
        return (tmp_path / "new").replace(tmp_path / "keys.yaml")

    return put


async def post(front: Any, body: Any = BODY) -> tuple[int, Any, Any]:
    async with front.http.post(f"{front.url}/v1/completions", json=body, headers=HEADERS) as response:
        return response.status, response.headers, await response.json()


async def test_requests_over_the_rate_are_refused_and_counted(start_front: Any, cluster: Any, write: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(api_keys_file=write(requests_per_minute=2)) as front:
        status, headers, _ = await post(front)
        assert status == 200
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert (await post(front))[0] == 200
        status, headers, answer = await post(front)
        assert (status, answer["error"]["code"]) == (429, "quota_requests")
        assert 1 <= int(headers["retry-after"]) <= 30
        assert headers["x-ratelimit-remaining-requests"] == "0"
        _, metrics = await front.get("/metrics")
        assert 'moonpool:quota_rejected_total{reason="quota_requests",tenant="acme"} 1.0' in metrics
        await front.quiet()


async def test_tokens_are_settled_by_what_was_used(start_front: Any, cluster: Any, write: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(api_keys_file=write(tokens_per_minute=1000)) as front:
        _, headers, _ = await post(front, BODY | {"max_tokens": 400})
        assert int(headers["x-ratelimit-remaining-tokens"]) <= 1000 - 403 + 100  # while it ran
        _, headers, answer = await post(front)
        assert answer["usage"]["total_tokens"] == 4
        assert int(headers["x-ratelimit-remaining-tokens"]) >= 1000 - 4 - 8  # 4 of the first, 8 reserved by this one
        status, _, answer = await post(front, BODY | {"max_tokens": 500})
        assert status == 200, answer


async def test_more_at_a_time_than_allowed_are_refused_until_one_ends(
    start_front: Any, cluster: Any, write: Any
) -> None:
    async with start_front(api_keys_file=write(max_concurrent=1)) as front:
        first = asyncio.create_task(post(front))
        submit = await cluster.workers["p0"].submitted()
        status, _, answer = await post(front)
        assert (status, answer["error"]["code"]) == (429, "quota_concurrent")
        cluster.workers["p0"].send(submit, 0, [20], finish=2)
        assert (await first)[0] == 200
        second = asyncio.create_task(post(front))
        submit = await cluster.workers["p0"].submitted()
        cluster.workers["p0"].send(submit, 0, [20], finish=2)
        assert (await second)[0] == 200


async def test_a_stream_that_its_client_leaves_gives_its_place_back(
    start_front: Any, cluster: Any, write: Any, until: Any
) -> None:
    async with start_front(api_keys_file=write(max_concurrent=1)) as front:
        stream = asyncio.create_task(
            front.http.post(f"{front.url}/v1/completions", json=BODY | {"stream": True}, headers=HEADERS)
        )
        submit = await cluster.workers["p0"].submitted()
        cluster.workers["p0"].send(submit, 0, [20])
        (await stream).close()
        await front.quiet()
        cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
        await until(lambda: post(front), lambda answer: answer[0] == 200)


async def test_who_is_refused_for_another_reason_gets_its_share_back(
    start_front: Any, cluster: Any, write: Any
) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(api_keys_file=write(requests_per_minute=1, tokens_per_minute=20)) as front:
        for _ in range(3):
            assert (await post(front, BODY | {"temperature": -1}))[0] == 400
            assert (await post(front, BODY | {"model": "another"}))[0] == 404
        place = cluster.conductor.place
        rejection = conductor_pb2.Rejection(reason="ttft", retry_after_s=1.0)
        cluster.conductor.place = lambda request: conductor_pb2.ScheduleReply(rejection=rejection)
        for _ in range(3):
            status, _, answer = await post(front)
            assert (status, answer["error"]["code"]) == (429, "ttft")
        cluster.conductor.place = place
        assert (await post(front))[0] == 200
        assert (await post(front))[0] == 429


async def test_a_changed_quota_holds_without_a_restart(start_front: Any, cluster: Any, write: Any, until: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(api_keys_file=write(requests_per_minute=1)) as front:
        assert (await post(front))[0] == 200
        assert (await post(front))[0] == 429
        write(requests_per_minute=1000)
        _, headers, _ = await until(lambda: post(front), lambda answer: answer[0] == 200)
        assert headers["x-ratelimit-limit-requests"] == "1000"
        write()
        await until(lambda: post(front), lambda answer: "x-ratelimit-limit-requests" not in answer[1])
