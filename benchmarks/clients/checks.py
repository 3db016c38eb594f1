"""Checks of a client library: each calls the cluster and returns a short description of the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import aiohttp
import anthropic
import openai

from benchmarks.clients.comparison import ClientCheck


class WrongResult(Exception):
    """A call returned a wrong result."""


def require(condition: bool, otherwise: str) -> None:
    """Raise WrongResult with this text unless the condition holds."""
    if not condition:
        raise WrongResult(otherwise)


async def checked(client: str, name: str, check: Callable[[], Awaitable[str]]) -> ClientCheck:
    """Run a check and return its row; a failed one has the reason."""
    try:
        return ClientCheck(client, name, True, await check())
    except (
        *(openai.OpenAIError, anthropic.AnthropicError, aiohttp.ClientError, WrongResult),
        *(LookupError, TypeError, ValueError, AttributeError),
    ) as error:
        return ClientCheck(client, name, False, f"{type(error).__name__}: {error}"[:200])
