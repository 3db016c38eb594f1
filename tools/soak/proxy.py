"""Proxy for one TCP address that injects network faults, with real sockets on a separate event loop.

Connections to the proxy are forwarded to the target. Faults apply to open and new connections, in one direction or
both, until `heal`; `reset` and `abandon` act once. Directions are relative to the caller: UP is to the target, DOWN
from it.
"""

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

Way = Literal["up", "down"]
UP: Way = "up"
DOWN: Way = "down"
BOTH: tuple[Way, Way] = (UP, DOWN)

_CHUNK_NBYTES = 64 << 10
_CONNECT_TIMEOUT_S = 10.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

_T = TypeVar("_T")


@dataclass
class Fault:
    """Faults of one direction."""

    free: asyncio.Event = field(default_factory=asyncio.Event)
    """While it is not set, bytes are held back, not lost."""
    delay_s: float = 0.0
    bytes_per_s: float | None = None
    reset_after: int | None = None
    flip_after: int | None = None


@dataclass(eq=False)
class _Pipe:
    """A caller's connection and the corresponding connection to the target."""

    ends: dict[Way, tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    """The end from which the bytes of a direction are read."""
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self, *ways: Way) -> None:
        for way in ways or BOTH:
            _reset(self.ends[way][1])


class FaultProxy:
    """Context manager that runs the proxy; callers connect to `address`. Thread-safe."""

    def __init__(self, target: tuple[str, int], listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        """Listen on a free port if `listen_port` is 0."""
        self._target = target
        self._pipes: set[_Pipe] = set()
        self._abandoned: set[_Pipe] = set()
        self._refusing = False
        self.connections = 0
        """Number of accepted connections."""
        self.passed: dict[Way, int] = {UP: 0, DOWN: 0}
        """Number of forwarded bytes."""
        self.flipped = 0
        """Number of changed bytes."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._faults = self._call(self._no_faults)
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, listen_host, listen_port, limit=_CHUNK_NBYTES), self._loop
        ).result()
        self.address: tuple[str, int] = self._server.sockets[0].getsockname()[:2]

    def __enter__(self) -> "FaultProxy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def hold(self, *ways: Way) -> None:
        """Hold all bytes of the directions (default: both) until `heal`; connections are still accepted."""
        self._set(ways, lambda fault: fault.free.clear())

    def delay(self, delay_s: float, *ways: Way) -> None:
        """Delay each chunk of at most 64 KiB."""
        self._set(ways, lambda fault: setattr(fault, "delay_s", delay_s))

    def throttle(self, bytes_per_s: float, *ways: Way) -> None:
        """Limit the rate per connection and direction."""
        self._set(ways, lambda fault: setattr(fault, "bytes_per_s", bytes_per_s))

    def reset_after(self, nbytes: int, way: Way) -> None:
        """Reset the connection after the next `nbytes` bytes, even within a frame."""
        self._set((way,), lambda fault: setattr(fault, "reset_after", nbytes))

    def flip_after(self, nbytes: int, way: Way) -> None:
        """Change the byte after the next `nbytes` bytes, once."""
        self._set((way,), lambda fault: setattr(fault, "flip_after", nbytes))

    def refuse(self) -> None:
        """Reset new connections until `heal`."""
        self._call(lambda: setattr(self, "_refusing", True))

    def heal(self) -> None:
        """Remove all faults: forward held bytes, and reset abandoned connections on the caller's side, too."""
        self._call(self._heal)

    def reset(self) -> int:
        """Reset all connections and return their number."""
        return self._call(self._reset_all)

    def abandon(self) -> int:
        """Make all connections half-open and return their number.

        The target's end is reset; the caller is not notified and its bytes are no longer read.
        """
        return self._call(self._abandon_all)

    def describe(self) -> str:
        """Describe the open connections, the faults and the forwarded bytes."""
        return self._call(self._describe)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, act: Callable[[], _T]) -> _T:
        async def run() -> _T:
            return act()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def _set(self, ways: tuple[Way, ...], change: Callable[[Fault], None]) -> None:
        def change_all() -> None:
            for way in ways or BOTH:
                change(self._faults[way])

        self._call(change_all)

    # The methods below run on the event loop.

    def _no_faults(self) -> dict[Way, Fault]:
        faults = {UP: Fault(), DOWN: Fault()}
        for fault in faults.values():
            fault.free.set()
        return faults

    def _heal(self) -> None:
        held, self._faults, self._refusing = self._faults, self._no_faults(), False
        for fault in held.values():
            fault.free.set()
        for pipe in self._abandoned:
            pipe.reset(UP)
        self._abandoned.clear()

    def _reset_all(self) -> int:
        for pipe in self._pipes:
            pipe.reset()
        return len(self._pipes)

    def _abandon_all(self) -> int:
        pipes, self._pipes = self._pipes, set()
        self._abandoned |= pipes
        for pipe in pipes:
            for pump in pipe.pumps:
                pump.cancel()
            pipe.reset(DOWN)
        return len(pipes)

    def _describe(self) -> str:
        held = [way for way, fault in self._faults.items() if not fault.free.is_set()]
        return (
            f"{len(self._pipes)} connections and {len(self._abandoned)} half-open ones of {self.connections}, "
            f"{'refusing more, ' if self._refusing else ''}held: {held}, faults {self._faults}, passed {self.passed}"
        )

    async def _end(self) -> None:
        self._server.close()
        pipes = self._pipes | self._abandoned
        for pipe in pipes:
            pipe.reset()
            for pump in pipe.pumps:
                pump.cancel()
        await asyncio.gather(*(pump for pipe in pipes for pump in pipe.pumps), return_exceptions=True)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close their sockets in the next round

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self._refusing:
            _reset(writer)
            return
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                up, down = (reader, writer), await asyncio.open_connection(*self._target, limit=_CHUNK_NBYTES)
        except OSError:
            _reset(writer)
            return
        pipe = _Pipe({UP: up, DOWN: down})
        pipe.pumps = [asyncio.create_task(self._pump(pipe, UP, DOWN)), asyncio.create_task(self._pump(pipe, DOWN, UP))]
        self._pipes.add(pipe)
        await asyncio.gather(*pipe.pumps, return_exceptions=True)
        if pipe not in self._abandoned:
            self._pipes.discard(pipe)
            for _, end in pipe.ends.values():
                end.close()

    async def _pump(self, pipe: _Pipe, way: Way, other: Way) -> None:
        reader, writer = pipe.ends[way][0], pipe.ends[other][1]
        with contextlib.suppress(OSError):
            while piece := await reader.read(_CHUNK_NBYTES):
                await self._hinder(way, len(piece))
                kept = self._damaged(way, piece)
                writer.write(kept)
                self.passed[way] += len(kept)
                if len(kept) < len(piece):
                    await writer.drain()
                    pipe.reset()
                    return
                await writer.drain()
            writer.write_eof()
            return
        pipe.reset()

    async def _hinder(self, way: Way, nbytes: int) -> None:
        fault = self._faults[way]
        pause_s = fault.delay_s + (nbytes / fault.bytes_per_s if fault.bytes_per_s else 0.0)
        if pause_s:
            await asyncio.sleep(pause_s)
        while not (fault := self._faults[way]).free.is_set():
            await fault.free.wait()

    def _damaged(self, way: Way, piece: bytes) -> bytes:
        """Apply damage to a chunk; the connection must be reset after it if the result is shorter."""
        fault = self._faults[way]
        if fault.flip_after is not None:
            at, fault.flip_after = fault.flip_after, fault.flip_after - len(piece)
            if at < len(piece):
                fault.flip_after = None
                self.flipped += 1
                piece = piece[:at] + bytes([piece[at] ^ 0x20]) + piece[at + 1 :]
        if fault.reset_after is not None:
            at, fault.reset_after = fault.reset_after, fault.reset_after - len(piece)
            if at < len(piece):
                fault.reset_after = None
                return piece[:at]
        return piece


def _reset(writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
