"""Receiving a request's body, bounded in size and time, and understanding it."""

import asyncio
from typing import Final, TypeVar

from starlette.requests import ClientDisconnect, Request

from frontend.api.fields import RequestModel
from frontend.api.models import parse
from frontend.body_room import Place
from frontend.errors import BodyTimeout, BodyTooLarge, ClientGone
from frontend.work_threads import WorkThreads

B = TypeVar("B", bound=RequestModel)
_LARGE_BODY_NBYTES: Final = 32 << 10


async def read_body(request: Request, place: Place, *, max_nbytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as that is known, ServiceUnavailable where there is no room for it,
    BodyTimeout, ClientGone."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_nbytes:
        raise BodyTooLarge(f"the body has {declared} bytes: at most {max_nbytes} are taken")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                place.take(len(chunk))
                body += chunk
                if len(body) > max_nbytes:
                    raise BodyTooLarge(f"the body has more than {max_nbytes} bytes")
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s: {len(body)} bytes did") from error
    except ClientDisconnect as error:
        raise ClientGone("the client left while sending its request") from error
    return bytes(body)


async def parse_body(model: type[B], body: bytes, threads: WorkThreads) -> B:
    """The body as a model; large ones off the event loop. Raises InvalidRequest."""
    if len(body) < _LARGE_BODY_NBYTES:
        return parse(model, body)
    return await threads.run(lambda: parse(model, body))
