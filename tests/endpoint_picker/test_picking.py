"""A picker over a real gRPC connection: endpoints, their load, subsets, fallbacks, limits and errors."""

import asyncio
import json
import socket
import ssl
import sys
from collections import Counter

import grpc
import pytest

from endpoint_picker.endpoints import EndpointWatch
from endpoint_picker.service import PickerService
from frontend.errors import FrontendConfigError
from moonpool_proto.v1.ext_proc_pb2 import BUFFERED, FULL_DUPLEX_STREAMED, NONE, STREAMED
from moonpool_proto.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from moonpool_proto.v1.health_pb2_grpc import HealthStub
from settings.endpoint_picker import EndpointPickerSettings
from telemetry import new_registry
from telemetry.endpoint_picker import EndpointPickerMetrics
from tests.endpoint_picker.gateway import (
    CHAT,
    WAIT_S,
    Gateway,
    body_message,
    chat,
    headers_message,
    response_body_message,
    response_headers_message,
)

ALONE = b"{}"  # names no dialogue: it goes to the least loaded endpoint
TOKENIZE = "/tokenize"


@pytest.fixture
async def two(start_endpoint, start_picker):
    """(a picker that polls only once, its two endpoints)."""
    endpoints = [await start_endpoint(), await start_endpoint()]
    return await start_picker(*endpoints, picker_poll_s=60.0), endpoints


async def alone(picker, **options):
    """A request that stands alone; its exchange stays open."""
    return await picker.post(ALONE, path=TOKENIZE, **options)


async def until_picked(picker, address, body=ALONE, path=TOKENIZE):
    """Ask until a request is sent to this endpoint."""
    async with asyncio.timeout(WAIT_S):
        while (await picker.answer(body, path=path)).destination != address:
            await asyncio.sleep(0.01)


async def test_a_streamed_body_in_several_chunks_gets_an_endpoint_and_comes_back_unchanged(two):
    picker, endpoints = two
    body = chat("naïve café 🎉 " * 20_000)
    outcome = await picker.answer(body, num_chunks=7)
    assert outcome.destination in {each.address for each in endpoints}
    assert (outcome.body, outcome.ends_body) == (body, True)
    assert picker.metric('moonpool:endpoint_picks_total{outcome="picked"}') == 1


async def test_a_buffered_body_gets_an_endpoint(two):
    picker, _ = two
    exchange = picker.exchange()
    await exchange.send(headers_message({":path": CHAT}, mode=BUFFERED))
    assert (await exchange.read()).WhichOneof("response") == "request_headers"
    await exchange.send(body_message(chat("Hello")))
    outcome = await exchange.picked(has_body=False)
    assert outcome.destination == (await picker.answer(chat("Hello"))).destination
    await exchange.end()


@pytest.mark.parametrize(("mode", "ends"), [(NONE, False), (None, True)])
async def test_headers_alone_get_an_endpoint_which_a_session_keeps(two, mode, ends):
    picker, _ = two
    homes = set()
    for _ in range(3):
        exchange = picker.exchange()
        await exchange.send(
            headers_message({":path": "/v1/models", "x-session-id": "s"}, mode=mode, end_of_stream=ends)
        )
        homes.add((await exchange.picked(has_body=False)).destination)
        await exchange.end()
    assert len(homes) == 1


async def test_a_dialogue_keeps_its_endpoint_at_another_picker_too(two, start_picker):
    picker, endpoints = two
    other = await start_picker(*reversed(endpoints))
    dialogues = [f"question {number}" for number in range(12)]
    homes = [(await picker.answer(chat(text))).destination for text in dialogues]
    assert homes == [(await other.answer(chat(text, "answer", "next"))).destination for text in dialogues]
    assert len(set(homes)) == 2


async def test_only_endpoints_of_the_gateways_subset_are_picked(two):
    picker, (first, second) = two
    for allowed in (first, second):
        for number in range(4):
            outcome = await picker.answer(chat(f"question {number}"), subset=[allowed.address, "10.9.9.9:1"])
            assert outcome.destination == allowed.address


