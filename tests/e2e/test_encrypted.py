"""A cluster of single processes, all on host:port and encrypted: right tokens, and nothing for outsiders."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
import yaml

from messenger.frames import PREFIX, ConnectionReject, Hello, decode_body, decode_prefix, encode
from moonpool.supervision.child import READY_PREFIX

BLOCK_TOKENS = 8


@dataclass
class Encrypted:
    """Where the processes are called, and what they and the commands that ask them read."""

    url: str
    conductor: str
    environ: dict[str, str]
    pids: list[int]

    def ports(self) -> list[int]:
        """Where all but the frontend listen."""
        found = [connection for pid in self.pids[:-1] for connection in psutil.Process(pid).net_connections("tcp")]
        return [connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN]

    def run(self, *arguments: str, encrypted: bool = True) -> subprocess.CompletedProcess[str]:
        environ = self.environ if encrypted else {**self.environ, "MOONPOOL_CONFIG": ""}
        command = [sys.executable, "-m", "moonpool", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=100, check=False)


@pytest.fixture
def encrypted(
    random_model: Path, tls_settings: Callable[..., dict[str, Path]], tmp_path: Path, short_path: Path
) -> Iterator[Encrypted]:
    """Conductor, pool node, a prefill and a decode worker that count themselves to different hosts, and a frontend."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        conductor, pool = (f"127.0.0.1:{held.getsockname()[1]}" for held in (one, other))
    settings = {
        "model": str(random_model),
        "block_tokens": BLOCK_TOKENS,
        "conductor": conductor,
        "pool": pool,
        "transport": "tcp",
        "pool_bytes": 32 << 20,
        "capacity_tokens": 4096,
        "threads": 1,
        "port": 0,
        "log_level": "warning",
        **{key: str(path) for key, path in tls_settings().items()},
    }
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(settings))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MOONPOOL_")}
    environ = {**kept, "MOONPOOL_CONFIG": str(file), "OMP_NUM_THREADS": "1"}
    roles = [
        ["conductor", "--listen", conductor],
        ["pool-node", "--listen", pool, "--host-id", "first"],
        ["prefill-node", "--host-id", "first"],
        ["decode-node", "--host-id", "second"],
        ["frontend"],
    ]
    running: list[subprocess.Popen[str]] = []
    try:
        for role in roles:
            command = [sys.executable, "-m", "moonpool", *role, "--socket-dir", str(short_path / role[0])]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ))
        targets = [_target_of(process) for process in running]
        yield Encrypted(targets[-1], conductor, environ, [process.pid for process in running])
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.communicate(timeout=60)


def _target_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready = next(line for line in process.stdout if line.startswith(READY_PREFIX))
    target: str = json.loads(ready.removeprefix(READY_PREFIX))["target"]
    return target


async def test_an_encrypted_cluster_says_the_right_tokens_and_nothing_to_outsiders(
    encrypted: Encrypted,
    random_model: Path,
    judge_of: Callable[[Path], Any],
    session: aiohttp.ClientSession,
    tls_settings: Callable[..., dict[str, Path]],
) -> None:
    await _wait_ready(session, encrypted.url)
    rng = np.random.default_rng(3)
    head = rng.integers(5, 2000, 60).tolist()
    for _ in range(3):
        prompt = head + rng.integers(5, 2000, 20).tolist()
        body = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
        async with session.post(f"{encrypted.url}/v1/completions", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
        tokens = answer["choices"][0]["token_ids"]
        assert len(tokens) == 16
        assert judge_of(random_model).wrong_tokens(Spoken(prompt, tokens)) == []
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 56

    asked = ["--conductor", encrypted.conductor, "--json"]
    told = await asyncio.to_thread(encrypted.run, "status", *asked)
    assert len(json.loads(told.stdout)["nodes"]) == 3
    validated = await asyncio.to_thread(encrypted.run, "validate", *asked, "--wait", "20")
    assert json.loads(validated.stdout)["ok"], validated.stdout

    outsider = await asyncio.to_thread(encrypted.run, "status", *asked, encrypted=False)
    assert outsider.returncode == 1
    assert "if it uses TLS, set tls_cert" in outsider.stderr
    ports = encrypted.ports()
    assert len(ports) == 7  # all of them but the frontend's: of gRPC, and of KV where there is any
    for port in ports:
        assert answer_to(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == b""
        assert is_rejection(answer_to(port, encode(Hello("outsider", 1, "pool-node", 1, bytes(16), "tcp"))))
        assert answer_without_certificate(port) == b""


def answer_to(port: int, said: bytes) -> bytes:
    """All that comes back, in the clear, before the other side hangs up."""
    with socket.create_connection(("127.0.0.1", port), 30) as outsider:
        outsider.sendall(said)
        answer = b""
        try:
            while received := outsider.recv(1 << 16):
                answer += received
        except ConnectionError:
            pass
        return answer


def is_rejection(answer: bytes) -> bool:
    """Nothing at all, or a frame that says that nothing else is spoken here than TLS."""
    if not answer:
        return True
    kind, nbytes = decode_prefix(answer)
    message = decode_body(kind, answer[PREFIX.size :])
    return isinstance(message, ConnectionReject) and message.code == "tls" and len(answer) == PREFIX.size + nbytes


def answer_without_certificate(port: int) -> bytes:
    """Return what the other side sends over TLS to a client without a certificate, before it closes."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port), 30)) as outsider:
        try:
            return outsider.recv(1 << 16)
        except ssl.SSLError as error:
            return b"" if error.reason == "TLSV13_ALERT_CERTIFICATE_REQUIRED" else str(error).encode()


@dataclass
class Spoken:
    prompt_ids: list[int]
    token_ids: list[int]


async def _wait_ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(120):
        while True:
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)
