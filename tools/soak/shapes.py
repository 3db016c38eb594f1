"""Random slice lists of several kinds, and their effect on bytes. Pure."""

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]

MAX_ROWS = 400


def random_rows(rng: np.random.Generator, room: int) -> Rows:
    """Return slices (source, destination, nbytes), int64 [n, 3], within `room` bytes; destinations do not overlap."""
    kind = int(rng.integers(5))
    if kind == 0:  # one piece
        nbytes = int(rng.integers(1, room + 1))
        return np.array([[rng.integers(room - nbytes + 1), rng.integers(room - nbytes + 1), nbytes]], dtype=np.int64)
    if kind == 1:  # a few bytes
        nbytes = int(rng.integers(1, 65))
        return np.array([[rng.integers(room - nbytes + 1), rng.integers(room - nbytes + 1), nbytes]], dtype=np.int64)
    if kind == 2:  # stripes, like one layer of many blocks
        width = int(rng.integers(16, max(17, room // 64)))
        starts = np.arange(0, room - width + 1, width * int(rng.integers(1, 4)))[:MAX_ROWS]
        return np.stack([rng.permutation(starts), starts, np.full(len(starts), width)], axis=1).astype(np.int64)
    if kind == 3:  # everything, cut into touching pieces, in any order
        cuts = np.unique(np.concatenate([[0, room], rng.integers(0, room, int(rng.integers(1, MAX_ROWS)))]))
        rows = np.stack([cuts[:-1], cuts[:-1], np.diff(cuts)], axis=1)
        return rng.permutation(rows).astype(np.int64)
    edges = np.unique(rng.integers(0, room, 2 * int(rng.integers(2, MAX_ROWS))))  # scattered
    edges = edges[: len(edges) // 2 * 2].reshape(-1, 2)
    lengths = edges[:, 1] - edges[:, 0]
    sources = (rng.random(len(edges)) * (room - lengths + 1)).astype(np.int64)
    return rng.permutation(np.stack([sources, edges[:, 0], lengths], axis=1)).astype(np.int64)


def applied(rows: Rows, source: Bytes, destination: Bytes) -> Bytes:
    """Return a copy of the destination with the slices copied from the source."""
    result = destination.copy()
    for start, end, nbytes in rows.tolist():
        result[end : end + nbytes] = source[start : start + nbytes]
    return result


def first_difference(found: Bytes, *allowed: Bytes) -> str | None:
    """Describe the bytes that equal none of the `allowed` arrays at their position; None if there are none."""
    good: Any = np.zeros(len(found), dtype=bool)
    for one in allowed:
        good |= found == one
    if good.all():
        return None
    at = int(np.argmin(good))
    return f"{int((~good).sum())} of {len(found)} bytes are wrong, first at {at}: {found[at : at + 8].tolist()}"
