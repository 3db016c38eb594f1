"""Quotas of a keys file at a real frontend: what is refused and told, given back, settled, and changed."""

import asyncio
import hashlib
from collections import Counter
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
    async with start_front(api_keys_file=write(requests_per_minute=2), metrics_show_tenants=True) as front:
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


async def test_invalid_requests_count_and_take_no_tokens(start_front: Any, cluster: Any, write: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    path = write(requests_per_minute=5, tokens_per_minute=20, max_concurrent=1)
    async with start_front(api_keys_file=path, max_body_nbytes=10_000) as front:
        invalid: list[tuple[Any, int]] = [
            (BODY | {"temperature": -1}, 400),
            (BODY | {"model": "another"}, 404),
            (BODY | {"prompt": "x" * 20_000}, 413),
            ({}, 400),
        ]
        for body, expected in invalid:
            status, headers, _ = await post(front, body)
            assert status == expected
        assert (await post(front))[0] == 200, "the tokens are all there"
        statuses = [(await post(front, invalid[at % 4][0]))[0] for at in range(60)]
        assert statuses == [429] * 60
        status, headers, answer = await post(front)
        assert (status, answer["error"]["code"]) == (429, "quota_requests")
        assert 1 <= int(headers["retry-after"]) <= 12, "however many were refused"
        await front.quiet()


async def test_sixty_bad_requests_of_five_a_minute_get_five_answers(start_front: Any, cluster: Any, write: Any) -> None:
    async with start_front(api_keys_file=write(requests_per_minute=5)) as front:
        bodies = [{"prompt": "a", "guided_regex": "("}, {"prompt": "a " * 600}, {"prompt": "a", "x": "\ud800"}]
        seen = Counter([(await post(front, bodies[at % 3]))[0] for at in range(60)])
        assert seen == {400: 5, 429: 55}


async def test_a_grammar_that_only_a_worker_refuses_counts(start_front: Any, cluster: Any, write: Any) -> None:
    async with start_front(api_keys_file=write(requests_per_minute=1)) as front:
        asked = asyncio.create_task(post(front))
        worker = cluster.workers["p0"]
        worker.fail(await worker.submitted(), "bad_grammar", retryable=False)
        assert (await asked)[0] == 400
        assert (await post(front))[0] == 429


async def test_a_client_that_leaves_before_its_body_is_complete_is_counted(
    start_front: Any, cluster: Any, write: Any, until: Any
) -> None:
    async with start_front(api_keys_file=write(requests_per_minute=1)) as front:
        host, port = front.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 90\r\n\r\n"
        writer.write(head.encode() + b'{"prompt"')
        await writer.drain()
        await until(front.validation, lambda answer: answer["counts"]["body_bytes"] > 0)
        writer.close()
        await front.quiet()
        assert (await post(front))[0] == 429


async def test_who_is_refused_by_the_cluster_gets_its_share_back(start_front: Any, cluster: Any, write: Any) -> None:
    cluster.answer_with(lambda submit: ([20], worker_pb2.FINISH_LENGTH))
    async with start_front(api_keys_file=write(requests_per_minute=1, tokens_per_minute=20)) as front:
        place = cluster.conductor.place
        for reason, expected in (("ttft", 429), ("no_nodes", 503)):
            rejection = conductor_pb2.Rejection(reason=reason, retry_after_s=1.0)
            cluster.conductor.place = lambda request, rejection=rejection: conductor_pb2.ScheduleReply(
                rejection=rejection
            )
            for _ in range(3):
                status, _, answer = await post(front)
                assert (status, answer["error"]["code"]) == (expected, reason)
        cluster.conductor.place = place
        assert (await post(front))[0] == 200
        assert (await post(front))[0] == 429


async def test_a_rejection_by_the_requests_own_objective_counts(start_front: Any, cluster: Any, write: Any) -> None:
    rejection = conductor_pb2.Rejection(reason="ttft", retry_after_s=1.0)
    cluster.conductor.place = lambda request: conductor_pb2.ScheduleReply(rejection=rejection)
    own = {**HEADERS, "x-slo-ttft-ms": "0.001"}
    async with start_front(api_keys_file=write(requests_per_minute=2)) as front:
        codes = []
        for _ in range(3):
            _, answer = await front.post("/v1/completions", BODY, headers=own)
            codes.append(answer["error"]["code"])
        assert codes == ["ttft", "ttft", "quota_requests"]


TOKENIZING = [
    ("/tokenize", {"prompt": "the quick brown fox"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "the quick brown fox"}]}),
    ("/detokenize", {"tokens": [5] * 20}),
]


@pytest.mark.parametrize(("path", "body"), TOKENIZING)
async def test_tokenizing_is_charged_a_request_and_its_tokens(
    start_front: Any, write: Any, path: str, body: Any
) -> None:
    path_of_keys = write(requests_per_minute=3, tokens_per_minute=6000)
    async with start_front(api_keys_file=path_of_keys) as front:

        async def call(body: Any) -> tuple[int, Any, Any]:
            async with front.http.post(front.url + path, json=body, headers=HEADERS) as response:
                return response.status, response.headers, await response.json()

        status, headers, answer = await call(body)
        assert status == 200
        used = answer["count"] if path == "/tokenize" else 20
        assert headers["x-ratelimit-remaining-requests"] == "2"
        assert 6000 - used <= int(headers["x-ratelimit-remaining-tokens"]) <= 6000 - used + 100
        assert (await call({}))[0] == 400
        assert (await call(body | {"model": "another"}))[0] == 404
        status, _, answer = await call(body)
        assert (status, answer["error"]["code"]) == (429, "quota_requests")
        assert (await front.quiet())["counts"]["body_bytes"] == 0


async def test_tokenizing_that_overdraws_the_tokens_is_followed_by_refusals(start_front: Any, write: Any) -> None:
    async with start_front(api_keys_file=write(tokens_per_minute=100)) as front:
        statuses = [(await front.post("/detokenize", {"tokens": [5] * 400}, headers=HEADERS))[0] for _ in range(3)]
        assert statuses == [200, 429, 429]


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
