"""Subscriber to vLLM's KV events: numbered batches over ZeroMQ, with those that were missed asked for again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

_REPLAY_S: Final = 10.0
_AGAIN_S: Final = 1.0
_MOST_WAITING: Final = 100_000  # batches


@dataclass(frozen=True, slots=True)
class EventSockets:
    """Unix sockets on which vLLM publishes its events, and replays them."""

    events: Path
    replay: Path

    @classmethod
    def beside(cls, copies_socket: Path) -> EventSockets:
        """Return the sockets of the worker whose connector uses `copies_socket`."""
        return cls(copies_socket.with_suffix(".events"), copies_socket.with_suffix(".replay"))

    def remove(self) -> None:
        """Remove the files that vLLM's process leaves if it is killed."""
        for path in (self.events, self.replay):
            path.unlink(missing_ok=True)


class EventSubscriber:
    """Follower of one vLLM engine's events, from its start to its end. Lives on the event loop."""

    def __init__(self, sockets: EventSockets, apply: Callable[[Any], None], lost: Callable[[], None]) -> None:
        """`apply(event)` gets every event in order; `lost()` is called when some are missing, before what follows."""
        self._sockets = sockets
        self._apply = apply
        self._lost = lost
        self._next = 0  # number of the next batch
        self.num_lost = 0  # times that batches were missing

    async def run(self) -> None:
        """Follow the events until cancelled."""
        import zmq.asyncio
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import KVEventBatch

        decoder = Decoder(type=KVEventBatch)
        context = zmq.asyncio.Context()
        try:
            subscription = context.socket(zmq.SUB)
            subscription.set_hwm(_MOST_WAITING)
            subscription.subscribe(b"")
            subscription.connect(f"ipc://{self._sockets.events}")
            while True:
                try:
                    _, number, payload = await subscription.recv_multipart()
                    await self._take(int.from_bytes(number, "big"), payload, decoder, context)
                except Exception:
                    log.exception("vLLM's KV events were not understood: its blocks are unknown to the conductor")
                    self._give_up()
                    await asyncio.sleep(_AGAIN_S)
        finally:
            context.destroy(linger=0)

    async def _take(self, number: int, payload: bytes, decoder: Any, context: Any) -> None:
        if number > self._next:
            await self._replay(decoder, context)
        if number > self._next:
            log.warning("vLLM's KV events %d to %d are lost", self._next, number - 1)
            self._give_up()
            self._next = number
        if number == self._next:
            self._take_batch(payload, decoder)

    def _take_batch(self, payload: bytes, decoder: Any) -> None:
        self._next += 1  # also if it cannot be read
        for event in decoder.decode(payload).events:
            self._apply(event)

    async def _replay(self, decoder: Any, context: Any) -> None:
        """Ask for the batches from `_next` on, and apply those that vLLM still has."""
        import zmq

        replay = context.socket(zmq.DEALER)
        try:
            replay.connect(f"ipc://{self._sockets.replay}")
            async with asyncio.timeout(_REPLAY_S):
                await replay.send_multipart((b"", self._next.to_bytes(8, "big")))
                while True:
                    _, _, number, payload = await replay.recv_multipart()
                    if not payload:  # the end
                        return
                    if int.from_bytes(number, "big") == self._next:
                        self._take_batch(payload, decoder)
        except TimeoutError:
            log.warning("vLLM does not replay its KV events")
        finally:
            replay.close(linger=0)

    def _give_up(self) -> None:
        self.num_lost += 1
        self._lost()
