"""Events of a streamed completion."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp


async def completion_events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the decoded events of a stream. Raises RuntimeError for a refusal and for an event that is an error."""
    if reply.status != 200:
        raise RuntimeError(f"HTTP {reply.status}: {await reply.text()}")
    async for line in reply.content:
        if not line.startswith(b"data: {"):
            continue
        event: dict[str, Any] = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        yield event
