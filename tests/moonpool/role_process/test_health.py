"""The sign of life over HTTP that Kubernetes' probes ask for: its states, and that a real role gives it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from moonpool.errors import ConfigError
from moonpool.role_process.health import health_answers
from moonpool.supervision.child import READY_PREFIX
from moonpool.supervision.http_port import claim_port
from settings.keys import InvalidSetting
from settings.node import HealthSettings


def status(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


async def statuses(port: int) -> tuple[int, int]:
    """Return the statuses of /live and /ready."""
    return await asyncio.to_thread(status, port, "/live"), await asyncio.to_thread(status, port, "/ready")


async def test_ready_is_told_between_the_start_and_the_wish_to_end_and_live_all_the_time() -> None:
    stop = asyncio.Event()
    async with health_answers(("127.0.0.1", 0), "n", stop) as (port, became_ready):
        assert await statuses(port) == (200, 503)
        became_ready()
        assert await statuses(port) == (200, 200)
        stop.set()
        assert await statuses(port) == (200, 503)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_an_address_that_is_taken_is_a_configuration_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--health: cannot listen at 127.0.0.1:{port}"):
            async with health_answers(("127.0.0.1", port), "n", asyncio.Event()):
                pass


def test_the_address_is_read() -> None:
    assert HealthSettings("0.0.0.0:8081").address == ("0.0.0.0", 8081)
    assert HealthSettings("[::]:0").address == ("::", 0)
    assert HealthSettings().address is None


@pytest.mark.parametrize("wrong", ["8081", ":8081", "a:b", "host:99999", "::1:80", "unix:/x"])
def test_what_is_no_address_is_refused(wrong: str) -> None:
    with pytest.raises(InvalidSetting, match="must be host:port"):
        HealthSettings(wrong)


def test_a_role_answers_once_it_can_be_called(short_path: Path) -> None:
    port = claim_port("127.0.0.1", 0)
    command = [sys.executable, "-m", "moonpool", "conductor", "--listen", f"unix:{short_path}/c.sock"]
    with subprocess.Popen(
        [*command, "--health", f"127.0.0.1:{port}", "--socket-dir", str(short_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as role:
        assert role.stdout is not None
        assert role.stdout.readline().startswith(READY_PREFIX)
        assert (status(port, "/live"), status(port, "/ready")) == (200, 200)
        role.send_signal(signal.SIGTERM)
        assert role.wait(60) == 0
