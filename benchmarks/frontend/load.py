"""Streaming clients with little overhead that record the time of every token."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass
class StreamedAnswer:
    """One streamed answer. `at`: arrival of each event with a choice, on the monotonic clock."""

    began: float = 0.0
    at: list[float] = field(default_factory=list)
    status: int = 0
    is_whole: bool = False  # the last event was received


async def ask(url: str, body: dict[str, Any]) -> StreamedAnswer:
    """POST /v1/completions and read the stream to its end."""
    parts = urlsplit(url)
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    stream = StreamedAnswer(began=time.monotonic())
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    try:
        writer.write(head.encode() + data)
        await writer.drain()
        stream.status = int((await reader.readline()).split()[1])
        while True:
            line = await reader.readline()
            if not line:
                return stream
            if line.startswith(b"data: {"):
                if stream.status == 200 and b'"error"' not in line[:16]:
                    stream.at.append(time.monotonic())
            elif line.startswith(b"data: [DONE]"):
                stream.is_whole = True
    finally:
        writer.close()


async def many(url: str, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[StreamedAnswer]:
    """Send all requests, at most `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> StreamedAnswer:
        async with gate:
            return await ask(url, body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value at that share of the sorted values; 0 if empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def gaps(streams: Sequence[StreamedAnswer]) -> list[float]:
    """Return the times between successive events of the streams."""
    return [b - a for stream in streams for a, b in zip(stream.at, stream.at[1:], strict=False)]
