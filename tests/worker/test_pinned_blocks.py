"""Leased blocks as rows, and the sources of their tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool import Lease, PoolClient, Tail
from messenger import Endpoint
from worker.prefix_blocks import PinnedBlocks

BLOCK = 4


def pinned(first: int, num_blocks: int, *, ssd: int = 0, tail: int = 0, is_own: bool = True) -> PinnedBlocks:
    offsets = np.arange(2 * num_blocks, dtype=np.int64).reshape(2, num_blocks)
    digests = [np.arange(num_blocks * layers, dtype=np.uint64).reshape(num_blocks, layers) for layers in (3, 1)]
    chain = np.arange(16 * num_blocks, dtype=np.uint8).reshape(num_blocks, 16)
    key: Any = None
    lease = Lease(
        "lease", key, Endpoint("pool", 1, "host", "127.0.0.1", 1, ""), offsets, digests, chain, ssd_blocks=ssd
    )
    last = Tail(b"t" * 16, tail, np.array([90, 91]), [np.full(3, 7, np.uint64), np.full(1, 8, np.uint64)])
    client = PoolClient("unix:/nowhere", owner="me", owner_incarnation=1)
    return PinnedBlocks(first, lease, client, is_own, BLOCK, last if tail else None, tail)


def test_a_tail_is_the_row_after_the_blocks() -> None:
    pin = pinned(5, 2, tail=3)
    assert (pin.num_rows, pin.end) == (3, 7)
    assert pin.valid.tolist() == [4, 4, 3]
    assert pin.offsets[:, 2].tolist() == [90, 91]
    assert [each.shape for each in pin.digests] == [(3, 3), (3, 1)]
    assert pin.digests[1][2, 0] == 8
    assert pin.keys[2].tobytes() == b"t" * 16


def test_a_lease_may_be_of_a_tail_alone() -> None:
    pin = pinned(0, 0, tail=2)
    pin.right = range(1)
    assert pin.valid.tolist() == [2]
    assert pin.tokens_by_tier(2) == (2, 0, 0)


@pytest.mark.parametrize(
    ("ssd", "right", "num_tokens", "tiers"),
    [
        (0, range(4), 100, (15, 0, 0)),
        (1, range(4), 100, (11, 4, 0)),
        (3, range(4), 100, (3, 12, 0)),
        (2, range(1, 4), 100, (3, 8, 0)),  # the first was in the worker's own pages
        (3, range(2, 4), 100, (3, 4, 0)),  # the first two were in the worker's own pages
        (1, range(2), 100, (8, 0, 0)),  # the one from SSD was damaged
        (1, range(4), 22, (10, 4, 0)),  # the prompt's last token is computed
        (1, range(4), 12, (4, 0, 0)),  # reuse was cut
        (0, range(0), 100, (0, 0, 0)),
    ],
)
def test_tokens_are_told_by_tier_as_they_were_read(
    ssd: int, right: range, num_tokens: int, tiers: tuple[int, int, int]
) -> None:
    pin = pinned(2, 3, ssd=ssd, tail=3)
    pin.right = right
    assert pin.tokens_by_tier(num_tokens) == tiers


def test_what_another_host_gave_is_told_apart() -> None:
    pin = pinned(0, 2, ssd=1, is_own=False)
    pin.right = range(2)
    assert pin.tokens_by_tier(100) == (0, 0, 8)
