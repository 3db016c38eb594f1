"""Waiting that cancellation does not cut short.

A transfer into or out of a slot must be over before the slot is given back: a cancelled coroutine that merely stopped
waiting would let late bytes land in another request's KV.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


async def shielded(future: Future[T] | asyncio.Future[T]) -> T:
    """The future's result. When cancelled meanwhile, waits all the same, then raises CancelledError."""
    waiting = asyncio.wrap_future(future) if isinstance(future, Future) else future
    cancelled = False
    while not waiting.done():
        try:
            await asyncio.wait([waiting])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not waiting.cancelled():
            waiting.exception()  # seen, so that it is not reported as lost
        raise asyncio.CancelledError
    return waiting.result()


async def in_thread(work: Callable[..., T], *args: Any) -> T:
    """Run blocking work on a thread, as `asyncio.to_thread`, but a cancelled caller waits for the thread."""
    return await shielded(asyncio.get_running_loop().run_in_executor(None, work, *args))


async def wait_unless_cancelled(task: asyncio.Task[None]) -> None:
    """The task's end; that somebody has cancelled it is no failure. A cancelled caller cancels it, too, and waits."""
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        task.cancel()
        await shielded(asyncio.ensure_future(asyncio.wait([task])))
        raise
    if not task.cancelled():
        task.result()


async def run_both(one: Coroutine[Any, Any, None], two: Coroutine[Any, Any, None]) -> None:
    """Run two coroutines at once. A failure, or the caller's cancellation, cancels the other and waits."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(two)]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await shielded(asyncio.ensure_future(asyncio.wait(tasks)))
        raise
