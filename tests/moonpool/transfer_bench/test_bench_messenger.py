"""`moonpool bench messenger`, between real processes: what it measures, what it checks, what it says when it cannot."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from messenger import MessengerConfig
from moonpool.commands.bench import app
from moonpool.errors import ConfigError, TransferBenchFailed
from moonpool.options import size_of
from moonpool.transfer_bench import client, run
from moonpool.transfer_bench.client import BenchSession, ServerFacts, probe
from moonpool.transfer_bench.command import host_and_port, tls_of
from moonpool.transfer_bench.plan import BatchShape, BenchPlan
from moonpool.transfer_bench.server import BenchServer, SliceDigests
from rpc.control import secure
from settings.keys import assemble
from settings.messenger import TlsSettings

COMMAND = [sys.executable, "-m", "moonpool", "bench", "messenger"]
TLS = Path(__file__).parents[2] / "data" / "tls"
NO_TLS = TlsSettings()
WITH_TLS = TlsSettings(TLS / "node.pem", TLS / "node.key", TLS / "ca.pem")
SMALL = BenchPlan(
    sizes=(4096,),
    slices=(1, 7),
    directions=("write", "read"),
    transports=("tcp",),
    window=4,
    seconds=0.05,
    digests=False,
    deadline_s=60.0,
)


def listening(*flags: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    command = [*COMMAND, "--listen", "127.0.0.1:0", "--json", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        yield int(told["target"].rpartition(":")[2]), process
        process.terminate()
        assert process.wait(60) == 0


@pytest.fixture(scope="module")
def owner() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    yield from listening()


@pytest.fixture
def port(owner: tuple[int, subprocess.Popen[str]]) -> int:
    return owner[0]


def measured(plan: BenchPlan, port: int, tls: TlsSettings = NO_TLS) -> run.BenchOutcome:
    return run.measure_all(plan, "127.0.0.1", port, tls, Console(quiet=True))


def test_alone_it_measures_both_transports_of_this_host_and_leaves_nothing() -> None:
    flags = ["--seconds", "0.05", "--size", "64KiB", "--json"]
    done = subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=240, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert [(line["transport"], line["direction"]) for line in told["results"]] == [
        ("shm", "write"),
        ("shm", "read"),
        ("tcp", "write"),
        ("tcp", "read"),
    ]
    assert all(line["gbps"] > 0 and line["p50_us"] <= line["p99_us"] <= line["max_us"] for line in told["results"])
    assert all(line["checked_bytes"] == 64 << 10 for line in told["results"])
    assert "4 of 4: tcp read 64 KiB" in done.stderr


def test_the_other_side_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(run, "START_TIMEOUT_S", 0.2)
    with pytest.raises(TransferBenchFailed, match="the other side did not start"):
        run.measure_here(SMALL, NO_TLS, Console(quiet=True))


def test_slices_and_whole_pieces_go_both_ways(port: int) -> None:
    outcome = measured(replace(SMALL, priority="urgent"), port)
    assert [(r.slices, r.batch_bytes, r.direction) for r in outcome.results] == [
        (1, 4096, "write"),
        (1, 4096, "read"),
        (7, 7 * 4096, "write"),
        (7, 7 * 4096, "read"),
    ]
    assert outcome.there["cores"] == os.cpu_count()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_digests_of_every_batch_are_compared(port: int, transport: str) -> None:
    outcome = measured(replace(SMALL, digests=True, slices=(3,), transports=(transport,)), port)
    assert all(r.digests_compared >= r.batches for r in outcome.results)


def test_a_batch_whose_bytes_differ_fails_the_command(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(BenchSession):
        async def hash_of(self, shape: BatchShape, base: int) -> str:
            return await super().hash_of(shape, base + 256 if base == 0 else base - 256)

    monkeypatch.setattr(run, "BenchSession", Elsewhere)
    with pytest.raises(TransferBenchFailed, match="left wrong bytes"):
        measured(SMALL, port)


def test_a_batch_with_wrong_digests_fails_the_command(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SliceDigests.message
    monkeypatch.setattr(SliceDigests, "message", lambda *args: right(*args)[:-1] + b"x")
    with pytest.raises(TransferBenchFailed, match="with wrong digests"):
        measured(replace(SMALL, digests=True, directions=("write",)), port)


def test_memory_is_lent_for_a_session_alone(owner: tuple[int, subprocess.Popen[str]]) -> None:
    port, process = owner
    measured(SMALL, port)
    until = time.monotonic() + 60
    while "memfd:bench" in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < until, "the memory of a session that is over is still there"
        time.sleep(0.05)


class Stream:
    """A session's stream, of which a test is both ends."""

    def __init__(self, *said: dict[str, Any]) -> None:
        self.said, self.answers = [json.dumps(message).encode() for message in said], [b""]

    async def read(self) -> bytes | None:
        return self.said.pop(0) if self.said else None

    async def write(self, answer: bytes) -> None:
        self.answers.append(answer)


