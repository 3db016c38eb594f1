"""FuzzTarget: HTTP requests to the API server's application, with scripted workers behind it."""

import asyncio
import json
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack

from frontend.api.app import build_app
from frontend.config import FrontendConfig, ServedModelConfig
from frontend.service import Service, load_tokenizers
from moonpool_proto.v1 import common_pb2, conductor_pb2, worker_pb2
from moonpool_proto.v1.conductor_pb2_grpc import ConductorServicer, add_ConductorServicer_to_server
from moonpool_proto.v1.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from rpc.control import start_server
from settings.keys import assemble
from settings.worker import BUNDLED_MODEL
from tools.fuzz import mutation
from tools.fuzz.target import FuzzTarget, Misjudged

_ROUTES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/tokenize", "/detokenize", "/v1/models", "/v1/models/m", "/health",
    "/live", "/ready", "/version", "/validate", "/metrics", "/openapi.json", "/console", "/console/data", "/",
)  # fmt: skip
_USER = [{"role": "user", "content": "hi"}]
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
_WORDS = (
    "prompt", "messages", "max_tokens", "stream", "n", "stop", "logprobs", "top_logprobs", "echo", "logit_bias",
    "tools",
    "tool_choice", "response_format", "json_schema", "guided_regex", "guided_choice", "structured_outputs", "seed",
    "user",
    "role", "content", "type", "text", "function", "name", "parameters", "temperature", "min_p", "ignore_eos", "m",
    "auto",
    "required", "none", "stream_options", "include_usage", "return_token_ids", "prompt_logprobs", "truncation",
    "tokens",
    "input", "instructions", "output_text", "input_text", "max_output_tokens", "previous_response_id", "store",
    "system", "stop_sequences", "thinking", "budget_tokens", "tool_use", "tool_result", "tool_use_id", "input_schema",
    "cache_control", "ephemeral", "function_call", "function_call_output", "call_id", "arguments", "output",
    "reasoning", "reasoning_effort",
    "add_special_tokens", "chat_template_kwargs", "cache_salt", "priority", "min_tokens", "stop_token_ids", True, 1,
    [5], 0.5,
)  # fmt: skip


