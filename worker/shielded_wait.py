"""Waits that run to completion even if the waiting task is cancelled.

A transfer into or out of a slot must end before the slot is released: if a cancelled coroutine merely stopped waiting,
late bytes could overwrite another request's KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(future: Future[T] | asyncio.Future[T]) -> T:
    """Return the result of the future, awaited to completion even if the caller is cancelled; then raise
    CancelledError.
    """
    waiting = asyncio.wrap_future(future) if isinstance(future, Future) else future
    cancelled = False
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not waiting.cancelled():
            waiting.exception()  # retrieve it, so that asyncio does not log it as lost
        raise asyncio.CancelledError
    return waiting.result()


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run blocking work on a thread like `asyncio.to_thread`; a cancelled caller still waits for the thread."""
    return await shielded(asyncio.get_running_loop().run_in_executor(None, work, *args))


async def wait_unless_cancelled(task: asyncio.Task[None]) -> None:
    """Wait for the task; return normally if the task itself was cancelled.

    If the caller is cancelled, cancels the task and waits for its end.
    """
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await shielded(asyncio.ensure_future(asyncio.wait([task])))
        raise
    if not task.cancelled():
        task.result()


async def run_both(one: Coroutine[Any, Any, None], two: Coroutine[Any, Any, None]) -> None:
    """Run two coroutines concurrently.

    If one fails or the caller is cancelled, cancels both and waits for their ends.
    """
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(two)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await shielded(asyncio.ensure_future(asyncio.wait(tasks)))
        raise
