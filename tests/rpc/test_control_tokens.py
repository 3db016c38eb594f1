"""Join tokens over real gRPC: who is answered, by which kind of call, what is told, and files that change or break."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from rpc import control
from rpc.errors import CallRefused, InvalidArgument
from rpc.join_tokens import JoinTokens
from rpc.tls import TlsFiles

OLD, NEW, OTHER = "old-token-" + "a" * 22, "new-token-" + "b" * 22, "stranger-" + "c" * 23


class Service(grpc.GenericRpcHandler):
    """One method of each kind, which echoes; `begun` counts those that were let in."""

    def __init__(self) -> None:
        self.begun = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        async def unary(request: bytes, context: Any) -> bytes:
            self.begun += 1
            return request

        async def yields(request: bytes, context: Any) -> AsyncIterator[bytes]:
            self.begun += 1
            yield request

        async def gathers(requests: AsyncIterator[bytes], context: Any) -> bytes:
            self.begun += 1
            return b"".join([request async for request in requests])

        async def both(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            self.begun += 1
            async for request in requests:
                yield request

        return {
            "/t/unary": grpc.unary_unary_rpc_method_handler(unary),
            "/t/yields": grpc.unary_stream_rpc_method_handler(yields),
            "/t/gathers": grpc.stream_unary_rpc_method_handler(gathers),  # type: ignore[arg-type]
            "/t/both": grpc.stream_stream_rpc_method_handler(both),  # type: ignore[arg-type]
        }.get(details.method)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def open_to_all_afterwards() -> Iterator[None]:
    yield
    control.admit_by(None)
    control.secure(None)


@pytest.fixture
def tokens(tmp_path: Path) -> Callable[..., JoinTokens]:
    """`tokens(*lines, name)`: a file of them, looked at again for each call."""

    def write(*lines: str, name: str = "tokens") -> JoinTokens:
        return JoinTokens(put(tmp_path / name, "\n".join(lines) + "\n"), look_every_s=0.0)

    return write


def put(path: Path, text: str) -> Path:
    """As an operator should: written aside, then renamed."""
    aside = path.with_name(path.name + ".new")
    aside.touch(0o600)
    aside.write_text(text)
    return aside.replace(path)


@pytest.fixture(params=["tcp", "unix"])
async def server(request: pytest.FixtureRequest, short_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await server()`: its address and service, with what `control.admit_by` was told last."""
    servers = []

    async def start() -> tuple[str, Service]:
        listen = "127.0.0.1:0" if request.param == "tcp" else f"unix:{short_path}/t.sock"
        service = Service()
        servers.append(await control.start_server(listen, lambda one: one.add_generic_rpc_handlers((service,))))
        return servers[-1].target, service

    yield start
    for each in servers:
        await each.stop()


async def echo(target: str) -> bytes:
    async with control.open_channel(target) as channel:
        rpc = channel.unary_unary("/t/unary")(b"hello")
        return await control.call(rpc, what="T.Unary", target=target, deadline_s=20.0)


async def every_kind(channel: grpc.aio.Channel) -> list[Any]:
    """Return the answers of the four kinds of call (and one without a method), or the codes of their refusals."""

    async def drained(stream: Any) -> list[bytes]:
        return [answer async for answer in stream]

    calls: list[Any] = [
        lambda: channel.unary_unary("/t/unary")(b"u"),
        lambda: drained(channel.unary_stream("/t/yields")(b"y")),
        lambda: channel.stream_unary("/t/gathers")(iter([b"1", b"2"])),
        lambda: drained(channel.stream_stream("/t/both")(iter([b"1", b"2"]))),
        lambda: channel.unary_unary("/t/none")(b""),
    ]
    results: list[Any] = []
    for begin in calls:
        results.append("INTERNAL")
        async with asyncio.timeout(20):
            while results[-1] == "INTERNAL":  # gRPC's word where what is sent meets the end of a call: ask again
                try:
                    results[-1] = await begin()
                except grpc.aio.AioRpcError as error:
                    results[-1] = error.code().name
    return results


async def test_every_kind_of_call_is_answered_with_the_token_and_refused_without(server: Any, tokens: Any) -> None:
    control.admit_by(tokens(NEW))
    target, service = await server()
    async with control.open_channel(target) as channel:
        assert await every_kind(channel) == [b"u", [b"y"], b"12", [b"1", b"2"], "UNIMPLEMENTED"]
    assert service.begun == 4
    control.admit_by(None)
    async with control.open_channel(target) as channel:
        assert await every_kind(channel) == ["UNAUTHENTICATED"] * 5  # not even which methods there are is told
    assert service.begun == 4


