"""How the conductor's long tasks are ended."""

import asyncio

__all__ = ["end"]

_CANCEL_AGAIN_S = 1.0


async def end(task: "asyncio.Task[None] | None") -> None:
    """Returns once the task, if there is one, is over. It is cancelled again and again: what it waits for may take a
    cancellation for its own."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_CANCEL_AGAIN_S)
