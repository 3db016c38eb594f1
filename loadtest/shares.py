"""How many processes send, and which requests each of them sends. Pure.

One event loop writes requests and reads events of answers at a rate that is limited by one core's Python; beyond it
requests leave late and tokens are seen late, which would be put down to the server.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadtest.plan import PlannedRequest

REQUEST_COST_S = 0.8e-3
"""Processor time that one request takes of a sender: body, connection, headers (benchmarks/load_senders.py)."""
EVENT_COST_S = 3e-5
"""Processor time that one event of an answer takes."""
BUSY_SHARE = 0.5
"""A sender is planned to be busy so much of the time: a queue at its door would be measured as the server's."""
_PEAK_WINDOW_S = 5.0


def choose_senders(requests: Sequence[PlannedRequest], *, speed: float, cores: int) -> int:
    """Processes for this load: as many as keep each at most half busy in the busiest five seconds, at most one for
    every two cores, since a server on the same machine has to live too."""
    if not requests:
        return 1
    due = np.array([r.arrival_s for r in requests]) / speed
    costs = np.array([REQUEST_COST_S + EVENT_COST_S * r.max_tokens for r in requests])
    total = np.concatenate([[0.0], np.cumsum(costs)])
    ends = np.searchsorted(due, due + _PEAK_WINDOW_S, side="right")
    busiest = float((total[ends] - total[: len(costs)]).max()) / _PEAK_WINDOW_S
    return int(min(max(np.ceil(busiest / BUSY_SHARE), 1), max(cores // 2, 1), len(requests)))


def split(requests: Sequence[PlannedRequest], senders: int) -> list[list[PlannedRequest]]:
    """The requests in turns, so that each sender has a like share of every moment. Never an empty share."""
    shares = [list(requests[number::senders]) for number in range(senders)]
    return [share for share in shares if share] or [[]]


def split_limit(limit: int | None, senders: int) -> list[int | None]:
    """A limit of concurrent requests, divided: the parts add up to it. `senders` must not exceed it."""
    if limit is None:
        return [None] * senders
    return [limit // senders + (number < limit % senders) for number in range(senders)]
