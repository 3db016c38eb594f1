"""Threads for work that would hold up the event loop: large bodies, tokenising, templates. Shared by all models."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class WorkThreads:
    """A bounded pool; work waits for its turn."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Drop what has not begun, wait for what has."""
        self._executor.shutdown(wait=True, cancel_futures=True)