@pytest.mark.parametrize("subset", [[], ["10.9.9.9:8000"]])
async def test_no_endpoint_in_the_subset_is_a_503(two, subset):
    picker, _ = two
    outcome = await picker.answer(chat("Hello"), subset=subset)
    assert (outcome.status, outcome.error["code"]) == (503, "no_endpoint")
    assert outcome.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    "metrics",
    [
        'moonpool:requests_in_flight{model_name="m"} 30.0\nvllm:num_requests_running{node="x"} 1.0\n',
        'vllm:num_requests_running{engine="0"} 20.0\nvllm:num_requests_waiting{engine="0"} 10.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0"} 900.0\n',
    ],
)
async def test_the_reported_load_decides_and_moves_dialogues_only_beyond_the_bound(
    start_endpoint, start_picker, metrics
):
    endpoints = [await start_endpoint(), await start_endpoint()]
    picker = await start_picker(*endpoints, picker_slack=20)
    home = (await picker.answer(chat("Hello"))).destination
    loaded, other = sorted(endpoints, key=lambda each: each.address != home)
    loaded.metrics = metrics
    await until_picked(picker, other.address)
    assert (await picker.answer(chat("Hello"))).destination == home  # 30 is at most 1.25 * 15 + 20
    loaded.metrics = metrics.replace("30.0", "60.0").replace("20.0", "90.0")
    await until_picked(picker, other.address, chat("Hello"), CHAT)
    loaded.metrics = metrics.replace("30.0", "0.0").replace("20.0", "0.0").replace("10.0", "0.0")
    await until_picked(picker, home, chat("Hello"), CHAT)


async def test_exchanges_under_way_count_until_the_answer_has_been_streamed(two):
    picker, (first, second) = two
    opened = [await alone(picker) for _ in range(6)]
    assert Counter(outcome.destination for outcome, _ in opened) == {first.address: 3, second.address: 3}
    (_, ending) = next(each for each in opened if each[0].destination == first.address)
    await ending.send(response_headers_message(), response_body_message(b"data: 1"))
    assert (await ending.read()).WhichOneof("response") == "response_headers"
    streamed = (await ending.read()).response_body.response.body_mutation.streamed_response
    assert (streamed.body, streamed.end_of_stream) == (b"data: 1", False)
    await ending.send(response_body_message(b"", end_of_stream=True))
    await ending.read()
    await ending.end()
    for _ in range(4):  # each ends at once
        assert (await picker.answer(ALONE, path=TOKENIZE)).destination == first.address
    for _, exchange in opened:
        exchange.call.cancel()


async def test_a_client_that_disconnects_frees_its_place(two):
    picker, (_, second) = two
    opened = [await alone(picker) for _ in range(4)]
    for outcome, exchange in opened:
        if outcome.destination == second.address:
            exchange.call.cancel()
    await until_picked(picker, second.address)
    assert {(await picker.answer(ALONE, path=TOKENIZE)).destination for _ in range(4)} == {second.address}
    for _, exchange in opened:
        exchange.call.cancel()


async def test_a_client_that_disconnects_before_its_body_is_whole_leaves_nothing(start_endpoint, start_picker):
    picker = await start_picker(await start_endpoint(), picker_max_bodies_bytes=100_000)
    for _ in range(5):
        exchange = picker.exchange()
        await exchange.send(headers_message({":path": CHAT}), body_message(b"x" * 60_000, end_of_stream=False))
        exchange.call.cancel()
        await exchange.call.code()
    body = chat("x" * 80_000)

    async def is_taken():
        return (await picker.answer(body)).status == 200

    async with asyncio.timeout(WAIT_S):
        while not await is_taken():
            await asyncio.sleep(0.01)


async def test_the_endpoint_that_the_gateway_used_in_the_end_is_counted(start_endpoint, start_picker):
    first, second = await start_endpoint(), await start_endpoint()
    picker = await start_picker(first, second, picker_poll_s=60.0, picker_fallbacks=1)
    outcome, exchange = await alone(picker)
    preferred, fallback = outcome.destination.split(",")
    assert {preferred, fallback} == {first.address, second.address}
    await exchange.send(response_headers_message(served_by=fallback))
    await exchange.read()
    assert (await picker.answer(ALONE, path=TOKENIZE)).destination.split(",") == [preferred, fallback]
    await exchange.end()


