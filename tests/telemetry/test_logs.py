"""Structured logs: what a line carries, in both formats."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from moonpool_proto.v1 import common_pb2
from telemetry import UnknownLogLevel, logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_json_line_carries_role_node_request_and_extra_fields(stream: io.StringIO) -> None:
    logs.configure("frontend", "fe-0", "info", json=True, stream=stream)
    with logs.request("cmpl-1"):
        logging.getLogger("x.y").warning("placed on %s", "p0", extra={"attempt": 2})
    line = json.loads(stream.getvalue())
    assert line["message"] == "placed on p0"
    assert (line["role"], line["node"], line["request_id"], line["attempt"]) == ("frontend", "fe-0", "cmpl-1", 2)
    assert (line["level"], line["logger"]) == ("warning", "x.y")
    assert line["time"].endswith("+00:00")


def test_request_id_follows_tasks_and_ends_with_its_block(stream: io.StringIO) -> None:
    logs.configure("frontend", "fe-0", "info", json=True, stream=stream)

    async def serve(request_id: str) -> None:
        with logs.request(request_id):
            await asyncio.create_task(asyncio.to_thread(logging.info, "in %s", request_id))

    async def both() -> None:
        await asyncio.gather(serve("a"), serve("b"))

    asyncio.run(both())
    logging.info("outside")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert sorted((line["message"], line.get("request_id")) for line in lines) == [
        ("in a", "a"),
        ("in b", "b"),
        ("outside", None),
    ]
    assert logs.current_request_id() == ""


def test_configuring_again_replaces_the_handler(stream: io.StringIO) -> None:
    logs.configure("frontend", "fe-0", "info", stream=io.StringIO())
    logs.configure("frontend", "fe-0", "warning", stream=stream)
    logging.info("dropped")
    logging.warning("kept")
    assert stream.getvalue().count("\n") == 1
    assert "kept" in stream.getvalue()


def test_text_line_keeps_line_breaks_of_a_message_inside_it(stream: io.StringIO) -> None:
    logs.configure("frontend", "frontend-0", "debug", stream=stream)
    with logs.request("r"):
        logging.debug("a\nERROR forged")
    assert len(stream.getvalue().splitlines()) == 1
    assert "a\\nERROR forged request_id=r" in stream.getvalue()


@pytest.mark.parametrize("as_json", [True, False])
def test_an_exception_is_shown_with_its_traceback(stream: io.StringIO, as_json: bool) -> None:
    logs.configure("frontend", "fe-0", "info", json=as_json, stream=stream)
    try:
        raise KeyError("lost")
    except KeyError:
        logging.exception("it broke")
    assert "KeyError: 'lost'" in stream.getvalue()
    assert "test_logs.py" in stream.getvalue()


async def test_a_call_that_is_no_protobuf_is_one_warning_without_a_traceback(
    stream: io.StringIO, tmp_path: Path
) -> None:
    logs.configure("conductor", "conductor", "info", stream=stream)

    async def never(request: Any, context: Any) -> None:
        raise AssertionError("the message cannot be read")

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(never, request_deserializer=common_pb2.Endpoint.FromString)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", {"Call": handler}),))
    target = f"unix:{tmp_path}/s"
    server.add_insecure_port(target)
    await server.start()
    async with grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/x.Y/Call")(b"\xff garbage", timeout=10)
    await server.stop(None)
    (line,) = stream.getvalue().splitlines()
    assert " WARNING " in line
    assert "malformed call of /x.Y/Call rejected: Error parsing message" in line


def test_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(UnknownLogLevel, match="'loud'"):
        logs.configure("frontend", "fe-0", "loud")
