"""What nodes hold of a chain, as a directory tells it: arrays over all its nodes, which may be a thousand."""

from collections.abc import ItemsView, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Match", "Matches"]


class Match(NamedTuple):
    """What one node holds of a chain."""

    blocks: int  # the leading run
    ssd_blocks: int  # of these, how many are on SSD only


class Matches(Mapping[str, Match]):
    """Nodes that hold the chain's first block, by id.

    `roster`: ids of all nodes, sorted; the same object as long as the nodes are the same. `held`, int64
    [2, len(roster)]: blocks that each holds, and of these those on SSD only. `longest`: the most of `held[0]`.
    """

    __slots__ = ("_items", "held", "longest", "roster")

    def __init__(self, roster: tuple[str, ...], held: NDArray[np.int64], longest: int) -> None:
        self.roster = roster
        self.held = held
        self.longest = longest
        self._items: dict[str, Match] | None = None  # the same by id, once somebody asked

    def __getitem__(self, node: str) -> Match:
        return self._by_id()[node]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id())

    def __len__(self) -> int:
        return int(np.count_nonzero(self.held[0]))

    def __repr__(self) -> str:
        return f"Matches({self._by_id()})"

    def items(self) -> ItemsView[str, Match]:
        """In the order of ids."""
        return self._by_id().items()

    def _by_id(self) -> dict[str, Match]:
        if self._items is None:
            where = np.flatnonzero(self.held[0])
            rows = zip(where.tolist(), *self.held[:, where].tolist(), strict=True)
            self._items = {self.roster[index]: Match(blocks, on_ssd) for index, blocks, on_ssd in rows}
        return self._items
