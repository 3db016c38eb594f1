"""A value that is built only while there is a viewer, and once for all viewers."""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedBuild(Generic[T]):
    """Value that `build` returns, at most `every_s` old plus the duration of the build."""

    def __init__(self, build: Callable[[], Awaitable[T]], every_s: float) -> None:
        self._build = build
        self._every_s = every_s
        self._built: tuple[float, T] | None = None  # when, on the monotonic clock
        self._building: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Return the value, built again if it is too old."""
        if self._built is not None and monotonic() - self._built[0] < self._every_s:
            return self._built[1]
        if self._building is None or self._building.done():
            self._building = asyncio.create_task(self._run(), name="console data")
        return await asyncio.shield(self._building)  # a viewer that disconnects must not cancel it for the others

    async def close(self) -> None:
        """Stop building."""
        if self._building is not None:
            self._building.cancel()
            await asyncio.gather(self._building, return_exceptions=True)

    async def _run(self) -> T:
        value = await self._build()
        self._built = monotonic(), value
        return value
