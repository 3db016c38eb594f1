"""Reading and parsing of request bodies, with limits on size, time and total memory."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar

from starlette.requests import ClientDisconnect, Request

from frontend.errors import BodyTimeout, BodyTooLarge, ClientGone, ServiceUnavailable
from frontend.event_loop import WorkThreads
from frontend.http.read_pace import ReadPace
from frontend.input_limits import check_values

_UNPACED_NBYTES: Final = 64 << 10  # of each body
_PACE_NBYTES_PER_S: Final = 64 << 20
_BURST_S: Final = 0.25


class BodyBudget:
    """Limits on the request bodies of one frontend: their memory, of which one tenant may use half, and their pace.

    A tenant's long bodies together are read at 64 MiB/s: faster uploads would keep the event loop from other clients.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._by_tenant: Counter[str] = Counter()
        self._paces: defaultdict[str, ReadPace] = defaultdict(
            lambda: ReadPace(_PACE_NBYTES_PER_S, _BURST_S)
        )  # by tenant
        self.used_nbytes = 0

    def pause_s(self, tenant: str, nbytes: int, now_s: float) -> float:
        """Return how long to wait after `nbytes` of a long body before more of the tenant's are read."""
        return self._paces[tenant].pause_s(nbytes, now_s)

    def place(self, tenant: str) -> "BodyReservation":
        """Return a reservation for one body; leaving its context releases it. Without a tenant, only the limit on all
        bodies applies.
        """
        return BodyReservation(self, tenant)

    def release(self, tenant: str, nbytes: int) -> None:
        """Release what a body has reserved."""
        self.used_nbytes -= nbytes
        self._by_tenant[tenant] -= nbytes
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]

    def take(self, nbytes: int, tenant: str) -> None:
        """Reserve `nbytes`. Raises ServiceUnavailable if all bodies, or the tenant's, would exceed their limit."""
        if self.used_nbytes + nbytes > self._nbytes:
            raise _no_room(f"request bodies in flight already use the {self._nbytes} bytes reserved for bodies")
        if tenant and self._by_tenant[tenant] + nbytes > self._nbytes // 2:
            raise _no_room(
                f"your request bodies in flight already use {self._by_tenant[tenant]} bytes, and may use half of the "
                f"{self._nbytes} bytes reserved for bodies"
            )
        self.used_nbytes += nbytes
        self._by_tenant[tenant] += nbytes


def _no_room(problem: str) -> ServiceUnavailable:
    return ServiceUnavailable(f"{problem}; retry later", code="bodies", retry_after_s=1.0)


class BodyReservation:
    """Memory reserved by one body."""

    def __init__(self, room: BodyBudget, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self._taken = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._room.release(self._tenant, self._taken)

    def reserve(self, nbytes: int) -> None:
        """Reserve `nbytes` more. Raises ServiceUnavailable."""
        self._room.take(nbytes, self._tenant)
        self._taken += nbytes

    async def take(self, nbytes: int) -> None:
        """Reserve `nbytes` more, and wait until more may be read. Raises ServiceUnavailable."""
        self.reserve(nbytes)
        if (paced := min(nbytes, self._taken - _UNPACED_NBYTES)) > 0:
            pause_s = self._room.pause_s(self._tenant, paced, asyncio.get_running_loop().time())
            if pause_s:
                await asyncio.sleep(pause_s)


B = TypeVar("B")
_LARGE_BODY_NBYTES: Final = 32 << 10


async def read_body(request: Request, place: BodyReservation, *, max_nbytes: int, timeout_s: float) -> bytes:
    """Return the whole body.

    Raises BodyTooLarge as soon as the size is known, ServiceUnavailable if there is no memory for it, BodyTimeout, and
    ClientGone.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_nbytes:
        raise BodyTooLarge(f"the body must have at most {max_nbytes} bytes, got {declared}")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                await place.take(len(chunk))
                body += chunk
                if len(body) > max_nbytes:
                    raise BodyTooLarge(f"the body must have at most {max_nbytes} bytes, got more")
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s: received {len(body)} bytes") from error
    except ClientDisconnect as error:
        raise ClientGone("the client disconnected while sending its request") from error
    return bytes(body)


async def parse_body(
    read: Callable[[bytes], B], body: bytes, threads: WorkThreads, *, tenant: str, max_values: int
) -> B:
    """Return `read(body)`; for a large body in a thread.

    Raises InvalidRequest, and BodyTooLarge for a body of more than `max_values` JSON values.
    """
    if len(body) < _LARGE_BODY_NBYTES:
        return read(body)

    def work() -> B:
        check_values(body, max_values)
        return read(body)

    return await threads.run(work, tenant=tenant, nbytes=len(body))
