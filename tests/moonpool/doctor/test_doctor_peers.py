"""The doctor's greeting of another host's node: who is there, whether encrypted, and what is wrong with the way."""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from messenger import Messenger, MessengerConfig
from messenger.frames import PREFIX, VERSION, ConnectionReject, encode
from moonpool.doctor.checks import Level
from moonpool.doctor.peers import PeerProtocol, greet, judge_greeting
from rpc.control import start_server
from settings.keys import assemble

TlsSettings = Callable[..., dict[str, Path]]
HERE = "127.0.0.1"
WITHIN_S = 20.0


def environ_of(settings: dict[str, Path]) -> dict[str, str]:
    return {f"MOONPOOL_{name.upper()}": str(path) for name, path in settings.items()}


@pytest.fixture
def port_of(short_path: Path) -> Iterator[Callable[..., int]]:
    """The tcp port of a messenger with these settings."""
    with contextlib.ExitStack() as opened:

        def start(**settings: Path) -> int:
            config = assemble(MessengerConfig, transport="tcp", shm_dir=short_path, **settings)  # type: ignore[arg-type]
            messenger = Messenger(config, node_id="far", incarnation=7)
            opened.callback(messenger.close)
            return messenger.start().tcp_port

        yield start


def test_a_messenger_is_told_with_its_protocol_and_does_not_name_itself(port_of: Callable[..., int]) -> None:
    seen = greet(HERE, port_of(), {}, WITHIN_S)
    assert (seen.spoken, seen.encrypted, seen.loses_large) == (PeerProtocol.MESSENGER, False, False)
    level, found, _ = judge_greeting("h:1", seen)
    assert level is Level.OK
    assert found.startswith(f"h:1: messenger of protocol {VERSION}, unencrypted")
    assert "far" not in found
    assert "unencrypted, answers after" in found
    assert "path MTU" in found


def test_with_key_material_an_encrypted_messenger_is_greeted_in_cipher(
    port_of: Callable[..., int], tls_settings: TlsSettings
) -> None:
    settings = tls_settings()
    seen = greet(HERE, port_of(**settings), environ_of(settings), WITHIN_S)
    assert (seen.spoken, seen.encrypted) == (PeerProtocol.MESSENGER, True)


@pytest.mark.parametrize("ours", [True, False])
def test_a_side_that_alone_encrypts_is_told(port_of: Callable[..., int], tls_settings: TlsSettings, ours: bool) -> None:
    settings = tls_settings()
    port = port_of(**({} if ours else settings))
    level, _, advice = judge_greeting("h:1", greet(HERE, port, environ_of(settings) if ours else {}, WITHIN_S))
    assert (level, "on both sides or on neither" in advice) == (Level.FAIL, True)


async def test_a_roles_grpc_port_is_recognised() -> None:
    server = await start_server(f"{HERE}:0", lambda _: None)
    try:
        port = int(server.target.rpartition(":")[2])
        seen = await asyncio.to_thread(greet, HERE, port, {}, WITHIN_S)
    finally:
        await server.stop()
    assert seen.spoken is PeerProtocol.GRPC
    assert judge_greeting("h:1", seen)[0] is Level.OK


def test_a_grpc_port_is_recognised_that_closes_on_the_greeting_without_its_settings() -> None:
    """As gRPC's server does if it has read the greeting before it sends its settings, which depends on timing."""
    settings = b"\0\0\0\x04\0\0\0\0\0"
    with socket.create_server((HERE, 0)) as listener:

        def serve() -> None:
            greeted = listener.accept()[0]
            greeted.recv(1 << 20)
            greeted.close()
            silent = listener.accept()[0]
            silent.sendall(settings)
            kept.append(silent)

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        seen = greet(HERE, listener.getsockname()[1], {}, WITHIN_S)
        thread.join()
        kept[0].close()
    assert seen.spoken is PeerProtocol.GRPC


@contextlib.contextmanager
def speaker(say: Callable[[bytes], bytes | None]) -> Iterator[int]:
    """A port that answers what each caller says first; None: with silence."""
    with socket.create_server((HERE, 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller = listener.accept()[0]
                    kept.append(caller)
                    answer = say(caller.recv(1 << 20))
                    if answer is not None:
                        caller.sendall(answer)
                        caller.close()

        kept: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for caller in kept:
                caller.close()


def test_a_node_of_another_version_is_told() -> None:
    def of_next_version(said: bytes) -> bytes:
        magic, version, kind, zero, nbytes = PREFIX.unpack_from(said)
        return PREFIX.pack(magic, version + 1, kind, zero, nbytes) + bytes(nbytes)

    with speaker(of_next_version) as port:
        seen = greet(HERE, port, {}, WITHIN_S)
    assert seen.spoken is PeerProtocol.OTHER
    assert f"protocol version {VERSION + 1}, but this side has {VERSION}" in judge_greeting("h:1", seen)[1]


def test_another_program_is_told_by_what_it_says() -> None:
    with speaker(lambda _: b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        level, found, advice = judge_greeting("h:1", greet(HERE, port, {}, WITHIN_S))
    assert level is Level.WARN
    assert "b'HTTP'" in found
    assert "node with the same version" in advice


def test_a_way_that_loses_full_packets_is_told(port_of: Callable[..., int]) -> None:
    real = port_of()

    def small_only(said: bytes) -> bytes | None:
        if len(said) > 1200:
            return None
        with socket.create_connection((HERE, real), 20) as onward:
            onward.sendall(said)
            prefix = onward.recv(PREFIX.size, socket.MSG_WAITALL)
            nbytes = struct.unpack_from("<I", prefix, PREFIX.size - 4)[0]
            return prefix + onward.recv(nbytes, socket.MSG_WAITALL)

    with speaker(small_only) as port:
        seen = greet(HERE, port, {}, 5.0)  # waited for in full: the large greeting is never answered
    assert (seen.spoken, seen.loses_large) == (PeerProtocol.MESSENGER, True)
    level, found, advice = judge_greeting("h:1", seen)
    assert level is Level.FAIL
    assert "not one of 16 KiB" in found
    assert "tcp_mtu_probing" in advice


def test_what_a_stranger_says_is_shown_as_letters_and_in_few() -> None:
    words = "\x1b[2J\\[/x] [bold]all is well" + "x" * 50_000
    with speaker(lambda _: encode(ConnectionReject("other", words))) as port:
        command = [sys.executable, "-m", "moonpool", "doctor", "--peer", f"{HERE}:{port}"]
        environ = {**os.environ, "COLUMNS": "200"}
        shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environ)
        found = judge_greeting("h:1", greet(HERE, port, {}, WITHIN_S))[1]
    assert "\\[/x] [bold]all is" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert shown.stderr == ""
    assert found.isprintable()
    assert len(found) < 500