@pytest.fixture
def lender(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[BenchServer, threading.Event, threading.Event]]:
    """An owner in this process whose lending takes as long as a test wants: when it begins, and that it may end."""
    begun, may_end = threading.Event(), threading.Event()

    def slowly(memory: Any) -> None:
        begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr("moonpool.transfer_bench.server.fill", slowly)
    owner = BenchServer("127.0.0.1", assemble(MessengerConfig, transport="tcp"))
    owner.messenger.start()
    yield owner, begun, may_end
    owner.close()
    gc.collect()
    assert "memfd:bench" not in Path("/proc/self/maps").read_text()


HELLO = {"version": client.VERSION, "node_id": "x", "region_nbytes": 1 << 20}


async def test_memory_goes_when_its_caller_leaves_before_it_is_there(lender: Any) -> None:
    owner, begun, may_end = lender
    task = asyncio.create_task(owner.session(None, Stream(HELLO)))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    until = time.monotonic() + 60
    while owner.messenger.counters()["regions_open"] or owner._sessions:
        assert time.monotonic() < until
        await asyncio.sleep(0.01)


async def test_a_caller_that_is_being_served_is_not_served_twice(lender: Any) -> None:
    owner, begun, may_end = lender
    first = asyncio.create_task(owner.session(None, Stream(HELLO)))
    await asyncio.to_thread(begun.wait, 60)
    second = Stream(HELLO)
    may_end_soon = asyncio.get_running_loop().call_later(1.0, may_end.set)
    await owner.session(None, second)
    may_end_soon.cancel()
    may_end.set()
    assert b"1 sessions are open" in second.answers[-1]
    await first
    assert owner.messenger.counters()["regions_open"] == 0


def test_nobody_listening_is_said(unused_port: Callable[[], int]) -> None:
    with pytest.raises(TransferBenchFailed, match=r"nothing listens at .*: start `moonpool bench messenger --listen`"):
        measured(SMALL, unused_port())


@pytest.fixture
def unused_port() -> Callable[[], int]:
    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as free:
            return int(free.getsockname()[1])

    return find


def test_a_host_that_does_not_exist_is_said() -> None:
    with pytest.raises(TransferBenchFailed, match=r"unknown host 'no-such-host\.invalid'"):
        run.measure_all(SMALL, "no-such-host.invalid", 1, NO_TLS, Console(quiet=True))


def test_silence_is_told_as_what_a_firewall_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_TIMEOUT_S", 0.3)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        # The kernel drops what comes when its queue of connections that nobody accepts is full.
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        with pytest.raises(TransferBenchFailed, match=r"no answer from .* a firewall drops packets to port"):
            probe(*full.getsockname(), "")
        for sock in waiting:
            sock.close()


def test_another_version_is_refused_by_name(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "VERSION", 999)
    with pytest.raises(TransferBenchFailed, match=r"rejects the session: .*the other 999: run the same Moonpool"):
        measured(SMALL, port)


def test_a_data_port_that_cannot_be_reached_is_named(
    port: int, monkeypatch: pytest.MonkeyPatch, unused_port: Callable[[], int]
) -> None:
    class Blocked(BenchSession):
        async def open(self, region_nbytes: int) -> ServerFacts:
            owner = await super().open(region_nbytes)
            return replace(owner, endpoint=replace(owner.endpoint, tcp_port=unused_port()))

    monkeypatch.setattr(run, "BenchSession", Blocked)
    with pytest.raises(TransferBenchFailed, match=r"the port for the bytes.*--data-port"):
        measured(SMALL, port)


