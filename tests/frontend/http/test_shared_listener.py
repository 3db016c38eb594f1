"""Several frontends with one listening socket: one serves, and the kernel passes the right on at its death."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.errors import FrontendConfigError
from frontend.http.shared_listener import SharedListener

HOLDER = """
import fcntl, os, sys, time
lock = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.lockf(lock, fcntl.LOCK_EX)
print("held", flush=True)
if os.fork() == 0:  # a child that has the descriptor does not hold the lock
    sys.stdout.close()
    time.sleep(20)
    os._exit(0)
time.sleep(60)
"""


def listening() -> int:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(8)
    return listener.detach()


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """Process that holds the lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "frontend.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


async def test_the_right_to_accept_passes_on_at_the_death_of_its_holder(holder: int, tmp_path: Path) -> None:
    standby = SharedListener(listening(), tmp_path / "frontend.lock")
    try:
        assert not standby.try_take()
        waiting = asyncio.create_task(standby.take())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        os.kill(holder, signal.SIGKILL)
        await asyncio.wait_for(waiting, 10)
    finally:
        standby.close()


def test_the_first_takes_the_right_at_once(tmp_path: Path) -> None:
    shared = SharedListener(listening(), tmp_path / "frontend.lock")
    assert shared.try_take()
    assert not shared.socket.get_inheritable()
    shared.close()


def test_a_descriptor_that_does_not_listen_is_refused(tmp_path: Path) -> None:
    with socket.socket() as idle, pytest.raises(FrontendConfigError, match="must be a listening socket"):
        SharedListener(os.dup(idle.fileno()), tmp_path / "lock")
    read, write = os.pipe()
    with pytest.raises(FrontendConfigError, match="cannot be used as a socket"):
        SharedListener(read, tmp_path / "lock")
    os.close(read)
    os.close(write)
