"""Target: a gateway's exchanges with an endpoint picker (Envoy's external processing), over real calls.

An exchange may end with a refusal in the form of its API, which must not be the picker's own failure. A body that was
streamed must come back unchanged, and no exchange may count for an endpoint after its end.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import msgpack
from aiohttp import web
from google.protobuf.message import DecodeError, Message
from prometheus_client import CollectorRegistry

from endpoint_picker.endpoints import EndpointWatch
from endpoint_picker.service import PickerService
from moonpool_proto.v1 import ext_proc_pb2 as pb
from moonpool_proto.v1.ext_proc_pb2_grpc import add_ExternalProcessorServicer_to_server
from rpc.control import start_server
from settings.endpoint_picker import EndpointPickerSettings
from settings.keys import assemble
from telemetry.endpoint_picker import EndpointPickerMetrics
from tools.fuzz import mutation
from tools.fuzz.target import Misjudged
from tools.fuzz.targets.calls import CallsTarget, Method

_MAX_BODY_NBYTES: Final = 1 << 20
_WORDS: Final = (
    "model", "messages", "prompt", "input", "system", "instructions", "role", "user", "content", "session_id",
    "prompt_cache_key", "parent_session_id", "m", "x", [5], 1, True,
)  # fmt: skip
_HEADERS: Final = (":path", ":method", "x-session-id", "x-parent-session-id", "content-type", "X-Session-Id", "")
_VALUES: Final = ("/v1/completions", "/p/v1/messages?a=b", "/v1/models", "s", "é", "\x00", "/" * 300, "")


class PickerExchanges(CallsTarget):
    """Exchanges with a picker of two endpoints."""

    name = "endpoint-picker"
    covers: tuple[str, ...] = (
        "endpoint_picker/exchange.py",
        "endpoint_picker/request.py",
        "endpoint_picker/service.py",
    )
    package = "envoy.service.ext_proc.v3"
    service = "ExternalProcessor"
    methods: ClassVar = {"Process": Method(pb.ProcessingRequest, pb.ProcessingResponse, "stream")}

    async def serve(self) -> str:
        endpoint = web.Application()
        endpoint.router.add_get("/v1/models", _models)
        self._endpoint = web.AppRunner(endpoint, access_log=None)
        await self._endpoint.setup()
        for _ in range(2):
            await web.TCPSite(self._endpoint, "127.0.0.1", 0).start()
        settings = assemble(
            EndpointPickerSettings,
            endpoints=tuple(f"127.0.0.1:{address[1]}" for address in self._endpoint.addresses),
            picker_max_body_bytes=_MAX_BODY_NBYTES,
            picker_max_bodies_bytes=2 * _MAX_BODY_NBYTES,
        )
        self._watch = EndpointWatch(settings)
        await self._watch.start()
        metrics = EndpointPickerMetrics(CollectorRegistry(), self._watch.counts)
        picker = PickerService(settings, self._watch, None, metrics)
        self._server = await start_server(
            f"unix:{self.path}/e.sock", lambda server: add_ExternalProcessorServicer_to_server(picker, server)
        )
        return self._server.target

    def scripts(self) -> Sequence[Sequence[tuple[str, Sequence[Message]]]]:
        chat = {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]}
        again = {"model": "m", "system": "s", "session_id": "a", "messages": [{"role": "user", "content": [{"a": 1}]}]}
        bodies = [json.dumps(each).encode() for each in (chat, again, {"model": "m", "prompt": [5, 6]})]
        served = pb.ProcessingRequest(response_headers=pb.HttpHeaders())
        served.metadata_context.filter_metadata["envoy.lb"].update({"x-gateway-destination-endpoint-served": "a:1"})
        limited = _headers("/v1/completions", pb.FULL_DUPLEX_STREAMED)
        limited.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(
            {"x-gateway-destination-endpoint-subset": ["127.0.0.1:1", "127.0.0.1:2"]}
        )
        trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
        exchanges = [
            [_headers("/v1/chat/completions", pb.FULL_DUPLEX_STREAMED), _body(bodies[0]), served],
            [_headers("/v1/messages", pb.FULL_DUPLEX_STREAMED), _body(bodies[1][:9], is_last=False),
             _body(bodies[1][9:])],
            [_headers("/v1/responses", pb.FULL_DUPLEX_STREAMED), _body(bodies[2], is_last=False), trailers, served],
            [_headers("/v1/completions", pb.BUFFERED), _body(bodies[2]), served,
             pb.ProcessingRequest(response_body=pb.HttpBody(body=b"{}", end_of_stream=True))],
            [_headers("/v1/models", pb.NONE), served],
            [limited, _body(bodies[2])],
        ]  # fmt: skip
        return [[("Process", messages)] for messages in exchanges]

    def mutate(self, rng: random.Random, case: bytes, other: bytes) -> bytes:
        """Mutate JSON of a body or a header, besides what is mutated in any message."""
        if rng.random() < 0.4:
            return super().mutate(rng, case, other)
        calls = msgpack.unpackb(case)
        messages = rng.choice(calls)[1]
        at = rng.randrange(len(messages))
        message = pb.ProcessingRequest()
        try:
            message.ParseFromString(messages[at])
        except DecodeError:
            return super().mutate(rng, case, other)
        if message.HasField("request_body"):
            body = message.request_body
            body.body = mutation.mutate_json(rng, body.body, b'{"prompt": "a"}', (b"{", b'"', b"["), _WORDS)
        elif message.HasField("request_headers"):
            header = message.request_headers.headers.headers.add(key=rng.choice(_HEADERS))
            header.raw_value = rng.choice(_VALUES).encode()
        messages[at] = message.SerializeToString()
        packed: bytes = msgpack.packb(calls)
        return packed

    async def _call(self, name: str, method: Method, messages: list[bytes]) -> list[Any]:
        replies = await super()._call(name, method, messages)
        _judge(messages, replies)
        return replies

    async def settle(self, replies: Any) -> None:
        """Check that no exchange still counts for an endpoint."""
        end_s = self.loop.time() + 5
        while any(load.num_requests for load in self._watch.loads("", None)):
            if self.loop.time() > end_s:
                raise Misjudged("an exchange counts for its endpoint after its end")
            await asyncio.sleep(0.002)

    async def _close(self) -> None:
        await super()._close()
        await self._server.stop(0.1)
        await self._watch.close()
        await self._endpoint.cleanup()


async def _models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "m"}]})


def _headers(path: str, mode: pb.BodySendMode.ValueType) -> pb.ProcessingRequest:
    values = [pb.HeaderValue(key=":path", raw_value=path.encode())]
    message = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=mode == pb.NONE)
    )
    message.protocol_config.request_body_mode = message.protocol_config.response_body_mode = mode
    return message


def _body(body: bytes, *, is_last: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=is_last))


def _judge(messages: Sequence[bytes], replies: Sequence[pb.ProcessingResponse]) -> None:
    """Raise Misjudged for a refusal without a form, or for a whole streamed body that came back changed."""
    for reply in replies:
        if reply.HasField("immediate_response"):
            refused = json.loads(reply.immediate_response.body)["error"]
            if not refused["message"] or refused["code"] in ("internal_error", "bodies"):
                raise Misjudged(f"refused with {refused}")
            return
    try:
        first, *rest = [pb.ProcessingRequest.FromString(each) for each in messages]
    except DecodeError:
        return
    is_whole = all(each.HasField("request_body") for each in rest) and not first.request_headers.end_of_stream
    ends = [each.request_body.end_of_stream for each in rest]
    if not (first.HasField("request_headers") and is_whole and sum(ends) == 1 and ends[-1]):
        return
    if first.protocol_config.request_body_mode != pb.FULL_DUPLEX_STREAMED or any(
        each.observability_mode for each in (first, *rest)
    ):
        return
    sent = b"".join(each.request_body.body for each in rest)
    back = b"".join(each.request_body.response.body_mutation.streamed_response.body for each in replies)
    if back != sent:
        raise Misjudged(f"a body of {len(sent)} bytes came back as one of {len(back)}")
