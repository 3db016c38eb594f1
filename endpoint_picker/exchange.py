"""Envoy's external processing of one HTTP exchange: messages in, responses out. Pure.

    gateway                                picker
    request_headers ────────────────────▶           buffered: answered at once, so that the body is sent
    request_body ... (end_of_stream) ───▶           streamed: kept until it is complete
                                          pick       `awaits_pick`; then `picked`, or `refusal`
            ◀── destination, then the body again    streamed: in chunks; buffered: unchanged in the gateway
    response_headers, response_body, … ─▶           passed on unchanged; their end is the end of the stream

How the body arrives is a setting of the gateway (`ProcessingMode`), which it reports in the first message. Without the
report it is taken to be streamed in both directions, as the Gateway API's endpoint picker protocol requires.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from google.protobuf.struct_pb2 import Struct

from endpoint_picker.request import generation_path
from frontend.api.routes import error_body
from frontend.errors import ApiError, BodyTooLarge, InvalidRequest
from moonpool_proto.v1.ext_proc_pb2 import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
    OVERWRITE_IF_EXISTS_OR_ADD,
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HeaderValue,
    HeaderValueOption,
    HttpBody,
    HttpStatus,
    ImmediateResponse,
    Metadata,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

__all__ = ["DESTINATION", "Exchange", "refusal"]

DESTINATION: Final = "x-gateway-destination-endpoint"
_SERVED: Final = "x-gateway-destination-endpoint-served"
_SUBSET: Final = "x-gateway-destination-endpoint-subset"
_ENDPOINT_NAMESPACE: Final = "envoy.lb"
_SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
_CHUNK_NBYTES: Final = 60 << 10  # below the 64 KiB of Envoy's buffers
_CONTINUE: Final = CommonResponse()


class Exchange:
    """One HTTP request and its response, as a gateway reports them."""

    def __init__(self, max_body_nbytes: int) -> None:
        self.headers: dict[str, str] = {}  # of the request, with lower-case names
        self.subset: frozenset[str] | None = None  # of endpoints, to which the gateway limits the choice
        self.served_by = ""  # endpoint that the gateway has used, if it says so
        self.awaits_pick = False
        self._max_body_nbytes = max_body_nbytes
        self._body = bytearray()
        self._has_body = False  # the whole body is here
        self._request_mode = self._response_mode = FULL_DUPLEX_STREAMED
        self._has_begun = False
        self._is_over = False  # the endpoint has been picked
        self._ends_with_trailers = False
        self._answers_body = False  # the headers are answered: the endpoint goes with the body's response

    @property
    def _is_buffered(self) -> bool:
        return self._request_mode in (BUFFERED, BUFFERED_PARTIAL)

    @property
    def path(self) -> str:
        """The request's path, with its query."""
        return self.headers.get(":path", "")

    @property
    def body(self) -> bytes | None:
        """The request's body until an endpoint is picked; None if the gateway has not sent all of it, or afterwards."""
        return bytes(self._body) if self._has_body and not self._is_over else None

    def receive(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        """Take a message of the gateway; return the responses to send at once. Raises BodyTooLarge, InvalidRequest."""
        if not self._has_begun:
            self._has_begun = True
            if message.HasField("protocol_config"):
                self._request_mode = message.protocol_config.request_body_mode
                self._response_mode = message.protocol_config.response_body_mode
        match message.WhichOneof("request"):
            case "request_headers":
                return self._request_headers(message)
            case "request_body":
                return self._request_body(message.request_body)
            case "request_trailers":
                if self._is_over:
                    return [ProcessingResponse(request_trailers=TrailersResponse())]
                self._ends_with_trailers = self.awaits_pick = self._has_body = True
                return []
            case "response_headers":
                self.served_by = _text(message.metadata_context, _ENDPOINT_NAMESPACE, _SERVED)
                return [ProcessingResponse(response_headers=HeadersResponse(response=_CONTINUE))]
            case "response_body":
                is_streamed = self._response_mode == FULL_DUPLEX_STREAMED
                return [ProcessingResponse(response_body=_passed_on(message.response_body, is_streamed=is_streamed))]
            case "response_trailers":
                return [ProcessingResponse(response_trailers=TrailersResponse())]
            case _:
                return []

    def picked(self, endpoints: Sequence[str]) -> list[ProcessingResponse]:
        """Return the responses that send the request to the first of the endpoints that answers."""
        self.awaits_pick, self._is_over = False, True
        body, self._body = bytes(self._body), bytearray()  # not kept during the answer
        value = ",".join(endpoints)
        common = CommonResponse(header_mutation=_headers({DESTINATION: value}), clear_route_cache=True)
        metadata = Struct()
        metadata.update({_ENDPOINT_NAMESPACE: {DESTINATION: value}})
        if self._answers_body:
            return [ProcessingResponse(request_body=BodyResponse(response=common), dynamic_metadata=metadata)]
        first = ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)
        return [first, *self._body_again(body)]

    def _request_headers(self, message: ProcessingRequest) -> list[ProcessingResponse]:
        if self.headers or self._is_over:  # a second endpoint would be picked for the same exchange
            raise InvalidRequest("the gateway sent the headers of two requests in one exchange")
        headers = message.request_headers
        self.headers = {each.key.lower(): _value(each) for each in headers.headers.headers}
        self.subset = _subset(message.metadata_context)
        if headers.end_of_stream or not (self._is_buffered or self._request_mode == FULL_DUPLEX_STREAMED):
            self.awaits_pick = True
        elif self._is_buffered:
            self._answers_body = True
            return [ProcessingResponse(request_headers=HeadersResponse(response=_CONTINUE))]
        return []

    def _request_body(self, body: HttpBody) -> list[ProcessingResponse]:
        if self._is_over:
            is_streamed = self._request_mode == FULL_DUPLEX_STREAMED
            return [ProcessingResponse(request_body=_passed_on(body, is_streamed=is_streamed))]
        if len(self._body) + len(body.body) > self._max_body_nbytes:
            raise BodyTooLarge(f"the body must have at most {self._max_body_nbytes} bytes, got more")
        self._body += body.body
        self.awaits_pick = body.end_of_stream or self._is_buffered
        self._has_body = body.end_of_stream or self._request_mode == BUFFERED  # trailers may follow
        return []

    def _body_again(self, body: bytes) -> Iterator[ProcessingResponse]:
        """Yield the body that was streamed here, and its trailers."""
        if not self._has_body:
            return
        starts = range(0, max(1, len(body)), _CHUNK_NBYTES)
        for start in starts:
            is_last = start == starts[-1] and not self._ends_with_trailers
            chunk = HttpBody(body=body[start : start + _CHUNK_NBYTES], end_of_stream=is_last)
            yield ProcessingResponse(request_body=_passed_on(chunk, is_streamed=True))
        if self._ends_with_trailers:
            yield ProcessingResponse(request_trailers=TrailersResponse())