async def test_a_wrong_token_is_refused_with_what_to_do_and_told_nowhere(
    server: Any, tokens: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    control.admit_by(tokens(NEW))
    target, service = await server()
    control.admit_by(tokens(OTHER, name="other"))
    for _ in range(20):
        with pytest.raises(
            CallRefused, match=r"join token .* set join_token_file \(MOONPOOL_JOIN_TOKEN_FILE\)"
        ) as caught:
            await echo(target)
        assert caught.value.code == "UNAUTHENTICATED"
        assert not [token for token in (NEW, OTHER) if token in str(caught.value)]
    assert service.begun == 0
    refusals = [line for line in caplog.messages if line.startswith("refused a call from")]
    assert len(refusals) == 1  # of twenty: the rest is counted in the next one
    assert not [token for token in (NEW, OTHER) if token in caplog.text]


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", NEW)],
        [("authorization", f"Basic {NEW}")],
        [("authorization", f"Bearer {NEW}x")],
        [("authorization", f"Bearer {NEW[:-1]}")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {OTHER}"), ("authorization", f"Bearer {NEW}")],
        [("authorization-bin", f"Bearer {NEW}".encode())],
    ],
)
async def test_nothing_but_a_known_token_lets_in(server: Any, tokens: Any, metadata: Any) -> None:
    control.admit_by(tokens(NEW))
    target, service = await server()
    async with grpc.aio.insecure_channel(target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t/unary")(b"hello", metadata=metadata, timeout=20)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert service.begun == 0


async def test_a_token_is_replaced_without_a_restart_and_the_old_one_then_refused(server: Any, tokens: Any) -> None:
    accepted = tokens(OLD)
    control.admit_by(accepted)
    target, _ = await server()
    control.admit_by(tokens(OLD, name="a"))
    with_old = control.open_channel(target)
    control.admit_by(tokens("# the new one", NEW, OLD, name="b"))
    with_new = control.open_channel(target)
    unary = [channel.unary_unary("/t/unary") for channel in (with_old, with_new)]

    async def let_in() -> list[bool]:
        got = await asyncio.gather(*(each(b"x", timeout=20) for each in unary), return_exceptions=True)
        return [each == b"x" for each in got]

    assert await let_in() == [True, False]
    put(accepted.path, f"{OLD}\n{NEW}\n")
    assert await let_in() == [True, True]
    put(accepted.path, f"{NEW}\n")
    assert await let_in() == [False, True]
    put(accepted.path.with_name("a"), f"{NEW}\n")  # its channel is open already
    assert await let_in() == [True, True]
    for channel in (with_old, with_new):
        await channel.close()


@pytest.mark.parametrize("broken", ["gone", "empty", "short", "spaces", "open to all"])
async def test_a_file_that_breaks_leaves_the_last_good_tokens_in_force(
    server: Any, tokens: Any, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    accepted = tokens(NEW)
    control.admit_by(accepted)
    target, _ = await server()
    contents = {"gone": NEW, "empty": "# none\n", "short": "brief-secret\n", "spaces": f"{OTHER} {OTHER}\n"}
    put(accepted.path, contents.get(broken, f"{OTHER}\n"))
    if broken == "gone":
        accepted.path.unlink()
    if broken == "open to all":
        accepted.path.chmod(0o644)
    for _ in range(3):
        assert await echo(target) == b"hello"
    assert not accepted.knows(OTHER)
    told = [line for line in caplog.messages if "keeping the previous join tokens" in line]
    assert len(told) == 1
    assert "brief-secret" not in caplog.text
    assert OTHER not in caplog.text
    put(accepted.path, f"{OLD}\n")
    assert accepted.knows(OLD)
    assert not accepted.knows(NEW)


async def test_tokens_and_certificates_are_both_asked_for(tokens: Any, tls_settings: Any) -> None:
    settings = tls_settings()
    control.secure(TlsFiles(settings["tls_cert"], settings["tls_key"], settings["tls_ca"]))
    control.admit_by(tokens(NEW))
    service = Service()
    server = await control.start_server("127.0.0.1:0", lambda one: one.add_generic_rpc_handlers((service,)))
    assert await echo(server.target) == b"hello"
    control.admit_by(None)
    with pytest.raises(CallRefused, match="the call has none"):
        await echo(server.target)
    await server.stop()


async def test_tokens_over_tcp_in_the_clear_are_warned_of(tokens: Any, caplog: pytest.LogCaptureFixture) -> None:
    control.admit_by(tokens(NEW))
    server = await control.start_server("127.0.0.1:0", lambda _: None)
    await server.stop()
    assert [line for line in caplog.messages if "without encryption" in line]


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (None, 0o600, "cannot read .*: No such file"),
        (b"", 0o600, "must contain one token per line"),
        (b"# only\n\n", 0o600, "must contain one token per line"),
        (b"0123456789abcdef\nsecret-too\n", 0o600, r"line 2 must be one token of 16 to 512"),
        (b"s" * 513, 0o600, "line 1 must be one token"),
        (b"0123456789 abcdef", 0o600, "without spaces"),
        ("0123456789abcdéf".encode(), 0o600, "ASCII"),
        (b"x" * 70000, 0o600, "at most 65536 bytes"),
        (b"0123456789abcdef", 0o604, "chmod 600"),
        (b"0123456789abcdef", 0o602, "chmod 600"),
    ],
)
def test_a_file_of_no_use_is_refused_by_its_name(
    tmp_path: Path, content: bytes | None, mode: int, message: str
) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(InvalidArgument, match=message) as caught:
        JoinTokens(path)
    assert str(path) in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_group_may_read_the_file_as_a_mounted_secret_is(tmp_path: Path) -> None:
    path = put(tmp_path / "tokens", f"{NEW}\r\n  {OLD}  \n")
    os.chmod(path, 0o440)
    tokens = JoinTokens(path)
    assert tokens.newest() == NEW
    assert tokens.knows(OLD)
