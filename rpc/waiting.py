"""Waiting for whichever of several things comes first."""

import asyncio
from typing import Any

__all__ = ["first_of"]


async def first_of(*either: "asyncio.Future[Any] | asyncio.Event") -> None:
    """Until one of the futures is done or one of the events is set. The futures are left as they are."""
    waits = [asyncio.ensure_future(each.wait()) for each in either if isinstance(each, asyncio.Event)]
    try:
        futures = (each for each in either if not isinstance(each, asyncio.Event))
        await asyncio.wait([*futures, *waits], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
