"""The protocol of one exchange: which responses each way of sending a body requires."""

import tracemalloc

import pytest

from endpoint_picker.exchange import Exchange, refusal
from frontend.errors import BodyTooLarge, InvalidRequest, Overloaded
from moonpool_proto.v1.ext_proc_pb2 import (
    BUFFERED,
    BUFFERED_PARTIAL,
    FULL_DUPLEX_STREAMED,
    NONE,
    OVERWRITE_IF_EXISTS_OR_ADD,
    STREAMED,
    ProcessingRequest,
)
from tests.endpoint_picker.gateway import (
    Outcome,
    body_message,
    headers_message,
    response_body_message,
    response_headers_message,
    trailers_message,
)

HEADERS = {":path": "/v1/completions", "Content-Type": "application/json"}


def outcome_of(responses):
    outcome = Outcome()
    for response in responses:
        outcome.take(response)
    return outcome


def test_a_streamed_body_is_kept_until_it_is_whole_and_goes_back_behind_the_endpoint():
    exchange = Exchange(1 << 20)
    assert exchange.receive(headers_message(HEADERS)) == []
    assert exchange.receive(body_message(b"ab", end_of_stream=False)) == []
    assert not exchange.awaits_pick
    assert exchange.receive(body_message(b"cd")) == []
    assert exchange.awaits_pick
    assert (exchange.path, exchange.headers["content-type"]) == ("/v1/completions", "application/json")
    assert exchange.body == b"abcd"
    outcome = outcome_of(exchange.picked(["10.0.0.1:8000"]))
    assert (outcome.destination, outcome.body, outcome.ends_body) == ("10.0.0.1:8000", b"abcd", True)
    assert outcome.kinds == ["request_headers", "request_body"]


@pytest.mark.parametrize(("nbytes", "num_chunks"), [(0, 1), (61_440, 1), (61_441, 2), (300_000, 5)])
def test_a_long_body_goes_back_in_chunks_that_the_gateway_buffers(nbytes, num_chunks):
    exchange = Exchange(1 << 20)
    exchange.receive(headers_message(HEADERS))
    body = bytes(i % 251 for i in range(nbytes))
    exchange.receive(body_message(body))
    outcome = outcome_of(exchange.picked(["a:1"]))
    assert (outcome.body, outcome.ends_body) == (body, True)
    assert outcome.kinds == ["request_headers", *["request_body"] * num_chunks]


def test_trailers_end_a_streamed_body_in_both_directions():
    exchange = Exchange(1 << 20)
    exchange.receive(headers_message(HEADERS))
    exchange.receive(body_message(b"ab", end_of_stream=False))
    assert exchange.receive(trailers_message()) == []
    assert exchange.awaits_pick
    outcome = outcome_of(exchange.picked(["a:1"]))
    assert (outcome.body, outcome.ends_body) == (b"ab", False)
    assert outcome.kinds == ["request_headers", "request_body", "request_trailers"]


