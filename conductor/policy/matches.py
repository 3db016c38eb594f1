"""What pool nodes hold of a prompt, as arrays over a roster of pool nodes: one event may tell of a thousand of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NO_MATCHES", "PoolMatch", "PoolMatches"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """What one pool node holds of a prompt's leading blocks: `blocks`, of which `ssd_blocks` are on SSD only.

    `replica`: the match_key of the Copy that brought a part of them here; 0 when none did.
    """

    pool: str
    blocks: int
    ssd_blocks: int = 0
    replica: int = 0


class PoolMatches:
    """Pool nodes `roster`, sorted, hold `blocks` (int64, one each; 0: nothing), of which `ssd_blocks` are on SSD only.

    Nothing of it may be changed. Equal are those that tell of the same matches. A roster that is the very same object
    as before costs its readers nothing. `replicas`: per pool node, the match_key of the Copy that brought a part.
    """

    __slots__ = ("blocks", "replicas", "roster", "ssd_blocks")

    def __init__(
        self, roster: tuple[str, ...], blocks: Ints, ssd_blocks: Ints, replicas: Mapping[str, int] | None = None
    ) -> None:
        self.roster = roster
        self.blocks = blocks
        self.ssd_blocks = ssd_blocks
        self.replicas = replicas or {}

    @classmethod
    def of(cls, *matches: PoolMatch) -> "PoolMatches":
        """The same from one object per pool node; the last word on a pool node counts."""
        found = sorted({match.pool: match for match in matches}.values(), key=lambda match: match.pool)
        return cls(
            tuple(match.pool for match in found),
            np.array([match.blocks for match in found], np.int64),
            np.array([match.ssd_blocks for match in found], np.int64),
            {match.pool: match.replica for match in found if match.replica},
        )

    def __iter__(self) -> Iterator[PoolMatch]:
        held = np.flatnonzero(self.blocks)
        rows = zip(held.tolist(), self.blocks[held].tolist(), self.ssd_blocks[held].tolist(), strict=True)
        for index, blocks, ssd_blocks in rows:
            pool = self.roster[index]
            yield PoolMatch(pool, blocks, ssd_blocks, self.replicas.get(pool, 0))

    def __len__(self) -> int:
        return int(np.count_nonzero(self.blocks))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolMatches) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"PoolMatches.of({', '.join(map(repr, self))})"


NO_MATCHES = PoolMatches.of()