async def test_a_model_that_no_endpoint_serves_is_a_404_which_names_those_served(start_endpoint, start_picker):
    picker = await start_picker(await start_endpoint(("m",)), await start_endpoint(("n",)))
    outcome = await picker.answer(chat("Hello", model="x"))
    assert (outcome.status, outcome.error["code"], outcome.error["param"]) == (404, "model_not_found", "model")
    assert "'m', 'n'" in outcome.error["message"]
    assert picker.metric('moonpool:endpoint_picks_total{outcome="model_not_found"}') == 1


async def test_a_request_goes_to_an_endpoint_that_serves_its_model(start_endpoint, start_picker):
    first, second = await start_endpoint(("m",)), await start_endpoint(("n", "o"))
    picker = await start_picker(first, second)
    assert (await picker.answer(chat("Hello", model="m"))).destination == first.address
    assert (await picker.answer(chat("Hello", model="o"))).destination == second.address


async def test_an_endpoint_that_does_not_name_its_models_may_serve_any(start_endpoint, start_picker):
    silent = await start_endpoint(None)
    picker = await start_picker(await start_endpoint(("m",)), silent)
    assert (await picker.answer(chat("Hello", model="x"))).destination == silent.address


async def test_an_endpoint_that_cannot_be_reached_gets_no_request_and_none_is_a_503(start_endpoint, start_picker):
    first, second = await start_endpoint(), await start_endpoint()
    picker = await start_picker(first, second)
    await first.stop()
    await until_picked(picker, second.address)
    await second.polled()
    homes = {(await picker.answer(chat(f"question {number}"))).destination for number in range(8)}
    assert homes == {second.address}
    assert picker.metric('moonpool:picker_endpoints{state="unreachable"}') == 1
    await second.stop()
    async with asyncio.timeout(WAIT_S):
        while (outcome := await picker.answer(chat("Hello"))).status == 200:
            await asyncio.sleep(0.01)
    assert (outcome.status, outcome.error["code"]) == (503, "no_endpoint")
    assert "none of the 2 endpoints can be reached" in outcome.error["message"]


async def test_an_endpoint_that_answers_late_gets_requests_only_if_no_other_one_answers(start_endpoint, start_picker):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts connections for it
        slow = f"127.0.0.1:{silent.getsockname()[1]}"
        picker = await start_picker(slow, fast := await start_endpoint())
        assert picker.metric('moonpool:picker_endpoints{state="slow"}') == 1
        homes = {(await picker.answer(chat(f"question {number}"))).destination for number in range(8)}
        assert homes == {fast.address}
        await fast.stop()
        await until_picked(picker, slow)
        assert await health(picker) == HealthCheckResponse.SERVING


async def test_a_name_stands_for_its_addresses(start_endpoint, start_picker):
    endpoint = await start_endpoint()
    picker = await start_picker(f"localhost:{endpoint.address.rpartition(':')[2]}")
    assert (await picker.answer(chat("Hello"))).destination == endpoint.address


async def test_a_malformed_body_is_a_400_before_an_endpoint_receives_it(two):
    picker, _ = two
    outcome = await picker.answer(b'{"model": "m", ')
    assert (outcome.status, outcome.error["type"], outcome.error["code"]) == (
        400,
        "invalid_request_error",
        "invalid_json",
    )
    assert outcome.kinds == ["immediate_response"]
    assert outcome.headers["content-type"] == "application/json"


async def test_a_body_over_the_limit_is_a_413(start_endpoint, start_picker):
    picker = await start_picker(await start_endpoint(), picker_max_body_bytes=1000)
    assert (await picker.answer(chat("x" * 900))).status == 200
    outcome = await picker.answer(chat("x" * 1000), num_chunks=3)
    assert (outcome.status, outcome.error["code"]) == (413, "request_too_large")


async def test_a_body_that_does_not_arrive_is_a_408(start_endpoint, start_picker):
    picker = await start_picker(await start_endpoint(), picker_body_timeout_s=0.2)
    exchange = picker.exchange()
    await exchange.send(headers_message({":path": CHAT}), body_message(b"{", end_of_stream=False))
    outcome = await exchange.picked()
    assert (outcome.status, outcome.error["code"]) == (408, "request_timeout")


