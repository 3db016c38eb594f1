"""gRPC servers, channels and calls, over real sockets."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from rpc import control
from rpc.errors import InvalidArgument


class Echo(grpc.GenericRpcHandler):
    """One method: answers its request; "slow" never, "bad" with INVALID_ARGUMENT."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        async def echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            if request == b"slow":
                await asyncio.Event().wait()
            if request == b"bad":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "that was bad")
            return request

        return grpc.unary_unary_rpc_method_handler(echo) if details.method == "/t.Echo/Echo" else None


def add(server: grpc.aio.Server) -> None:
    server.add_generic_rpc_handlers((Echo(),))


async def echo(target: str, request: bytes, deadline_s: float | None = 10.0) -> bytes:
    async with control.open_channel(target) as channel:
        return await control.call(
            channel.unary_unary("/t.Echo/Echo")(request), what="Echo.Echo", target=target, deadline_s=deadline_s
        )


@pytest.mark.parametrize(
    ("listened", "advertise", "expected"),
    [
        ("0.0.0.0:7002", "", "0.0.0.0:7002"),
        ("0.0.0.0:7002", "10.0.0.2:17002", "10.0.0.2:17002"),
        ("0.0.0.0:34567", "worker.example:0", "worker.example:34567"),
        ("[::]:34567", "[fd00::2]:0", "[fd00::2]:34567"),
        ("unix:/run/a.sock", "unix:/shared/a.sock", "unix:/shared/a.sock"),
    ],
)
def test_others_dial_what_is_advertised_at_the_port_listened_at(listened: str, advertise: str, expected: str) -> None:
    assert control.target_to_dial(listened, advertise) == expected


@pytest.mark.parametrize(("listened", "advertise"), [("unix:/run/a.sock", "worker:0"), ("0.0.0.0:1", "worker")])
def test_an_advertised_target_without_a_port_is_refused(listened: str, advertise: str) -> None:
    with pytest.raises(InvalidArgument, match="'worker"):
        control.target_to_dial(listened, advertise)


async def test_a_server_at_port_zero_names_the_port_it_got() -> None:
    server = await control.start_server("127.0.0.1:0", add)
    assert not server.target.endswith(":0")
    assert await echo(server.target, b"x" * (8 << 20)) == b"x" * (8 << 20)
    await server.stop()


async def test_a_unix_socket_serves_and_is_removed_at_stop(tmp_path: Path) -> None:
    server = await control.start_server(f"unix:{tmp_path}/a.sock", add)
    assert await echo(server.target, b"hello") == b"hello"
    await server.stop()
    assert not (tmp_path / "a.sock").exists()


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(control.AddressInUse, match=target):
            await control.start_server(target, add)


async def test_a_port_of_another_control_server_is_in_use() -> None:
    server = await control.start_server("127.0.0.1:0", add)
    with pytest.raises(control.AddressInUse):
        await control.start_server(server.target, add)
    await server.stop()


async def test_a_live_unix_socket_is_in_use_and_goes_on_serving(tmp_path: Path) -> None:
    server = await control.start_server(f"unix:{tmp_path}/a.sock", add)
    with pytest.raises(control.AddressInUse):
        await control.start_server(server.target, add)
    assert await echo(server.target, b"still here") == b"still here"
    await server.stop()


async def test_a_dead_servers_unix_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = await control.start_server(f"unix:{path}", add)
    assert await echo(server.target, b"new") == b"new"
    await server.stop()


async def test_a_file_at_the_socket_path_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    path.write_text("precious")
    with pytest.raises(control.AddressInUse, match="not a socket"):
        await control.start_server(f"unix:{path}", add)
    assert path.read_text() == "precious"


@pytest.mark.parametrize("target", ["", "nonsense", "host:", ":80", "host:99999", "unix:"])
async def test_a_malformed_target_is_named(target: str) -> None:
    with pytest.raises(InvalidArgument, match="target"):
        await control.start_server(target, add)
    with pytest.raises(InvalidArgument, match="target"):
        control.open_channel(target)


async def test_an_unknown_host_cannot_be_bound() -> None:
    with pytest.raises(control.BindFailed, match=r"no-such-host\.invalid"):
        await control.start_server("no-such-host.invalid:0", add)


async def test_a_too_long_socket_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(control.BindFailed, match="shorter"):
        await control.start_server(f"unix:{tmp_path}/{'x' * 120}.sock", add)


async def test_a_missing_server_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        target = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(control.Unavailable) as caught:
        await echo(target, b"x")
    assert caught.value.target == target
    assert caught.value.what == "Echo.Echo"


async def test_a_slow_answer_exceeds_the_deadline() -> None:
    server = await control.start_server("127.0.0.1:0", add)
    with pytest.raises(control.ControlDeadlineExceeded, match=r"Echo\.Echo"):
        await echo(server.target, b"slow", deadline_s=0.1)
    await server.stop()


async def test_a_refusal_carries_code_and_details() -> None:
    server = await control.start_server("127.0.0.1:0", add)
    with pytest.raises(control.CallRefused, match="that was bad") as caught:
        await echo(server.target, b"bad")
    assert caught.value.code == "INVALID_ARGUMENT"
    await server.stop()


async def test_a_channel_reaches_the_server_that_comes_back(tmp_path: Path) -> None:
    target = f"unix:{tmp_path}/a.sock"
    first = await control.start_server(target, add)
    async with control.open_channel(target) as channel:
        method = channel.unary_unary("/t.Echo/Echo", request_serializer=None, response_deserializer=None)
        assert await control.call(method(b"1"), what="Echo", target=target, deadline_s=10) == b"1"
        await first.stop()
        with pytest.raises(control.Unavailable):
            await control.call(method(b"2"), what="Echo", target=target, deadline_s=10)
        second = await control.start_server(target, add)
        reply = await control.call(method(b"3", wait_for_ready=True), what="Echo", target=target, deadline_s=10)
        assert reply == b"3"
        await second.stop()


RUN_MAIN = """
import asyncio, sys
from rpc import control
async def main(stop):
    print("ready", flush=True)
    await (stop.wait() if sys.argv[1] == "event" else asyncio.Event().wait())
    return "stopped"
stop = asyncio.Event()
print(control.run(main(stop), stop=stop if sys.argv[1] == "event" else None))
"""


@pytest.mark.parametrize(("mode", "expected"), [("event", "stopped"), ("cancel", "None")])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_main_loop(mode: str, expected: str, number: signal.Signals) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", RUN_MAIN, mode], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=30)[0].decode().strip() == expected
        assert process.returncode == 0
