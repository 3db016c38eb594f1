"""Order of the endpoints for a request. Pure.

A dialogue stays with one endpoint, which holds its KV in a cache or, as Moonpool's API servers do, the ids of its
answers. Which one follows from the names of the endpoints alone (rendezvous hashing), so that all pickers agree, also
after a restart, and a new endpoint takes over no more than its share. An endpoint whose load exceeds the mean by more
than a bound loses its dialogues to the next ones in their order until it has recovered (consistent hashing with bounded
loads; V. Mirrokni, M. Thorup and M. Zadimoghaddam, SODA 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

__all__ = ["EndpointLoad", "ranked"]

_MOST_OF_MEAN: Final = 1.25


@dataclass(frozen=True, slots=True)
class EndpointLoad:
    """An endpoint, host:port, and the requests that it has."""

    address: str
    num_requests: int


def ranked(endpoints: Sequence[EndpointLoad], key: bytes, *, is_sticky: bool, slack: int) -> list[str]:
    """Return the addresses of the endpoints, best first.

    `is_sticky`: requests with this key belong together, and stay with their endpoint while its load is at most 1.25
    times the mean and `slack` requests. All others go to the least loaded endpoint; `key` breaks ties.
    """
    by_weight = sorted(endpoints, key=lambda each: _weight(each.address, key), reverse=True)
    order = sorted(by_weight, key=lambda each: each.num_requests)
    if is_sticky and order:
        most = _MOST_OF_MEAN * sum(each.num_requests for each in order) / len(order) + slack
        first = next(each for each in by_weight if each.num_requests <= most)
        order = [first, *(each for each in order if each is not first)]
    return [each.address for each in order]


def _weight(address: str, key: bytes) -> bytes:
    return blake3(len(key).to_bytes(4, "little") + key + address.encode()).digest(8)