def test_what_is_no_owner_is_not_taken_for_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        other.listen()

        # Whoever connects is hung up on, as by a server of another kind.
        def hang_up() -> None:
            for _ in range(50):
                try:
                    sock, _ = other.accept()
                except OSError:
                    return
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                sock.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(TransferBenchFailed, match="is not `moonpool bench messenger --listen`"):
            measured(SMALL, int(other.getsockname()[1]))
        other.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_both_sides_encrypt_or_neither_does() -> None:
    flags = [text for name, value in vars(WITH_TLS).items() for text in (f"--{name.replace('_', '-')}", str(value))]
    try:
        for port, _ in listening(*flags):
            assert len(measured(replace(SMALL, slices=(1,)), port, WITH_TLS).results) == 2
            with pytest.raises(TransferBenchFailed, match="if it uses TLS, set tls_cert"):
                measured(SMALL, port)
    finally:
        secure(None)


def test_that_the_other_side_does_not_encrypt_is_said(port: int) -> None:
    try:
        with pytest.raises(TransferBenchFailed, match="it does not use TLS, but this side does"):
            measured(SMALL, port, WITH_TLS)
    finally:
        secure(None)


def test_key_material_is_named_by_variables_as_for_a_role_and_by_flags_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tls_of(None, None, None, "") == NO_TLS
    for name in ("tls_cert", "tls_key", "tls_ca"):
        monkeypatch.setenv(f"MOONPOOL_{name.upper()}", str(TLS / "expired.pem"))
    assert tls_of(WITH_TLS.tls_cert, WITH_TLS.tls_key, None, "") == replace(WITH_TLS, tls_ca=TLS / "expired.pem")


def test_interrupted_it_tells_what_it_has() -> None:
    command = [*COMMAND, "--seconds", "0.05", "--size", "4KiB", *("--slices", "1") * 200, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while "2 of " not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        told = json.loads(process.stdout.read().splitlines()[-1])
        process.stderr.read()
        assert process.wait(60) == 130
    assert told["interrupted"]
    assert 0 < len(told["results"]) < 200


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--listen", "--to", "a"], "conflict"),
        (["--size", "5x"], "--size must be a number of bytes"),
        (["--size", "0"], "--size must be at least 1 byte, got 0"),
        (["--size", "100", "--digests"], "a multiple of 256 bytes"),
        (["--slices", "0"], "--slices must be from 1 to"),
        (["--size", "3GiB", "--slices", "2"], "reduce --size or --slices"),
        (["--transport", "pigeon"], "got 'pigeon'"),
        (["--direction", "up"], "got 'up'"),
        (["--priority", "high"], "--priority must be one of urgent, normal, background, got 'high'"),
        (["--to", "host:x"], "got 'host:x'"),
        (["--to", "host:99999"], "up to 65535"),
        (["--listen", "127.0.0.1:65535"], "must be at most 65535: choose one with --data-port"),
        (["--to", "host", "--data-port", "7000"], "--data-port needs --listen"),
        (["--tls-cert", "node.pem", "--tls-key", "node.key"], "tls_ca must be set"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["messenger", *flags])
    assert result.exit_code == ConfigError.exit_code
    assert said in result.stderr


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("h", ("h", 7011)),
        ("h:1", ("h", 1)),
        (":80", ("0.0.0.0", 80)),
        ("[::1]:5", ("::1", 5)),
        ("10.0.0.1", ("10.0.0.1", 7011)),
    ],
)
def test_addresses_may_lack_the_port(text: str, address: tuple[str, int]) -> None:
    assert host_and_port(text) == address


@pytest.mark.parametrize(("text", "nbytes"), [("64KiB", 65536), ("1.5 mib", 1572864), ("10", 10), ("1GB", 10**9)])
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    assert size_of("--size", text) == nbytes


def test_a_message_that_is_no_digests_agrees_with_nothing() -> None:
    digests = SliceDigests(np.zeros(1 << 16, np.uint8))
    messages: list[Any] = [b"", b"x" * 24, SliceDigests(np.zeros(1 << 20, np.uint8)).message(BatchShape(4096), 1 << 17)]
    assert [digests.agrees(message) for message in messages] == [False, False, False]