class _Worker(WorkerServicer):  # other calls remain unimplemented
    """Worker that answers every request with tokens at once."""

    async def Attach(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        await context.write(worker_pb2.WorkerMessage())
        async for message in request_iterator:
            if message.HasField("submit"):
                submit, reply = message.submit, worker_pb2.WorkerMessage()
                count = min(3, submit.sampling.max_tokens - submit.generated)
                for index in range(submit.generated, submit.generated + count):
                    token = reply.tokens.add(
                        request_id=submit.request_id, attempt=submit.attempt, index=index, token_id=20 + index
                    )
                    token.finish = (
                        worker_pb2.FINISH_STOP if index == submit.generated + count - 1 else worker_pb2.FINISH_NONE
                    )
                    _add_logprobs(token, submit)
                await context.write(reply)


def _add_logprobs(token: Any, submit: Any) -> None:
    if submit.sampling.HasField("logprobs"):
        token.logprobs.logprob, token.logprobs.rank = -1.0, 1
        token.logprobs.top_ids.extend(range(submit.sampling.logprobs))
        token.logprobs.top_logprobs.extend([-1.0] * submit.sampling.logprobs)
    if submit.sampling.HasField("prompt_logprobs") and token.index == 0:
        count, top = len(submit.prompt_ids) // 4 - 1, submit.sampling.prompt_logprobs
        scores = token.prompt_logprobs
        scores.num_top, scores.logprobs, scores.ranks = top, bytes(4 * count), bytes(4 * count)
        scores.top_ids, scores.top_logprobs = bytes(4 * count * top), bytes(4 * count * top)


class _Conductor(ConductorServicer):  # other calls remain unimplemented
    """Conductor that places every request on the worker."""

    def __init__(self, worker: conductor_pb2.NodeRef) -> None:
        self._worker = worker
        self._cluster = conductor_pb2.ClusterReply(ready_models=["m"])
        node = conductor_pb2.Node(
            node_id=worker.node_id, role=common_pb2.ROLE_AGGREGATED, incarnation=1, model="m", max_model_len=512
        )
        node.spec.block_tokens = 16
        self._cluster.nodes.add(node=node)

    async def Schedule(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        await context.write(conductor_pb2.ConductorAnswers())
        async for message in request_iterator:
            answers = conductor_pb2.ConductorAnswers()
            for call in message.calls:
                answer = answers.answers.add(number=call.number)
                if call.HasField("schedule"):
                    answer.schedule.placement.prefill.CopyFrom(self._worker)
                else:
                    answer.complete.SetInParent()
            await context.write(answers)

    async def Cluster(self, request: Any, context: Any) -> conductor_pb2.ClusterReply:
        return self._cluster


class HttpBodies(FuzzTarget):
    """Requests to all routes: a msgpack list of method, path, headers and body.

    An answer must not be a 5xx, except for readiness; an error must have the form of its path's API; and nothing may be
    held after it.
    """

    name = "http"
    covers: tuple[str, ...] = (
        "frontend/api", "frontend/prepare.py", "frontend/prompts.py", "frontend/tools.py", "frontend/grammars.py",
        "frontend/chat_rendering.py", "frontend/output.py", "frontend/generation.py", "frontend/reasoning",
        "frontend/tool_formats",
    )  # fmt: skip
    deadline_s = 60.0
    max_growth_nbytes = 1 << 30

    def open(self) -> None:
        """Start the application and its workers."""
        self._folder = tempfile.TemporaryDirectory(prefix="mpf-")
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        self._loop.set_exception_handler(self._unhandled)
        self._unhandled_error: BaseException | None = None
        self._loop.run_until_complete(self._open())

    async def _open(self) -> None:
        folder = Path(self._folder.name)
        ref = conductor_pb2.NodeRef(node_id="w", incarnation=1, target=f"unix:{folder}/w.sock")
        worker, conductor = _Worker(), _Conductor(ref)  # type: ignore[abstract]
        self._servers = [
            await start_server(ref.target, lambda server: add_WorkerServicer_to_server(worker, server)),
            await start_server(
                f"unix:{folder}/c.sock", lambda server: add_ConductorServicer_to_server(conductor, server)
            ),
        ]
        config = assemble(
            FrontendConfig,
            models=(ServedModelConfig(BUNDLED_MODEL, "m"),),
            conductor_targets=(self._servers[1].target,),
            node_id="fe",
            block_tokens=16,
            request_timeout_s=20.0,
        )
        self._service = Service(config, await load_tokenizers(config.models))
        await self._service.start()
        self._app = build_app(self._service)

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._unhandled_error = context.get("exception") or Misjudged(str(context.get("message")))

    def seeds(self) -> Sequence[bytes]:
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("/v1/completions", {"prompt": "a b", "max_tokens": 3}),
            ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "stream": True, "logprobs": 2, "n": 2}),
            ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "stop": ["x"], "seed": 1,
                                 "temperature": 0.5, "logit_bias": {"5": 1}, "stop_token_ids": [7]}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, "guided_regex": "[ab]+"}),
            ("/v1/completions", {"prompt": "a", "max_tokens": 1, "structured_outputs": {"choice": ["a", "b"]}}),
            ("/v1/chat/completions", {"messages": _USER, "max_tokens": 2}),
            ("/v1/chat/completions", {"messages": _USER, "max_tokens": 2, "stream": True, "logprobs": True,
                                      "top_logprobs": 1, "stream_options": {"include_usage": True}}),
            ("/v1/chat/completions", {"messages": _USER, "max_tokens": 2, "tools": [_TOOL], "tool_choice": "auto"}),
            ("/v1/chat/completions", {"messages": _USER, "max_tokens": 2, "response_format": {
                "type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}}),
            ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
            ("/v1/responses", {"stream": True, "max_output_tokens": 2, "instructions": "be brief", "tools": [
                {"type": "function", **_TOOL["function"]}], "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "5"}]}),
            ("/v1/messages", {"messages": _USER, "max_tokens": 2, "stream": True, "system": "be brief"}),
            ("/v1/messages", {"max_tokens": 2, "tools": [{"name": "f", "input_schema": _TOOL["function"]["parameters"],
                                                          "cache_control": {"type": "ephemeral"}}], "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}]}]}),
            ("/v1/messages/count_tokens", {"messages": _USER}),
            ("/tokenize", {"prompt": "a b"}),
            ("/tokenize", {"messages": _USER, "return_token_strs": True}),
            ("/detokenize", {"tokens": [5, 6, 7]}),
        ]  # fmt: skip
        posts = [
            ["POST", path, {"content-type": "application/json"}, json.dumps(body).encode()] for path, body in bodies
        ]
        gets: list[Any] = [
            ["GET", path, {}, b""] for path in ("/v1/models", "/metrics", "/validate", "/health", "/openapi.json")
        ]
        return [msgpack.packb(case) for case in (*posts, *gets)]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate the body, mostly; now and then the path, the method or a header."""
        method, path, headers, body = msgpack.unpackb(case)
        action = rng.random()
        if action < 0.03:
            method = rng.choice(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", ""))
        elif action < 0.06:
            path = rng.choice((*_ROUTES, path + rng.choice(("/", "/x", "?a=b", "%00", "/../v1/models"))))
        elif action < 0.1:
            names = ("authorization", "content-length", "x-request-id", "traceparent", "accept", "x-slo-class",
            "content-type",
                     "x-moonpool-timing", "x-ttft-objective", "accept-encoding")  # fmt: skip
            headers[rng.choice(names)] = rng.choice(
                ("", "1", "-1", "9" * 30, "Bearer x", "gzip", "0", "text/plain", "nan", "é")
            )
        else:
            body = mutation.mutate_json(rng, body, msgpack.unpackb(other)[3] or b"{}", (b"{", b'"', b"null"), _WORDS)
        packed: bytes = msgpack.packb([method, path, headers, body])
        return packed

    def run(self, case: bytes) -> None:
        """Send the request and judge the answer."""
        self._unhandled_error = None
        self._loop.run_until_complete(self._request(*msgpack.unpackb(case)))
        if self._unhandled_error is not None:
            raise self._unhandled_error

    async def _request(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        sent: list[dict[str, Any]] = []
        received = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if received:
                return received.pop()
            await asyncio.Event().wait()  # the client stays until it has the whole answer
            raise AssertionError

        async def send(message: Any) -> None:
            sent.append(message)

        target, _, query = path.partition("?")
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": target, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        }  # fmt: skip
        await asyncio.wait_for(self._app(scope, receive, send), 40)
        _judge(method, target, sent)
        end_s = self._loop.time() + 8
        while not (report := self._service.validate())["ok"]:
            if self._loop.time() > end_s:
                raise Misjudged(f"held after the answer: {report['problems']}")
            await asyncio.sleep(0.002)

    def close(self) -> None:
        """Stop the application."""

        async def stop() -> None:
            await self._service.close()
            for server in self._servers:
                await server.stop(0.1)

        self._loop.run_until_complete(stop())
        self._folder.cleanup()


def _judge(method: str, path: str, sent: Sequence[dict[str, Any]]) -> None:
    """Raise Misjudged for an answer that no request may get."""
    if not sent or sent[0]["type"] != "http.response.start" or sent[-1].get("more_body"):
        raise Misjudged("an incomplete answer")
    status, body = sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])
    if status >= 500 and path != "/ready":
        raise Misjudged(f"HTTP {status}: {body[:300].decode(errors='replace')}")
    kind = dict(sent[0]["headers"]).get(b"content-type", b"")
    if kind.startswith(b"text/event-stream"):
        _judge_stream(path.rstrip("/"), body)
    elif 400 <= status < 500 and method != "HEAD" and not path.startswith("/console"):
        found = json.loads(body)
        error = found["error"]
        is_formed = path.startswith("/v1/messages") == (found.get("type") == "error")
        if not is_formed or set(error) != {"message", "type", "param", "code"} or not 0 < len(error["message"]) < 4000:
            raise Misjudged(f"an error without its API's form: {body[:200].decode(errors='replace')}")
    elif kind.startswith(b"application/json") and body:
        json.loads(body)


_LAST_EVENTS: Mapping[str, tuple[str, ...]] = {
    "/v1/responses": ("response.completed", "response.incomplete", "response.failed"),
    "/v1/messages": ("message_stop", "error"),
}


def _judge_stream(path: str, body: bytes) -> None:
    *events, rest = body.split(b"\n\n")
    if not events or rest or (path not in _LAST_EVENTS and events.pop() != b"data: [DONE]"):
        raise Misjudged("a stream without its end")
    for event in events:
        kind, _, data = event.rpartition(b"data: ")
        found = json.loads(data)
        if kind and kind.decode() != f"event: {found['type']}\n":
            raise Misjudged(f"an event that is named unlike its type: {event[:200].decode(errors='replace')}")
        if (found.get("error") or {}).get("code") == "internal_error":
            raise Misjudged(f"an internal error in a stream: {event[:200].decode(errors='replace')}")
    if path in _LAST_EVENTS and found["type"] not in _LAST_EVENTS[path]:
        raise Misjudged(f"a stream that ends with {found['type']}")
