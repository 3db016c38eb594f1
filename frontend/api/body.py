"""Receiving a request's body: bounded in size and time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from frontend.errors import BodyTimeout, BodyTooLarge, ClientGone


async def read_body(request: Request, *, max_nbytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises BodyTooLarge as soon as that is known, BodyTimeout, ClientGone."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_nbytes:
        raise BodyTooLarge(f"the body has {declared} bytes: at most {max_nbytes} are taken")
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_nbytes:
                    raise BodyTooLarge(f"the body has more than {max_nbytes} bytes")
    except TimeoutError as error:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s: {len(body)} bytes did") from error
    except ClientDisconnect as error:
        raise ClientGone("the client left while sending its request") from error
    return bytes(body)