def refusal(error: ApiError, path: str = "") -> ProcessingResponse:
    """Return the response that ends the exchange with the client's error, in the form of the path's API."""
    headers = {"content-type": "application/json", **error.headers()}
    return ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=_headers(headers),
            body=json.dumps(error_body(generation_path(path), error)).encode(),
            details=f"moonpool_{error.code or error.kind}",
        )
    )


def _passed_on(body: HttpBody, *, is_streamed: bool) -> BodyResponse:
    """Return the response to a part of a body that stays as it is."""
    if not is_streamed:
        return BodyResponse(response=_CONTINUE)
    again = StreamedBodyResponse(body=body.body, end_of_stream=body.end_of_stream)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=again)))


def _headers(values: Mapping[str, str]) -> HeaderMutation:
    """Return the change that sets headers, in place of those of a client."""
    return HeaderMutation(
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name, raw_value=value.encode()), append_action=OVERWRITE_IF_EXISTS_OR_ADD
            )
            for name, value in values.items()
        ]
    )


def _value(header: HeaderValue) -> str:
    return header.raw_value.decode("latin-1") if header.raw_value else header.value


def _text(metadata: Metadata, namespace: str, name: str) -> str:
    if namespace not in metadata.filter_metadata or name not in metadata.filter_metadata[namespace].fields:
        return ""
    return metadata.filter_metadata[namespace].fields[name].string_value


def _subset(metadata: Metadata) -> frozenset[str] | None:
    """Return the endpoints to which the gateway limits the choice; None if it does not."""
    if (
        _SUBSET_NAMESPACE not in metadata.filter_metadata
        or _SUBSET not in metadata.filter_metadata[_SUBSET_NAMESPACE].fields
    ):
        return None
    value = metadata.filter_metadata[_SUBSET_NAMESPACE].fields[_SUBSET]
    named = [each.string_value for each in value.list_value.values] or value.string_value.split(",")
    return frozenset(each.strip() for each in named if each.strip())
