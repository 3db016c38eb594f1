"""Baseline for the frontend: the same HTTP server and events of the same size, without anything behind it.

    python -m benchmarks.frontend.floor PORT STEP_SECONDS

Answers POST /v1/completions with `max_tokens` events, one every STEP_SECONDS (0: all at once).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route


def app(step_s: float) -> Starlette:
    """Return an application that streams `max_tokens` events and ignores the rest of the request."""

    async def completions(http: Request) -> StreamingResponse:
        body = await http.json()

        async def events() -> AsyncIterator[bytes]:
            for index in range(body["max_tokens"]):
                if step_s and index:
                    await asyncio.sleep(step_s)
                choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None, "stop_reason": None}
                event = {"id": "cmpl-0123456789abcdef", "created": 0, "model": body["model"], "choices": [choice]}
                yield b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/completions", completions, methods=["POST"])])


if __name__ == "__main__":
    uvicorn.run(
        app(float(sys.argv[2])),
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        access_log=False,
        log_level="error",
    )
