"""Bad input of every kind against a real cluster: a clear error, nothing else disturbed, nothing lost.

"Nothing else disturbed" is the fixture `undisturbed`: good requests run all the while and afterwards with no wrong
token, no process was restarted, and at rest nothing is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import numpy as np
import psutil
import pytest

from engine.random_model import RandomModelSpec, write_random_model
from frontend.conductor import ConductorStream
from messenger.frames import (
    Hello,
    Read,
    Refused,
    encode,
)
from messenger.sockets import SocketLink
from moonpool_proto.v1 import common_pb2, conductor_pb2, pool_pb2, worker_pb2
from rpc.control import CallRefused
from tests.e2e.unauthorised_peer import GREETING, NOISES, answer, dialled, greeted, reason_of_rejection, rows

Moonpool = Callable[..., subprocess.CompletedProcess[str]]
AssertRefused = Callable[..., None]
TRACE_ROW = '{"timestamp": 0, "input_length": 600, "output_length": 64, "hash_ids": [0, 1]}'
WORKERS = ("prefill-0", "decode-0")
POOLS = ("pool-0", "pool-1")


@pytest.fixture(scope="module")
def cluster(random_model: Path, start_cluster: Callable[..., Any]) -> Iterator[Any]:
    # Two pool nodes stand for two hosts: KV goes over TCP between them and over shared memory within each.
    with start_cluster(random_model, "--block-tokens", "8", "--pool-nodes", "2") as running:
        yield running


@pytest.fixture
async def undisturbed(
    cluster: Any, random_model: Path, judge_of: Callable[[Path], Any], session: aiohttp.ClientSession
) -> AsyncIterator[None]:
    def processes() -> dict[str, tuple[int, int]]:
        cluster.reload()
        return {name: (node["pid"], node["restarts"]) for name, node in cluster.ready["nodes"].items()}

    async def ask(number: int) -> Any:
        prompt = np.random.default_rng(number % 4).integers(5, 2000, 90).tolist()
        return await cluster.complete(session, prompt, max_tokens=32, ignore_eos=True, temperature=0.0)

    async def keep_asking() -> list[Any]:
        answers = [await ask(0)]
        started.set()
        while not over.is_set():
            answers.append(await ask(len(answers)))
        return answers

    before = processes()
    started, over = asyncio.Event(), asyncio.Event()
    asking = asyncio.create_task(keep_asking())
    await asyncio.wait([asking, asyncio.create_task(started.wait())], return_when=asyncio.FIRST_COMPLETED)
    yield
    over.set()
    answers = [*await asking, await ask(0)]
    judge = judge_of(random_model)
    assert [judge.wrong_tokens(answer) for answer in answers] == [[] for _ in answers]
    assert processes() == before
    await cluster.validate()


# The command line


async def test_a_port_in_use_is_told_and_its_owner_serves_on(
    moonpool: Moonpool, assert_refused: AssertRefused, cluster: Any, undisturbed: None
) -> None:
    port = cluster.url.rpartition(":")[2]
    done = await asyncio.to_thread(moonpool, "serve", "--port", port)
    assert_refused(done, f"port {port} on 127.0.0.1 is in use", "--port 0 takes a free one")
    assert "Starting" not in done.stderr


# HTTP

GOOD = {"prompt": "the fox", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
BAD_REQUESTS: list[tuple[str, bytes, int, str | None, str | None, str]] = [
    ("/v1/completions", b'{"prompt": "the', 400, None, None, "JSON"),
    ("/v1/completions", b"\xff\xfe\x00", 400, None, None, "JSON"),
    ("/v1/completions", json.dumps(GOOD | {"model": "gpt-4"}).encode(), 404, "model", "model_not_found", "'gpt-4'"),
    (
        "/v1/chat/completions",
        json.dumps(CHAT | {"model": "gpt-4"}).encode(),
        404,
        "model",
        "model_not_found",
        "'gpt-4'",
    ),
    ("/v1/completions", json.dumps(GOOD | {"max_tokens": -1}).encode(), 400, "max_tokens", None, "greater"),
    ("/v1/completions", json.dumps(GOOD | {"max_tokens": "16"}).encode(), 400, "max_tokens", None, "integer"),
    ("/v1/completions", json.dumps(GOOD | {"temperature": "hot"}).encode(), 400, "temperature", None, "number"),
    ("/v1/completions", json.dumps(GOOD | {"prompt": {"a": 1}}).encode(), 400, "prompt", None, "prompt"),
    ("/v1/completions", json.dumps(GOOD | {"prompt": [1, 999_999]}).encode(), 400, "prompt", None, "999999"),
    (
        "/v1/completions",
        json.dumps(GOOD | {"use_beam_search": True}).encode(),
        400,
        "use_beam_search",
        "unsupported_parameter",
        "not supported",
    ),
    (
        "/v1/completions",
        json.dumps(GOOD | {"prompt": [7] * 2048}).encode(),
        400,
        "prompt",
        "context_length_exceeded",
        "2048",
    ),
    (
        "/v1/chat/completions",
        json.dumps(CHAT | {"messages": [{"role": "user", "content": "word " * 9000}]}).encode(),
        400,
        "messages",
        "context_length_exceeded",
        "2048",
    ),
    ("/v1/chat/completions", json.dumps({"messages": "hi"}).encode(), 400, "messages", None, "array"),
    ("/v1/embeddings", b"{}", 404, None, "endpoint_not_served", "/v1/embeddings"),
]


async def test_bad_requests_are_answered_in_openais_shape(
    cluster: Any, undisturbed: None, session: aiohttp.ClientSession
) -> None:
    for path, body, status, param, code, said in BAD_REQUESTS:
        async with session.post(f"{cluster.url}{path}", data=body) as response:
            answer = await response.json()
        told = f"{path} {body[:80]!r}: {answer}"
        assert response.status == status, told
        assert set(answer["error"]) == {"message", "type", "param", "code"}, told
        assert answer["error"]["type"] == "invalid_request_error", told
        assert (answer["error"]["param"], answer["error"]["code"]) == (param, code), told
        assert said in answer["error"]["message"], told


async def test_bytes_that_are_no_http_end_their_own_connection_only(cluster: Any, undisturbed: None) -> None:
    port = int(cluster.url.rpartition(":")[2])
    for noise in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        os.urandom(4096),
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(noise)
        with contextlib.suppress(OSError):
            writer.write_eof()
            async with asyncio.timeout(20):
                answer = await reader.read()
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


# Messenger: the sockets that KV goes through


def service(name: str) -> str:
    return f"/moonpool.v1.{name}"


async def incarnation(cluster: Any, node: str) -> int:
    """Return the incarnation of the node, as its State reports."""
    kind = "Pool" if node in POOLS else "Worker"
    async with grpc.aio.insecure_channel(f"unix:{cluster.ready['run_dir']}/{node}.sock") as channel:
        reply = await channel.unary_unary(service(f"{kind}/State"))(b"", timeout=20)
    return int(json.loads(common_pb2.JsonReply.FromString(reply).json)["incarnation"])


def messenger_addresses(cluster: Any, node: str) -> list[int | str]:
    """The TCP port and the unix socket on which the node's messenger listens, as the kernel tells."""
    process = psutil.Process(cluster.pid(node))
    ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    paths = {c.laddr for c in process.net_connections("unix") if Path(c.laddr or "").name.startswith("m-")}
    assert (len(ports), len(paths)) == (1, 1)
    return [*ports, *paths]


