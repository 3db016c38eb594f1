"""Two nodes with a bad network between them."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from messenger import Peer, RemoteKey
from tools.soak.namespaces import TwoHosts
from tools.soak.proxy import FaultProxy

NBYTES = 4 << 20


@dataclass
class Line:
    """From node `a` through `proxy` to node `b`, whose whole region `key` opens."""

    a: Any
    b: Any
    proxy: FaultProxy
    peer: Peer
    key: RemoteKey


@pytest.fixture
def line(make_node: Any) -> Iterator[Line]:
    a, b = make_node("a", NBYTES), make_node("b", NBYTES, handshake_timeout_s=0.5)
    a.fill(1)
    with FaultProxy((b.endpoint.tcp_host, b.endpoint.tcp_port)) as proxy:
        host, port = proxy.address
        peer = a.messenger.connect(dataclasses.replace(b.endpoint, tcp_host=host, tcp_port=port))
        line = Line(a, b, proxy, peer, b.grant())
        yield line
        # What is still under way goes through the proxy, so it ends before the proxy does.
        a.messenger.close()
        line.__dict__.clear()


@dataclass
class Wire:
    """From node `a` on host 0 to the process `b` on host 1; the test itself is on host 0."""

    hosts: TwoHosts
    a: Any
    b: Any
    peer: Peer


@pytest.fixture
def wire(namespaces: None, make_node: Any, make_child: Any) -> Iterator[Wire]:
    with TwoHosts() as hosts, hosts.inside(0):
        a = make_node("a", NBYTES, data_host=hosts.addresses[0])
        b = make_child("b", NBYTES, data_host=hosts.addresses[1], prefix=hosts.command(1))
        a.fill(1)
        wire = Wire(hosts, a, b, a.messenger.connect(b.endpoint))
        yield wire
        hosts.heal()
        a.messenger.close()
        wire.__dict__.clear()