@pytest.mark.parametrize("mode", [BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize("is_whole", [True, False])
def test_no_body_is_kept_once_the_endpoint_is_picked(mode, is_whole):
    nbytes = 8 << 20
    tracemalloc.start()
    try:
        exchange = Exchange(nbytes)
        exchange.receive(headers_message(HEADERS, mode=mode))
        exchange.receive(body_message(bytes(nbytes), end_of_stream=is_whole))
        exchange.receive(trailers_message())
        assert exchange.awaits_pick
        assert tracemalloc.get_traced_memory()[0] > nbytes
        exchange.picked(["a:1"])
        assert tracemalloc.get_traced_memory()[0] < nbytes // 8
    finally:
        tracemalloc.stop()
    assert exchange.body is None


def test_a_buffered_body_is_asked_for_and_not_sent_back():
    exchange = Exchange(1 << 20)
    assert outcome_of(exchange.receive(headers_message(HEADERS, mode=BUFFERED))).kinds == ["request_headers"]
    assert not exchange.awaits_pick
    assert exchange.receive(body_message(b"abcd")) == []
    assert exchange.body == b"abcd"
    outcome = outcome_of(exchange.picked(["a:1"]))
    assert (outcome.destination, outcome.body, outcome.kinds) == ("a:1", b"", ["request_body"])


def test_a_buffered_part_of_a_body_is_not_taken_for_the_whole():
    exchange = Exchange(1 << 20)
    exchange.receive(headers_message(HEADERS, mode=BUFFERED_PARTIAL))
    exchange.receive(body_message(b"ab", end_of_stream=False))
    assert exchange.awaits_pick
    assert exchange.body is None
    assert outcome_of(exchange.picked(["a:1"])).kinds == ["request_body"]


@pytest.mark.parametrize("mode", [NONE, STREAMED])
def test_without_the_body_the_headers_decide_and_chunks_pass(mode):
    exchange = Exchange(1 << 20)
    assert exchange.receive(headers_message(HEADERS, mode=mode)) == []
    assert exchange.awaits_pick
    assert exchange.body is None
    assert outcome_of(exchange.picked(["a:1"])).kinds == ["request_headers"]
    (response,) = exchange.receive(body_message(b"ab", end_of_stream=False))
    assert not response.request_body.response.HasField("body_mutation")


def test_a_request_without_a_body_is_decided_by_its_headers():
    exchange = Exchange(1 << 20)
    exchange.receive(headers_message({":path": "/v1/models"}, end_of_stream=True))
    outcome = outcome_of(exchange.picked(["a:1", "b:1"]))
    assert (outcome.destination, outcome.kinds) == ("a:1,b:1", ["request_headers"])


def test_a_gateway_that_reports_no_modes_is_taken_to_stream_both_bodies():
    exchange = Exchange(1 << 20)
    exchange.receive(headers_message(HEADERS, mode=None))
    exchange.receive(body_message(b"ab"))
    assert outcome_of(exchange.picked(["a:1"])).body == b"ab"
    (response,) = exchange.receive(response_body_message(b"xy", end_of_stream=True))
    streamed = response.response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"xy", True)


def test_a_clients_own_destination_is_overwritten():
    exchange = Exchange(1 << 20)
    exchange.receive(headers_message(HEADERS, end_of_stream=True))
    (response,) = exchange.picked(["a:1"])
    (option,) = response.request_headers.response.header_mutation.set_headers
    assert option.append_action == OVERWRITE_IF_EXISTS_OR_ADD


def test_the_answer_passes_in_the_way_in_which_the_gateway_sends_it():
    exchange = Exchange(1 << 20)
    exchange.receive(headers_message(HEADERS, end_of_stream=True, response_mode=STREAMED))
    exchange.picked(["a:1"])
    (response,) = exchange.receive(response_headers_message(served_by="b:1"))
    assert response.WhichOneof("response") == "response_headers"
    assert exchange.served_by == "b:1"
    (response,) = exchange.receive(response_body_message(b"xy"))
    assert not response.response_body.response.HasField("body_mutation")
    (response,) = exchange.receive(ProcessingRequest(response_trailers={}))
    assert response.WhichOneof("response") == "response_trailers"


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX_STREAMED])
def test_a_body_over_the_limit_is_refused_when_it_exceeds_it(mode):
    exchange = Exchange(4)
    exchange.receive(headers_message(HEADERS, mode=mode))
    with pytest.raises(BodyTooLarge):
        exchange.receive(body_message(b"abcde", end_of_stream=False))


def test_the_subset_is_read_as_a_list_or_as_one_text():
    exchange = Exchange(4)
    exchange.receive(headers_message(HEADERS, subset=["10.0.0.1:80", "[::1]:80"]))
    assert exchange.subset == {"10.0.0.1:80", "[::1]:80"}
    message = headers_message(HEADERS, subset=[])
    exchange = Exchange(4)
    exchange.receive(message)
    assert exchange.subset == frozenset()
    hint = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
    hint.update({"x-gateway-destination-endpoint-subset": "a:1, b:2"})
    exchange = Exchange(4)
    exchange.receive(message)
    assert exchange.subset == {"a:1", "b:2"}
    exchange = Exchange(4)
    exchange.receive(headers_message(HEADERS))
    assert exchange.subset is None


def test_a_refusal_is_an_openai_error_with_its_headers():
    outcome = outcome_of([refusal(Overloaded("too much", code="ttft", retry_after_s=2.4))])
    assert outcome.status == 429
    assert outcome.headers == {"content-type": "application/json", "retry-after": "3"}
    assert outcome.error == {"message": "too much", "type": "rate_limit_error", "param": None, "code": "ttft"}


def test_a_refusal_of_messages_has_anthropics_form():
    outcome = outcome_of([refusal(Overloaded("too much", code="ttft", retry_after_s=2.4), "/fleet/v1/messages")])
    assert outcome.error["type"] == "rate_limit_error"
    assert outcome.error["code"] == "ttft"


@pytest.mark.parametrize("first", [headers_message(HEADERS), trailers_message()], ids=["headers", "trailers"])
def test_the_headers_of_a_second_request_end_the_exchange(first):
    exchange = Exchange(100)
    exchange.receive(first)
    if exchange.awaits_pick:
        exchange.picked(["a:1"])
    with pytest.raises(InvalidRequest, match="two requests"):
        exchange.receive(headers_message(HEADERS))


def test_fields_of_envoy_that_are_not_declared_here_are_ignored():
    raw = headers_message(HEADERS, end_of_stream=True).SerializeToString() + b"\x4a\x05\x0a\x01a\x12\x00"  # attributes
    message = ProcessingRequest.FromString(raw)
    exchange = Exchange(4)
    exchange.receive(message)
    assert exchange.awaits_pick
