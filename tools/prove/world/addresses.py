"""Addresses of simulated hosts: each has one IPv4 address, its name, and ports that are free.

A host that is named by an IPv4 address has that address; others get 10.0.0.1, 10.0.0.2, ... in the order in which their
first processes were created.
"""

from __future__ import annotations

import ipaddress
import socket as real
from typing import Any

from tools.prove.world.clock import _process
from tools.prove.world.scheduler import world

__all__ = ["ANY", "LOOPBACK", "address_of", "free_port", "getaddrinfo", "host_at"]

ANY, LOOPBACK = "0.0.0.0", "127.0.0.1"
_FIRST_PORT, _NUM_PORTS = 20_000, 40_000
_LONGEST_LOOKUP_S = 0.005


def _hosts() -> list[str]:
    return list(dict.fromkeys(process.host for process in world().processes))


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def address_of(host: str) -> str:
    """Return the IPv4 address of a host by its name. Raises KeyError for a name that no process's host has."""
    if _is_numeric(host):
        return host
    hosts = _hosts()
    if host not in hosts:
        raise KeyError(host)
    number = hosts.index(host) + 1
    return f"10.0.{number >> 8}.{number & 255}"


def host_at(address: str, own: str) -> str:
    """Return the name of the host at an IPv4 address, as host `own` reaches it; the address itself if it is unknown."""
    if address in (LOOPBACK, ANY):
        return own
    return next((host for host in _hosts() if address_of(host) == address), address)


def free_port() -> int:
    """Return the number of a port at which nothing listens on any host."""
    while True:
        port = _FIRST_PORT + world().next_number() % _NUM_PORTS
        if port not in world().network.ports():
            return port


def getaddrinfo(
    host: str | bytes | None,
    port: str | int | None,
    family: int = 0,
    type: int = 0,
    proto: int = 0,
    flags: int = 0,
) -> list[tuple[Any, ...]]:
    """As socket.getaddrinfo, for streams over IPv4. Asking for a name takes a moment."""
    number = 0 if port is None else int(port)
    name = host.decode() if isinstance(host, bytes) else host
    if not name:
        found = ANY if flags & real.AI_PASSIVE else LOOPBACK
    elif _is_numeric(name):
        found = name
    else:
        name.encode("idna")  # raises UnicodeError for the names for which the real one does
        if flags & real.AI_NUMERICHOST:
            raise real.gaierror(real.EAI_NONAME, "Name or service not known")
        if _process() is not None:
            world().park(world().chance.uniform(0.0, _LONGEST_LOOKUP_S))
        try:
            found = LOOPBACK if name == "localhost" else address_of(name)
        except KeyError:
            raise real.gaierror(real.EAI_NONAME, "Name or service not known") from None
    if family not in (0, real.AF_INET):
        raise real.gaierror(real.EAI_ADDRFAMILY, "Address family for hostname not supported")
    return [(real.AF_INET, real.SOCK_STREAM, real.IPPROTO_TCP, "", (found, number))]