def log_of(cluster: Any, node: str) -> str:
    return Path(cluster.ready["nodes"][node]["log"]).read_text()


async def wait_logged(cluster: Any, node: str, what: str, count: int) -> None:
    """Wait until the node's log, which the supervisor writes a moment later, has `what` so often."""
    async with asyncio.timeout(20):
        while log_of(cluster, node).count(what) < count:
            await asyncio.sleep(0.02)


async def test_garbage_on_every_messenger_socket_ends_its_own_connection_with_a_reason(
    cluster: Any, undisturbed: None
) -> None:
    def harass(address: int | str, greeting: Hello) -> None:
        for noise in NOISES.values():
            with dialled(address) as raw:
                raw.sendall(noise)
                assert reason_of_rejection(SocketLink(raw, "node"))
        with dialled(address) as raw:
            link = greeted(raw, greeting)
            link.send(Read(1, 1, 1, -4, rows(0, -4)))
            assert reason_of_rejection(link)
        with dialled(address) as raw:  # a frame cut off in its middle
            raw.sendall(encode(greeting)[:-3])

    for node in (*WORKERS, *POOLS):
        greeting = GREETING._replace(peer_node_id=node, peer_incarnation=await incarnation(cluster, node))
        for address in messenger_addresses(cluster, node):
            await asyncio.to_thread(harass, address, greeting)
        # One line a minute for each host, the unix socket and the greeted stranger.
        await wait_logged(cluster, node, "messenger.inbound: closed the", 3)
        assert "Traceback" not in log_of(cluster, node)


