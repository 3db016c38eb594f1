"""Spans over a real receiver, and what becomes of them when there is none."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from telemetry import BadTracing, tracing

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED, UNSAMPLED = (f"00-{TRACE}-{PARENT}-{flag}" for flag in ("01", "00"))


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def start(endpoint: str, **variables: str) -> None:
        for name in ("OTEL_SERVICE_NAME", "OTEL_TRACES_SAMPLER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SDK_DISABLED"):
            monkeypatch.delenv(name, raising=False)
        given = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "20", **variables}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        tracing.configure("frontend", "fe-0")

    yield start
    tracing.close()


def wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_spans_arrive_with_parents_times_and_facts(configure: Any, otlp_receiver: Any) -> None:
    configure(otlp_receiver.url, OTEL_EXPORTER_OTLP_HEADERS="x-key=secret")
    otlp_receiver.spans.clear()
    with tracing.receive("POST /x", {"traceparent": SAMPLED}, http__route="/x", kind="chat") as root:
        with root.child("schedule", "client") as asking:
            tracing.begin("place", asking.traceparent, attempt=1).end()
        now_s = time.monotonic()
        root.past("queue", now_s - 2, now_s - 1)
        root.event("first token")
        with pytest.raises(ValueError), root.child("compute"):
            raise ValueError("boom")
    wait_for(lambda: len(otlp_receiver.spans) == 5)
    spans = {span["name"]: span for span in otlp_receiver.spans}
    assert {span["trace"] for span in spans.values()} == {TRACE}
    root_id = spans["POST /x"]["id"]
    assert spans["POST /x"]["parent"] == PARENT
    assert [spans[name]["parent"] for name in ("schedule", "queue", "compute")] == [root_id] * 3
    assert spans["place"]["parent"] == spans["schedule"]["id"]
    assert spans["POST /x"]["about"] == {"http.route": "/x", "moonpool.kind": "chat"}
    assert spans["POST /x"]["events"] == ["first token"]
    assert spans["place"]["about"] == {"moonpool.attempt": 1}
    queue = spans["queue"]
    assert queue["end_ns"] - queue["start_ns"] == pytest.approx(1e9, rel=1e-3)
    assert spans["POST /x"]["end_ns"] - queue["end_ns"] >= 0.99e9
    assert (spans["compute"]["is_error"], spans["compute"]["status"]) == (True, "ValueError: boom")
    assert {(span["node"], span["service"]) for span in spans.values()} == {("fe-0", "moonpool-frontend")}
    assert otlp_receiver.headers[-1]["x-key"] == "secret"
    wait_for(lambda: tracing.counts()["exported"] == 5)  # counted once the receiver has answered
    assert tracing.counts() == {"exported": 5, "failed": 0, "dropped": 0}


def test_a_trace_begins_here_where_nobody_began_one(configure: Any, otlp_receiver: Any) -> None:
    configure(otlp_receiver.url)
    with tracing.receive("POST /x", {}) as span:
        version, trace_id, span_id, flags = span.traceparent.split("-")
    assert (version, len(trace_id), len(span_id), int(flags, 16) & 1) == ("00", 32, 16, 1)
    assert tracing.begin("place", "") is tracing.OFF


def test_what_is_not_sampled_is_off_from_the_door_on(configure: Any, otlp_receiver: Any) -> None:
    configure(otlp_receiver.url)
    assert tracing.receive("POST /x", {"traceparent": UNSAMPLED}) is tracing.OFF
    configure(otlp_receiver.url, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0")
    assert tracing.receive("POST /x", {}) is tracing.OFF
    assert tracing.receive("POST /x", {"traceparent": SAMPLED}).is_on
    configure(otlp_receiver.url, OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.5")
    spans = [tracing.receive("POST /x", {}) for _ in range(200)]
    assert 50 < sum(span.is_on for span in spans) < 150
    for span in spans:
        span.end()


@pytest.mark.parametrize("traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01"])
def test_a_bad_traceparent_begins_a_trace_of_its_own(traceparent: str, configure: Any, otlp_receiver: Any) -> None:
    configure(otlp_receiver.url)
    with tracing.receive("POST /x", {"traceparent": traceparent}) as span:
        assert span.is_on
        assert TRACE not in span.traceparent


def test_a_dead_collector_costs_spans_and_nothing_else(configure: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    configure(f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_TIMEOUT="1")
    tracing.receive("POST /x", {}).end()
    wait_for(lambda: tracing.counts()["failed"] == 1)
    assert tracing.counts() == {"exported": 0, "failed": 1, "dropped": 0}


def test_a_full_queue_drops_and_counts(configure: Any, otlp_receiver: Any) -> None:
    otlp_receiver.is_silent.set()
    try:
        configure(otlp_receiver.url, OTEL_BSP_MAX_QUEUE_SIZE="10")
        for _ in range(100):
            tracing.receive("POST /x", {}).end()
        assert tracing.counts() == {"exported": 0, "failed": 0, "dropped": 90}
    finally:
        otlp_receiver.is_silent.clear()
    wait_for(lambda: tracing.counts()["exported"] == 10)


def test_the_end_waits_for_a_silent_collector_for_a_moment_only(configure: Any, otlp_receiver: Any) -> None:
    otlp_receiver.is_silent.set()
    try:
        configure(otlp_receiver.url)
        tracing.receive("POST /x", {}).end()
        began_s = time.monotonic()
        tracing.close()
        assert time.monotonic() - began_s < 9  # the exporter would wait for 10 s, the SDK for 30
    finally:
        otlp_receiver.is_silent.clear()
    assert tracing.receive("POST /x", {}) is tracing.OFF


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "must be http/protobuf"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "many"}, "many"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "0"}, "max_queue_size"),
    ],
)
def test_variables_that_cannot_be_followed_are_refused(
    variables: dict[str, str], said: str, configure: Any, otlp_receiver: Any
) -> None:
    with pytest.raises(BadTracing, match=said):
        configure(otlp_receiver.url, **variables)
    assert not tracing.is_on()


@pytest.mark.parametrize("variables", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_it_can_be_switched_off(variables: dict[str, str], configure: Any, otlp_receiver: Any) -> None:
    configure(otlp_receiver.url, **variables)
    assert not tracing.is_on()


def test_nothing_of_opentelemetry_is_loaded_while_it_is_off() -> None:
    script = (
        "import sys, conductor.server, frontend, worker.node, prefill_node.server, decode_node.server\n"
        "from telemetry import tracing\n"
        "tracing.configure('frontend', 'fe-0', {})\n"
        "assert tracing.receive('POST /x', {'traceparent': 'x'}) is tracing.OFF\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')], 'loaded'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
