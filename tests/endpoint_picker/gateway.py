"""A gateway as seen by an endpoint picker: Envoy's side of external processing, over a real gRPC connection."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct

from moonpool_proto.v1.ext_proc_pb2 import (
    FULL_DUPLEX_STREAMED,
    BodySendMode,
    HeaderMap,
    HeaderValue,
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ImmediateResponse,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from moonpool_proto.v1.ext_proc_pb2_grpc import ExternalProcessorStub

DESTINATION = "x-gateway-destination-endpoint"
CHAT = "/v1/chat/completions"
WAIT_S = 30.0


def chat(*contents: str, model: str = "m", **fields: Any) -> bytes:
    """Body of a chat whose messages are the user's and the assistant's in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)]
    return json.dumps({"model": model, "messages": messages, **fields}).encode()


def headers_message(
    headers: Mapping[str, str],
    *,
    end_of_stream: bool = False,
    mode: BodySendMode | None = FULL_DUPLEX_STREAMED,
    response_mode: BodySendMode = FULL_DUPLEX_STREAMED,
    subset: Sequence[str] | None = None,
) -> ProcessingRequest:
    """The first message of an exchange; without a `mode`, of a gateway that does not report its modes."""
    values = [HeaderValue(key=name, raw_value=value.encode()) for name, value in headers.items()]
    message = ProcessingRequest(
        request_headers=HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=end_of_stream)
    )
    if mode is not None:
        message.protocol_config.CopyFrom(
            ProtocolConfiguration(request_body_mode=mode, response_body_mode=response_mode)
        )
    if subset is not None:
        hint = Struct()
        hint.update({"x-gateway-destination-endpoint-subset": list(subset)})
        message.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    return message


def body_message(body: bytes, *, end_of_stream: bool = True) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=end_of_stream))


def trailers_message() -> ProcessingRequest:
    return ProcessingRequest(request_trailers=HttpTrailers())


def response_headers_message(served_by: str = "") -> ProcessingRequest:
    message = ProcessingRequest(response_headers=HttpHeaders(headers=HeaderMap()))
    if served_by:
        served = Struct()
        served.update({"x-gateway-destination-endpoint-served": served_by})
        message.metadata_context.CopyFrom(Metadata(filter_metadata={"envoy.lb": served}))
    return message


def response_body_message(body: bytes, *, end_of_stream: bool = False) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=body, end_of_stream=end_of_stream))


@dataclass
class Outcome:
    """Result of a request at the gateway: the endpoint to use and the body to send, or the response to return."""

    destination: str = ""
    body: bytes = b""
    ends_body: bool = False
    immediate: ImmediateResponse | None = None
    kinds: list[str] = field(default_factory=list)  # of the responses, in order

    @property
    def status(self) -> int:
        return 200 if self.immediate is None else self.immediate.status.code

    @property
    def error(self) -> dict[str, Any]:
        assert self.immediate is not None
        return dict(json.loads(self.immediate.body)["error"])

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the immediate response."""
        assert self.immediate is not None
        return {each.header.key: each.header.raw_value.decode() for each in self.immediate.headers.set_headers}

    def take(self, response: ProcessingResponse) -> None:
        """Apply a response as Envoy does."""
        kind = response.WhichOneof("response")
        assert kind is not None
        self.kinds.append(kind)
        if kind == "immediate_response":
            self.immediate = response.immediate_response
            return
        if kind not in ("request_headers", "request_body"):
            return
        common = getattr(response, kind).response
        for each in common.header_mutation.set_headers:
            assert each.header.key == DESTINATION
            self.destination = each.header.raw_value.decode()
            metadata = response.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION].string_value
            assert metadata == self.destination  # the header and the metadata must not differ
        streamed = common.body_mutation.streamed_response
        self.body += streamed.body
        self.ends_body |= streamed.end_of_stream


class GatewayExchange:
    """One HTTP exchange of the gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = ExternalProcessorStub(channel).Process(timeout=WAIT_S)
        self.outcome = Outcome()

    async def send(self, *messages: ProcessingRequest) -> "GatewayExchange":
        for message in messages:
            await self.call.write(message)
        return self

    async def read(self) -> ProcessingResponse:
        """Read and apply the next response."""
        response = await self.call.read()
        assert response is not grpc.aio.EOF, "the picker ended the stream"
        self.outcome.take(response)
        return response

    async def picked(self, *, has_body: bool = True) -> Outcome:
        """The outcome: an endpoint and, if it was streamed to the picker, the whole body; or an immediate response."""
        while self.outcome.immediate is None:
            response = await self.read()
            if not self.outcome.destination:
                continue
            is_whole = self.outcome.ends_body or not has_body
            if is_whole or (response.WhichOneof("response") == "request_body" and not self.outcome.body):
                break
        return self.outcome

    async def end(self) -> None:
        """End the exchange as a gateway does once the response has been sent, and wait for the picker."""
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass


class Gateway:
    """A gateway whose external processor is the picker at `target`."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.aio.insecure_channel(target)

    def exchange(self) -> GatewayExchange:
        return GatewayExchange(self.channel)

    async def post(
        self,
        body: bytes,
        *,
        path: str = CHAT,
        headers: Mapping[str, str] | None = None,
        num_chunks: int = 1,
        **first: Any,
    ) -> tuple[Outcome, GatewayExchange]:
        """Send a request with a streamed body in chunks; the exchange stays open."""
        exchange = self.exchange()
        fields = {":method": "POST", ":path": path, "content-type": "application/json", **(headers or {})}
        size = -(-len(body) // num_chunks)
        chunks = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
        messages = [body_message(each, end_of_stream=number == len(chunks)) for number, each in enumerate(chunks, 1)]
        await exchange.send(headers_message(fields, **first), *messages)
        return await exchange.picked(), exchange

    async def answer(self, body: bytes, **options: Any) -> Outcome:
        """Send a request, and end it at once."""
        outcome, exchange = await self.post(body, **options)
        await exchange.end()
        return outcome

    async def close(self) -> None:
        await self.channel.close()
