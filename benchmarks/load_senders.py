"""Cost and capacity of a sender of the load generator, with a minimal HTTP server in a separate process.

1. CPU time of one sender per request and per event of an answer, from two lengths of answers. loadtest/senders.py
   chooses the number of senders by it. It depends little on the machine's load.
2. Requests per second when all are due at once, and the lateness of sending at a given rate, per number of senders.

The server only writes an event every 10 ms to each connection, like decoding, so that the sender reads every event
separately. On a machine with few cores, the server and the senders still compete, and more senders than free cores have
no benefit.

The last line of output is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
import uvloop

from loadtest.http import allow_many_connections
from loadtest.plan import PlannedRequest
from loadtest.sender import LoadPlan, SendTally
from loadtest.senders import open_senders, send_watched, start_soon
from loadtest.server import ServerInfo
from loadtest.validity import ValidityEvidence

PROMPT_TOKENS = 256
SHORT, LONG = 2, 130
FEW, MANY = 64, 512
EVENT_EVERY_S = 0.01


class _Answers(asyncio.Protocol):
    """Protocol that reads one request per connection and writes `max_tokens` events."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._read = b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        if len(body) < length:
            return
        tokens = json.loads(body)["max_tokens"]
        usage = json.dumps({"prompt_tokens": PROMPT_TOKENS, "completion_tokens": tokens})
        event = b'data: {"choices":[{"index":0,"text":"x","token_ids":[7]}]}\n\n'
        end = f'data: {{"choices":[],"usage":{usage}}}\n\ndata: [DONE]\n\n'.encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        self._events = iter([event] * tokens + [end])
        self._next()

    def _next(self) -> None:
        event = next(self._events, None)
        if event is None:
            self._transport.close()
            return
        self._transport.write(event)
        asyncio.get_running_loop().call_later(EVENT_EVERY_S, self._next)


def serve(port: Connection) -> None:
    """Serve until terminated; sends the port number through the pipe."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Answers, "127.0.0.1", 0, backlog=4096)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def load_of(port: int, count: int, tokens: int, *, rate: float = float("inf"), limit: int | None = None) -> LoadPlan:
    """Return a load of `count` requests at a constant rate."""
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    requests = [PlannedRequest(i, i / rate, prompt, (), tokens, 0.0, i, False) for i in range(count)]
    return LoadPlan(ServerInfo(f"http://127.0.0.1:{port}", "m"), requests, 120.0, limit=limit)


def send(load: LoadPlan, senders: int) -> tuple[ValidityEvidence, float, float]:
    """Send the load; return (records, seconds, CPU seconds of this process)."""

    async def run() -> tuple[ValidityEvidence, float, float]:
        async with open_senders(load, senders) as opened:
            start, used = start_soon(), time.process_time()
            evidence = await send_watched(
                opened, load, start=start, stop=asyncio.Event(), tally=SendTally(len(load.requests))
            )
            return evidence, time.monotonic() - start, time.process_time() - used

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        evidence, seconds, used = runner.run(run())
    assert not evidence.lost
    assert all(r.outcome == "completed" for r in evidence.records), {r.reason for r in evidence.records}
    return evidence, seconds, used


def costs(port: int, count: int) -> tuple[float, float]:
    """Return the CPU seconds of one sender per request and per event."""
    send(load_of(port, FEW, SHORT, limit=FEW), 1)
    short, long = (send(load_of(port, count, n, limit=FEW), 1)[2] / count for n in (SHORT, LONG))
    event = (long - short) / (LONG - SHORT)
    return short - SHORT * event, event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1500, help="per measurement")
    parser.add_argument("--tokens", type=int, default=32, help="events per answer")
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second for measuring lateness")
    parser.add_argument("--senders", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    allow_many_connections()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    port = ours.recv()
    request_s, event_s = costs(port, args.requests // 4)
    print(f"CPU time of one sender   {1e3 * request_s:.2f} ms per request, {1e6 * event_s:.1f} µs per event")
    result: dict[str, Any] = {"cores": os.cpu_count()}
    result |= {"request_cpu_ms": 1e3 * request_s, "event_cpu_us": 1e6 * event_s}
    for senders in args.senders:
        _, seconds, _ = send(load_of(port, args.requests, args.tokens, limit=MANY), senders)
        evidence, *_ = send(load_of(port, args.requests, args.tokens, rate=args.rate), senders)
        lag_ms = 1e3 * np.percentile([r.lateness_s for r in evidence.records], [50, 99])
        print(
            f"{senders} sender{'s' if senders > 1 else ' '}   {args.requests / seconds:7,.0f} requests/s of "
            f"{args.tokens} events; at {args.rate:g}/s late by {lag_ms[0]:.2f} ms (p50), {lag_ms[1]:.1f} ms (p99)"
        )
        result[f"senders_{senders}"] = {
            "requests_per_s": args.requests / seconds,
            "lag_p50_ms": float(lag_ms[0]),
            "lag_p99_ms": float(lag_ms[1]),
        }
    server.terminate()
    server.join()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
