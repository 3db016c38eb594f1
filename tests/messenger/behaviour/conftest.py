"""Two nodes at rest, and connections on which a test says what it likes."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from messenger.dialing import Dialer
from messenger.link import Link


@pytest.fixture
def pair(make_node: Any) -> Any:
    """Two nodes with regions of 64 KiB."""
    return make_node("a", 1 << 16), make_node("b", 1 << 16)


@pytest.fixture
def greet(make_node: Any, transport: str, patience: float) -> Iterator[Callable[[Any], Link]]:
    """`greet(owner)`: a connection greeted as node "raw" does, under a session of its own."""
    raw = make_node("raw", 4096)
    links: list[Link] = []

    def greet(owner: Any) -> Link:
        dialer = Dialer(
            transports=(raw.messenger._transports[transport],),
            endpoint=owner.endpoint,
            node_id="raw",
            incarnation=1,
            session=secrets.token_bytes(16),
            timeout_s=10 * patience,
        )
        link = dialer.dial(lambda _link: None).link
        links.append(link)
        return link

    yield greet
    for link in links:
        link.cut()
        link.close()
