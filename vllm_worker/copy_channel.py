"""Socket between a worker and vLLM's processes: the slots' memory goes out with it, and ends of copies come back.

A worker listens on a Unix socket in a folder of its own; every rank of vLLM connects, names itself and receives the
layout and the descriptor of the slots' memory. Messages are msgpack arrays, one per packet:

    rank -> worker   ["rank", rank, number of ranks]
    worker -> rank   [fields of SlotLayout, bytes]   with the descriptor
    rank -> worker   ["layer", layer, [[job, start, end], ...]]   the layer of these prompts is in their slots
    rank -> worker   ["end", job, error or ""]                    vLLM no longer uses the slots of the job

An event counts once every rank has reported it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from messenger.mapping import mapped
from vllm_worker.block_layout import SlotLayout

log = logging.getLogger(__name__)

_PACKET_NBYTES: Final = 1 << 16
_SPANS_PER_PACKET: Final = 1000
_TIMEOUT_S: Final = 30.0

Spans = list[tuple[int, int, int]]  # (job, start, end) of prompt tokens


class CopyReports:
    """The worker's side. Lives on the event loop, on which it calls its callbacks."""

    def __init__(
        self,
        path: Path,
        *,
        num_ranks: int,
        on_layer: Callable[[int, Spans], None],
        on_end: Callable[[int, str], None],
    ) -> None:
        """Listen at `path`. Raises OSError."""
        self._num_ranks = num_ranks
        self._on_layer = on_layer
        self._on_end = on_end
        self._reported: Counter[tuple[Any, ...]] = Counter()
        self._errors: dict[tuple[Any, ...], str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path.unlink(missing_ok=True)  # of an earlier process with this id
        self._socket.bind(str(path))
        self._path = path
        self._socket.listen(num_ranks)
        self._socket.setblocking(False)
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(self, layout: SlotLayout, nbytes: int, fd: int) -> None:
        """Begin to accept ranks and to hand out the memory `fd` of `nbytes`."""
        self._keep(self._accept(msgpack.packb([list(astuple(layout)), nbytes]), fd))

    async def close(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _keep(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, offer: bytes, fd: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            socket.send_fds(connection, [offer], [fd])
            self._keep(self._read(connection))

    async def _read(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):  # the process ended; vLLM itself reports that
            connection.setblocking(False)
            while packet := await loop.sock_recv(connection, _PACKET_NBYTES):
                try:
                    self._take(msgpack.unpackb(packet))
                except Exception:
                    log.exception("a report of vLLM's process was not understood")

    def _take(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == "layer":
            spans = [(int(job), int(start), int(end)) for job, start, end in message[2]]
            if self._is_last(("layer", message[1], *spans)):
                self._on_layer(int(message[1]), spans)
        elif kind == "end":
            key = ("end", int(message[1]))
            if message[2]:
                self._errors[key] = str(message[2])
            if self._is_last(key):
                self._on_end(key[1], self._errors.pop(key, ""))
        elif kind == "rank" and message[2] != self._num_ranks:
            log.error("rank %s of vLLM is one of %s, expected %d", message[1], message[2], self._num_ranks)

    def _is_last(self, event: tuple[Any, ...]) -> bool:
        self._reported[event] += 1
        if self._reported[event] < self._num_ranks:
            return False
        del self._reported[event]
        return True


class CopyReporter:
    """A rank's side. Sends from any thread; the worker reads at once, so sending hardly blocks."""

    def __init__(self, path: str, rank: int, num_ranks: int) -> None:
        """Connect to the worker and map the slots for writing. Raises OSError."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.connect(path)
        offer, fds, _, _ = socket.recv_fds(self._socket, _PACKET_NBYTES, 1)
        layout, nbytes = msgpack.unpackb(offer)
        self.layout = SlotLayout(*layout)
        self.slots: NDArray[np.uint8] = mapped(fds[0], nbytes, writable=True)
        socket.close(fds[0])
        self._send(["rank", rank, num_ranks])

    def layer_saved(self, layer: int, spans: Spans) -> None:
        """Report that a layer of these spans is in the slots."""
        for first in range(0, len(spans), _SPANS_PER_PACKET):
            self._send(["layer", layer, spans[first : first + _SPANS_PER_PACKET]])

    def ended(self, job: int, error: str) -> None:
        """Report that vLLM no longer uses the job's slots, and why its KV is not in them, if it is not."""
        self._send(["end", job, error[:1000]])

    def close(self) -> None:
        self._socket.close()

    def _send(self, message: list[Any]) -> None:
        self._socket.send(msgpack.packb(message))