async def test_a_long_answer_has_no_time_limit(start_endpoint, start_picker):
    picker = await start_picker(endpoint := await start_endpoint(), picker_body_timeout_s=0.2)
    _, exchange = await picker.post(chat("Hello"))
    for _ in range(5):  # two polls each: longer than the limit on the body
        await endpoint.polled()
    await exchange.send(response_body_message(b"late"))
    assert (await exchange.read()).HasField("response_body")
    await exchange.end()


async def test_bodies_together_are_bounded(start_endpoint, start_picker):
    picker = await start_picker(await start_endpoint(), picker_max_bodies_bytes=100_000)
    waiting = picker.exchange()
    await waiting.send(headers_message({":path": CHAT}), body_message(b"x" * 60_000, end_of_stream=False))
    async with asyncio.timeout(WAIT_S):
        while (outcome := await picker.answer(chat("y" * 60_000))).status == 200:
            await asyncio.sleep(0.01)
    assert (outcome.status, outcome.error["code"]) == (503, "bodies")
    waiting.call.cancel()


async def test_bodies_that_only_pass_by_take_no_memory(start_endpoint, start_picker):
    picker = await start_picker(await start_endpoint(), picker_max_bodies_bytes=100_000)
    exchange = picker.exchange()
    await exchange.send(headers_message({":path": CHAT}, mode=STREAMED))
    await exchange.picked(has_body=False)
    for _ in range(4):
        await exchange.send(body_message(b"x" * 60_000, end_of_stream=False))
        assert (await exchange.read()).HasField("request_body")
    assert (await picker.answer(chat("y" * 60_000))).status == 200
    await exchange.end()


class OneExchange:
    """Context of a call whose gateway sends a body, and then waits for the answer."""

    def __init__(self, mode):
        self._body = body_message(b"x" * 100_000)
        self._messages = [headers_message({":path": TOKENIZE}, mode=mode), self._body]
        self._sent = []
        self.num_holders = 0  # of the body and its responses, while the gateway waits

    async def read(self):
        if self._messages:
            return self._messages.pop(0)
        alone = object()  # one name and the argument
        self.num_holders += sys.getrefcount(self._body) - sys.getrefcount(alone)
        while self._sent:
            response = self._sent.pop()
            self.num_holders += sys.getrefcount(response) - sys.getrefcount(alone)
        return grpc.aio.EOF

    async def write(self, response):
        self._sent.append(response)


@pytest.mark.parametrize("mode", [BUFFERED, FULL_DUPLEX_STREAMED])
async def test_while_the_gateway_waits_for_the_answer_nothing_holds_the_body(start_endpoint, mode):
    settings = EndpointPickerSettings(endpoints=((await start_endpoint()).address,))
    watch, metrics = EndpointWatch(settings), EndpointPickerMetrics(new_registry(), lambda: ())
    await watch.start()
    try:
        exchange = OneExchange(mode)
        await PickerService(settings, watch, None, metrics).Process(None, exchange)
    finally:
        await watch.close()
    assert exchange.num_holders == 0


async def test_the_bodies_of_all_clients_have_no_common_pace(start_endpoint, start_picker, monkeypatch):
    monkeypatch.setattr("frontend.api.body._PACE_NBYTES_PER_S", 1.0)
    picker = await start_picker(await start_endpoint())
    body = chat("x" * 1_000_000)
    outcomes = await asyncio.gather(*(picker.answer(body, num_chunks=20) for _ in range(3)))
    assert [outcome.status for outcome in outcomes] == [200] * 3


async def test_an_observing_gateway_is_not_answered(two):
    picker, _ = two
    exchange = picker.exchange()
    first = headers_message({":path": "/v1/models"}, end_of_stream=True)
    first.observability_mode = True
    await exchange.send(first)
    await exchange.call.done_writing()
    assert await exchange.call.read() is grpc.aio.EOF


async def test_an_observed_exchange_has_no_time_limit(start_endpoint, start_picker):
    picker = await start_picker(endpoint := await start_endpoint(), picker_body_timeout_s=0.2)
    exchange = picker.exchange()
    first = headers_message({":path": CHAT})
    first.observability_mode = True
    await exchange.send(first)
    for _ in range(5):  # two polls each: longer than the limit on the body
        await endpoint.polled()
    await exchange.call.done_writing()
    assert await exchange.call.read() is grpc.aio.EOF