async def test_a_stranger_without_the_key_reads_nothing(cluster: Any, undisturbed: None) -> None:
    def guess(address: int | str, greeting: Hello) -> str:
        with dialled(address) as raw:
            link = greeted(raw, greeting)
            link.send(Read(1, 1, 0x1234, 4096, rows(0, 4096)))
            refused = answer(link)
            assert isinstance(refused, Refused)
            return refused.reason

    for node in (*WORKERS, *POOLS):
        greeting = GREETING._replace(peer_node_id=node, peer_incarnation=await incarnation(cluster, node))
        for address in messenger_addresses(cluster, node):
            assert await asyncio.to_thread(guess, address, greeting)


# gRPC: the sockets that requests go through


SCHEDULE = conductor_pb2.ScheduleRequest(request_id="r", model="gpt-4", prompt_tokens=10, max_new_tokens=5)
CALLS: list[tuple[str, str, bytes, bool, set[str], str]] = [
    ("conductor", service("Conductor/Schedule"), b"\xff garbage", True, {"UNKNOWN", "INTERNAL"}, ""),
    ("conductor", service("Conductor/Join"), b"", True, {"INVALID_ARGUMENT"}, "must name the node"),
    ("conductor", service("Conductor/Nope"), b"", False, {"UNIMPLEMENTED"}, "not found"),
    ("prefill-0", service("Worker/Attach"), b"\xff garbage", True, {"UNKNOWN", "INTERNAL"}, "FrontendMessage"),
    (
        "prefill-0",
        service("Worker/Attach"),
        worker_pb2.FrontendMessage(cancel=worker_pb2.Cancel(request_id="r", attempt=1)).SerializeToString(),
        True,
        {"INVALID_ARGUMENT"},
        "must be `hello`",
    ),
    (
        "prefill-0",
        service("Worker/Reserve"),
        b"",
        False,
        {"FAILED_PRECONDITION"},
        "unknown_model: model must be '{model}' on prefill-0",
    ),
    (
        "decode-0",
        service("Worker/Reserve"),
        b"",
        False,
        {"FAILED_PRECONDITION"},
        "unknown_model: model must be '{model}' on decode-0",
    ),
    ("decode-0", service("Worker/Reserve"), b"\xff garbage", False, {"UNKNOWN", "INTERNAL"}, "ReserveRequest"),
    ("pool-0", service("Pool/Allocate"), b"\xff garbage", False, {"UNKNOWN", "INTERNAL"}, "AllocateRequest"),
    ("pool-0", service("Pool/Allocate"), b"", False, {"INVALID_ARGUMENT"}, "KvSpec has no groups"),
    (
        "pool-0",
        service("Pool/Pin"),
        pool_pb2.PinRequest().SerializeToString(),
        False,
        {"INVALID_ARGUMENT"},
        "expected 16",
    ),
]


