"""The KV agent's process, as vLLM's scheduler sees it: its start, the messages from and to it, its end.

The scheduler never waits for the agent, except at its start: a thread writes messages, another reads replies.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgpack
from blake3 import blake3

from rpc.private_folder import create_private, open_private
from vllm_worker.agent_messages import AGENT_SOCKET, COPIES_SOCKET_NAME, DescribedModel, pack, unpacker

log = logging.getLogger(__name__)

_START_S: Final = 120.0
_PREFIX: Final = "vllm-"
_CONFIG: Final = "agent.json"
_ABANDONED_S: Final = 60.0  # a younger folder may be about to be locked
_END_S: Final = 10.0
_READ_NBYTES: Final = 1 << 20


class AgentFailed(Exception):
    """The agent did not start."""


def folder_of(engine_id: str) -> Path:
    """Return the folder in which all processes of one vLLM find the agent's socket, by vLLM's id of the engine."""
    name = blake3(engine_id.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"moonpool-{os.getuid()}" / f"{_PREFIX}{name}"


def copies_socket(engine_id: str) -> Path:
    """Return the socket to which the ranks of this engine connect."""
    return folder_of(engine_id) / COPIES_SOCKET_NAME


class AgentLink:
    """The agent's process, and the messages from and to it."""

    def __init__(self, process: subprocess.Popen[bytes], own: socket.socket, folder: Path) -> None:
        self._process = process
        self._socket = own
        self._folder = folder
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._in: deque[list[Any]] = deque()
        self._first_news = threading.Event()
        self.has_ended = False
        for work in (self._write, self._read):
            threading.Thread(target=work, name=f"kv-agent{work.__name__}", daemon=True).start()

    @classmethod
    def start(cls, settings: Mapping[str, Any], model: DescribedModel, engine_id: str) -> AgentLink:
        """Start an agent with these settings, and wait until it is ready. Raises AgentFailed and OSError."""
        folder = folder_of(engine_id)
        os.close(open_private(folder, create=True))
        _remove_abandoned(folder.parent)
        config = folder / _CONFIG
        lock = create_private(config)
        fcntl.flock(lock, fcntl.LOCK_EX)  # until this process ends
        with os.fdopen(os.dup(lock), "w") as file:  # JSON is YAML
            json.dump({"node_id": f"kv-agent-{folder.name}", **settings, "socket_dir": str(folder)}, file)
        own, its = socket.socketpair()
        with its:
            os.set_inheritable(its.fileno(), True)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "moonpool", "kv-agent", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # its announcement; errors and logs go to stderr
                pass_fds=[its.fileno()],
                env={
                    **os.environ,
                    AGENT_SOCKET: str(its.fileno()),
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                process_group=0,  # Ctrl-C first ends vLLM
            )
        link = cls(process, own, folder)
        link.send("model", asdict(model))
        if not link._first_news.wait(_START_S) or link.take() != [["ready"]]:
            link.close()
            raise AgentFailed("Moonpool's KV agent did not start; its error is above")
        return link

    def send(self, *message: Any) -> None:
        """Queue a message for the agent; it is dropped if that has ended."""
        if not self.has_ended:
            self._out.put(pack(*message))

    def take(self) -> list[list[Any]]:
        """Return the messages that have arrived since the last call."""
        found: list[list[Any]] = []
        while self._in:
            found.append(self._in.popleft())
        return found

    def close(self) -> None:
        """End the agent, which returns what it has leased."""
        self.has_ended = True
        self._out.put(None)
        self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self) -> None:
        while (data := self._out.get()) is not None:
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the reader says so

    def _read(self) -> None:
        stream = unpacker()
        try:
            while data := self._socket.recv(_READ_NBYTES):
                stream.feed(data)
                for message in stream:
                    self._in.append(message)
                self._first_news.set()
        except (OSError, ValueError, msgpack.UnpackException) as error:
            log.error("the replies of Moonpool's KV agent cannot be read: %r", error)
        if not self.has_ended:
            log.error("Moonpool's KV agent has ended: vLLM goes on without the pool until it is started again")
            self.has_ended = True
        self._first_news.set()


def _remove_abandoned(folder: Path) -> None:
    """Remove the folders of engines whose processes were killed: nobody locks the agent's configuration there."""
    for config in folder.glob(f"{_PREFIX}*/{_CONFIG}"):
        with contextlib.suppress(OSError), config.open() as file:
            if time.time() - config.stat().st_mtime > _ABANDONED_S:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(config.parent, ignore_errors=True)