async def test_a_picker_that_is_stopped_finishes_the_exchanges_under_way(start_endpoint, start_picker):
    picker = await start_picker(await start_endpoint())
    _, exchange = await picker.post(chat("Hello"))
    picker.stop()
    with pytest.raises(grpc.aio.AioRpcError):  # it accepts no further ones
        await until_picked(picker, "none")
    await exchange.send(response_headers_message(), response_body_message(b"data: 1", end_of_stream=True))
    assert (await exchange.read()).HasField("response_headers")
    assert (await exchange.read()).HasField("response_body")
    await exchange.end()


async def health(picker, service=""):
    reply = await HealthStub(picker.channel).Check(HealthCheckRequest(service=service), timeout=WAIT_S)
    return reply.status


async def test_health_says_whether_there_is_an_endpoint(start_endpoint, start_picker):
    endpoint = await start_endpoint()
    picker = await start_picker(endpoint)
    services = ("", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
    assert {await health(picker, name) for name in services} == {HealthCheckResponse.SERVING}
    await endpoint.stop()
    async with asyncio.timeout(WAIT_S):
        while await health(picker) == HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
    assert {await health(picker, name) for name in services} == {HealthCheckResponse.NOT_SERVING}
    assert await health(picker, "liveness") == HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await health(picker, "other")
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


async def test_with_a_certificate_the_gateways_connection_is_encrypted(start_endpoint, start_picker, tls_settings):
    files = tls_settings()
    picker = await start_picker(
        await start_endpoint(), picker_tls_cert=files["tls_cert"], picker_tls_key=files["tls_key"]
    )
    credentials = grpc.ssl_channel_credentials(files["tls_ca"].read_bytes())
    name = (("grpc.ssl_target_name_override", "moonpool"),)
    gateway = Gateway("unused:1")
    await gateway.close()
    gateway.channel = grpc.aio.secure_channel(picker.target, credentials, options=name)
    assert (await gateway.answer(chat("Hello"))).status == 200
    await gateway.close()


async def certificate_shown(picker, ca):
    """The certificate that a new connection of a gateway is shown."""
    context = ssl.create_default_context(cafile=str(ca))
    context.set_alpn_protocols(["h2"])
    host, _, port = picker.target.rpartition(":")
    async with asyncio.timeout(WAIT_S):
        _, writer = await asyncio.open_connection(host, int(port), ssl=context, server_hostname="moonpool")
    certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return ssl.DER_cert_to_PEM_cert(certificate)


async def test_a_renewed_certificate_is_shown_without_a_restart(start_endpoint, start_picker, tls_settings):
    files = tls_settings()
    picker = await start_picker(
        await start_endpoint(), picker_tls_cert=files["tls_cert"], picker_tls_key=files["tls_key"]
    )
    first = await certificate_shown(picker, files["tls_ca"])
    assert first.strip() == files["tls_cert"].read_text().strip()
    tls_settings("successor")
    renewed = await certificate_shown(picker, files["tls_ca"])
    assert renewed.strip() == files["tls_cert"].read_text().strip() != first.strip()
    files["tls_cert"].write_text("half written")
    assert await certificate_shown(picker, files["tls_ca"]) == renewed


async def test_a_certificate_that_cannot_be_used_is_refused_by_its_flag(start_endpoint, start_picker, tls_settings):
    files, other = tls_settings(), tls_settings("successor", of="other")
    endpoint = await start_endpoint()
    with pytest.raises(FrontendConfigError, match=r"--picker-tls-key .* does not match .* in --picker-tls-cert"):
        await start_picker(endpoint, picker_tls_cert=files["tls_cert"], picker_tls_key=other["tls_key"])
    with pytest.raises(FrontendConfigError, match=r"--picker-tls-cert .*gone\.pem cannot be read: No such file"):
        await start_picker(
            endpoint, picker_tls_cert=files["tls_cert"].with_name("gone.pem"), picker_tls_key=files["tls_key"]
        )


async def test_errors_are_json_that_openais_clients_read(two):
    picker, _ = two
    outcome = await picker.answer(json.dumps({"model": 5}).encode())
    assert set(outcome.error) == {"message", "type", "param", "code"}
    assert outcome.immediate is not None
    assert outcome.immediate.details.startswith("moonpool_")