async def test_malformed_calls_are_refused_by_name(cluster: Any, undisturbed: None) -> None:
    async def call(target: str, method: str, message: bytes, is_stream: bool) -> None:
        async with grpc.aio.insecure_channel(target) as channel:
            if is_stream:
                async for _ in channel.stream_stream(method)(iter([message]), timeout=20):
                    pass
            else:
                await channel.unary_unary(method)(message, timeout=20)

    for node, method, message, is_stream, codes, said in CALLS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(f"unix:{cluster.ready['run_dir']}/{node}.sock", method, message, is_stream)
        told = f"{node} {method}: {caught.value.code()} {caught.value.details()}"
        assert caught.value.code().name in codes, told
        assert said.format(model=cluster.ready["model"]) in str(caught.value.details()), told
    await wait_logged(cluster, "pool-0", "malformed call of /moonpool.v1.Pool/Allocate rejected", 1)
    assert not [node for node in ("conductor", *WORKERS, *POOLS) if "Traceback" in log_of(cluster, node)]


async def test_an_unknown_model_is_rejected_by_the_conductor_and_a_request_without_id_refused(
    cluster: Any, undisturbed: None
) -> None:
    line = ConductorStream(f"unix:{cluster.ready['run_dir']}/conductor.sock")
    async with asyncio.timeout(60):  # for half a minute after a start its workers might still be on their way
        while (reply := await line.schedule(SCHEDULE, waits=False, deadline_s=20)).rejection.reason == "no_nodes":
            await asyncio.sleep(0.5)
    assert reply.rejection.reason == "unknown_model"
    assert "gpt-4" in reply.rejection.message
    with pytest.raises(CallRefused, match="request_id is empty"):
        await line.schedule(conductor_pb2.ScheduleRequest(), waits=False, deadline_s=20)
    await line.close()


async def test_garbage_on_every_grpc_socket_ends_its_own_connection_only(cluster: Any, undisturbed: None) -> None:
    def harass(path: str) -> None:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500):
            with dialled(path) as raw, contextlib.suppress(ConnectionError):
                raw.sendall(noise)
                while raw.recv(65536):
                    pass

    for node in ("conductor", *WORKERS, *POOLS):
        await asyncio.to_thread(harass, f"{cluster.ready['run_dir']}/{node}.sock")


# Replay


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([TRACE_ROW, TRACE_ROW, "{oops"], ["line 3", "expected one JSON object per line"]),
        ([TRACE_ROW, '{"timestamp": 5, "input_length": 600, "output_length": 1}'], ["line 2", "no 'hash_ids'"]),
        ([TRACE_ROW, TRACE_ROW.replace("[0, 1]", "[0]")], ["line 2", "hash_ids"]),
    ],
)
async def test_a_malformed_trace_row_is_told_with_its_line(
    moonpool: Moonpool, assert_refused: AssertRefused, cluster: Any, tmp_path: Path, rows: list[str], said: list[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(rows) + "\n")
    done = await asyncio.to_thread(moonpool, "replay", trace, "--url", cluster.url, "--out", tmp_path / "out")
    assert_refused(done, "trace.jsonl", *said)
    assert not (tmp_path / "out").exists()


async def test_a_replay_of_another_models_text_is_refused(
    moonpool: Moonpool,
    assert_refused: AssertRefused,
    cluster: Any,
    undisturbed: None,
    tmp_path: Path,
    random_model: Path,
) -> None:
    # The same words, two of them with each other's ids.
    other = write_random_model(tmp_path / "other", RandomModelSpec(vocab=2048), tokenizer=random_model)
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    ids = tokenizer["model"]["vocab"]
    ids["Ġthe"], ids["Ġand"] = ids["Ġand"], ids["Ġthe"]
    file.write_text(json.dumps(tokenizer))
    arguments = ("--url", cluster.url, "--model-path", other, "--out", tmp_path / "out", "--limit", "3")
    done = await asyncio.to_thread(moonpool, "replay", "conversation", *arguments)
    assert_refused(done, "uses a different tokenizer", "--model-path")


async def test_a_replay_of_a_model_that_is_not_served_names_those_that_are(
    moonpool: Moonpool, assert_refused: AssertRefused, cluster: Any, tmp_path: Path
) -> None:
    arguments = ("--url", cluster.url, "--model", "gpt-4", "--out", tmp_path / "out")
    done = await asyncio.to_thread(moonpool, "replay", "conversation", *arguments)
    assert_refused(done, repr(cluster.ready["model"]), "not 'gpt-4'")
